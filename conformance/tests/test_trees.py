"""Tensors are found and replaced wherever operators take them."""

import torch
from m3hal_conformance import map_tensors, tensors

from m3hal.layouts import KVLayout
from m3hal.ops import QKNorms

X = torch.ones(2)


def test_paths_name_the_place():
    """Bare, in tuples, in dataclasses; None and numbers are no tensors."""
    cache = KVLayout("hnd", "float32", 4, 1, 2, False).empty(1)
    found = dict(tensors({"x": X, "pair": (X, 3), "cache": cache, "norms": QKNorms(X, X)}))
    assert list(found) == ["x", "pair.0", "cache.buf", "norms.q", "norms.k"]
    assert found["cache.buf"] is cache.buf


def test_one_tensor_in_two_places_stays_one():
    """A cache that is both source and destination must still be one cache."""
    cache = KVLayout("hnd", "float32", 4, 1, 2, False).empty(1)
    mapped = map_tensors({"src": cache, "dst": cache, "x": [X]}, torch.clone)
    assert mapped["src"].buf is mapped["dst"].buf
    assert mapped["src"].buf is not cache.buf
    assert mapped["src"].layout == cache.layout
    assert torch.equal(mapped["x"][0], X)
