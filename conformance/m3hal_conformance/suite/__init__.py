"""Every case of the suite; one file per family of operators."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from m3hal import ops
from m3hal_conformance.case import Case


@cache
def all_cases() -> tuple[Case, ...]:
    """Every case, in the order of the operators."""
    from m3hal_conformance.suite import (
        attention,
        context_parallel,
        drafting,
        engine,
        expert_lora,
        experts,
        extreme_batches,
        extreme_caches,
        extremes,
        forced_routing,
        hidden,
        indexer,
        insert,
        kv_cache,
        large,
        norms,
        projections,
        qkv_insert,
        quantised,
        ranking,
        ranks,
        rope_activation,
        shared_expert,
        shipped,
        stored_caches,
        verify,
        whole_layer,
    )

    modules = (norms, projections, rope_activation, kv_cache, indexer, ranking, attention, verify, hidden, experts)
    fused = (insert, qkv_insert, context_parallel, ranks, drafting, whole_layer)
    stored = (stored_caches, quantised, extremes, extreme_caches, extreme_batches, shipped, large)
    optional = (shared_expert, expert_lora, forced_routing)
    found = [case for module in (*modules, *fused, *stored, *optional) for case in module.CASES]
    found += [*engine.engine_cases(found), *shipped.production_cases(found)]
    return tuple(sorted(found, key=lambda case: ops.NAMES.index(case.operator)))


def select(
    *, operators: Iterable[str] = (), ids: Iterable[str] = (), quick: bool = False, layouts: Iterable[str] = ()
) -> tuple[Case, ...]:
    """The cases of some operators, with some ids (or the beginnings of ids), of ``--quick``."""
    operators, ids, layouts = tuple(operators), tuple(ids), tuple(layouts)
    return tuple(
        case
        for case in all_cases()
        if (not operators or case.operator in operators)
        and (not ids or any(case.id == i or case.id.startswith(i.rstrip("/") + "/") for i in ids))
        and (not quick or case.quick)
        and (not layouts or case.layout in layouts)
    )
