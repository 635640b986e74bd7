"""One engine with an EAGLE3 drafter of made-up weights: it drafts nonsense from what the target exports to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from _engine import complete, main, start
from safetensors.torch import save_file

HIDDEN, VOCABULARY, HEADS, DIM = 256, 512, 2, 128
#: whose input the drafter sees
LAYERS = (1, 2, 3)


def run(job: dict[str, Any]) -> dict[str, Any]:
    drafter = write_drafter(Path(job["work"]) / "drafter")
    llm = start(
        job["checkpoint"],
        speculative_config={"method": "eagle3", "model": str(drafter), "num_speculative_tokens": 2},
        max_num_batched_tokens=2048,
        disable_log_stats=False,
    )
    seen = first_input_of_drafter(llm)
    completions = complete(llm, job["prompts"][:1])
    exported = [rows.tolist() for rows in seen[0][: len(job["prompts"][0])].chunk(len(LAYERS), dim=-1)]
    completions += complete(llm, job["prompts"][1:])
    metrics = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    return {
        "completions": completions,
        "drafted": metrics["vllm:spec_decode_num_draft_tokens"],
        "furthest": furthest(job["checkpoint"], job["prompts"][0], exported),
    }


def first_input_of_drafter(llm: Any) -> list[torch.Tensor]:
    """What its first projection takes: rows of all exported streams side by side; filled while the engine runs."""
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    seen: list[torch.Tensor] = []

    def keep(module: Any, inputs: Any) -> None:
        if inputs[0].any():
            seen.append(inputs[0].clone())

    worker.model_runner.drafter.model.model.fc.register_forward_pre_hook(keep)
    return seen


def furthest(checkpoint: str, prompt: list[int], exported: list[Any]) -> list[float]:
    """Of each exported stream: the largest distance from transformers' input of that layer."""
    from m3hal.checkpoint import oracle

    model = oracle.load(checkpoint)
    with torch.no_grad():
        states = model(input_ids=torch.tensor([prompt]), output_hidden_states=True).hidden_states
    pairs = zip(LAYERS, exported, strict=True)
    return [float((states[layer][0] - torch.tensor(rows)).abs().max()) for layer, rows in pairs]


def write_drafter(folder: Path) -> Path:
    draw = torch.Generator().manual_seed(3)
    shapes = {
        "fc.weight": (HIDDEN, len(LAYERS) * HIDDEN),
        "lm_head.weight": (VOCABULARY, HIDDEN),
        "midlayer.self_attn.q_proj.weight": (HEADS * DIM, 2 * HIDDEN),
        "midlayer.self_attn.k_proj.weight": (HEADS * DIM, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": (HEADS * DIM, 2 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": (HIDDEN, HEADS * DIM),
        "midlayer.mlp.gate_proj.weight": (HIDDEN, HIDDEN),
        "midlayer.mlp.up_proj.weight": (HIDDEN, HIDDEN),
        "midlayer.mlp.down_proj.weight": (HIDDEN, HIDDEN),
    }
    weights = {name: torch.randn(shape, generator=draw) * shape[1] ** -0.5 for name, shape in shapes.items()}
    norms = ("norm", "midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm")
    weights |= {f"{name}.weight": torch.ones(HIDDEN) for name in norms}
    folder.mkdir(parents=True)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": DIM,
        "vocab_size": VOCABULARY,
        "draft_vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": list(LAYERS)},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


if __name__ == "__main__":
    main(run)
