"""Backends that are wrong on purpose, one fault each: what the conformance suite must reject."""

from __future__ import annotations

from m3hal_broken_zoo import (
    attending,
    drafted,
    expert,
    grouped,
    hostile,
    inserted,
    optional,
    paged,
    process,
    quantised,
    rows,
    selection,
    shipped,
    stored,
    unseen,
    whole,
)
from m3hal_broken_zoo._zoo import MUTANTS, Mutant

__all__ = [
    "MUTANTS",
    "Mutant",
    "attending",
    "drafted",
    "expert",
    "grouped",
    "hostile",
    "inserted",
    "optional",
    "paged",
    "process",
    "quantised",
    "rows",
    "selection",
    "shipped",
    "stored",
    "unseen",
    "whole",
]
