"""One engine with caches of a chosen format: what it completes, and what its allocator gave the caches."""

from __future__ import annotations

from typing import Any

from _engine import complete, main, start

#: of memory for caches
BYTES = 64 << 20


def run(job: dict[str, Any]) -> dict[str, Any]:
    llm = start(
        job["checkpoint"],
        kv_cache_dtype=job["kv"],
        attention_config={"indexer_kv_dtype": job["index"]},
        kv_cache_memory_bytes=BYTES,
        max_num_batched_tokens=512,
    )
    allocated, layouts = llm.apply_model(caches)[0]
    return {
        "completions": complete(llm, job["prompts"]),
        "bytes": BYTES,
        "allocated": allocated,
        "blocks": llm.llm_engine.vllm_config.cache_config.num_gpu_blocks,
        "layouts": layouts,
    }


def caches(model: Any) -> tuple[int, list[Any]]:
    """Bytes of all caches, shared memory once, and each cache's page map and format."""
    from m3hal.vllm.cache import CacheLayer

    found = [module for module in model.modules() if isinstance(module, CacheLayer)]
    memory = {layer.kv_cache.untyped_storage().data_ptr(): layer.kv_cache.untyped_storage() for layer in found}
    layouts = sorted({(layer.layout.has_values, layer.layout.kind, layer.layout.format) for layer in found})
    return sum(storage.nbytes() for storage in memory.values()), layouts


if __name__ == "__main__":
    main(run)
