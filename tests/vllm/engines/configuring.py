"""No engine: what becomes of many settings in vLLM's front-end process, where a user would see it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from _engine import POLICY, main
from vllm import ModelRegistry
from vllm.config import CompilationConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models.config import MODELS_CONFIG_MAP

import m3hal
from m3hal.vllm import plugin, registry
from m3hal.vllm.cache import backend_name
from m3hal.vllm.config import keep_out_of_graphs
from m3hal.vllm.planning import make_plan, policy_of
from m3hal.vllm.support import refusals

TEXT, VISION = plugin.PUBLISHED
ABSENT = m3hal.Manifest(
    name="absent",
    vendor="m3hal tests",
    api=">=1,<2",
    devices=("cpu",),
    probe=f"{__name__}:probe",
    operators={"rms_norm": (m3hal.Impl(f"{__name__}:probe"),)},
)


def probe(device: str) -> str | None:
    return "its accelerator card is not plugged in"


@dataclass
class Asker:
    """Makes vLLM's configuration for the tiny checkpoint and records, by case, what became of it."""

    checkpoint: str
    found: dict[str, Any] = field(default_factory=dict)

    def __call__(self, case: str, **settings: Any) -> Any:
        defaults = {"dtype": "float32", "max_model_len": 2048, "additional_config": POLICY}
        with mock.patch.object(plugin.logger, "warning") as warning:
            try:
                config = EngineArgs(self.checkpoint, **{**defaults, **settings}).create_engine_config()
            except Exception as error:
                config, outcome = None, {"error": str(error)}
            else:
                outcome = described(config)
        said = [call.args[0] % call.args[1:] for call in warning.call_args_list]
        self.found[case] = {**outcome, "warnings": said}
        return config


def described(config: Any) -> dict[str, Any]:
    model = config.model_config
    return {
        "architecture": model.architecture,
        "architectures": model.hf_config.architectures,
        "class": model._model_info.architecture,
        "multimodal": model.is_multimodal_model,
        "block_size": config.cache_config.block_size,
        "additional_config": config.additional_config,
    }


def run(job: dict[str, Any]) -> dict[str, Any]:
    m3hal.register(ABSENT)
    ask = Asker(job["checkpoint"])
    config = ask("served")
    try:
        make_plan(config, replace(policy_of(config), fingerprint="0123456789abcdef"))
    except m3hal.M3halError as error:
        ask.found["another plan on a rank"] = {"error": str(error)}
    asked_directly(ask, config)
    exported(ask, Path(job["checkpoint"]))
    refused(ask)
    ask.found["handshake"] = handshakes(ask)
    ask.found["graphs"] = graphs()
    left_alone(ask)
    ask.found["register again"] = registered_again()
    return ask.found


def asked_directly(ask: Asker, config: Any) -> None:
    """Where vLLM itself fails before it asks: on drafters that it can't inspect, on what no CPU has."""
    settings = {
        "drafter": (config, "speculative_config", mock.Mock(method="mtp")),
        "sleep": (config.model_config, "enable_sleep_mode", True),
        "eplb": (config.parallel_config, "enable_eplb", True),
        "data and expert parallelism": (config.parallel_config, "data_parallel_size", 2),
        "context parallelism": (config.parallel_config, "decode_context_parallel_size", 2),
    }
    for case, (where, name, value) in settings.items():
        both = case == "data and expert parallelism"
        with (
            mock.patch.object(where, name, value),
            mock.patch.object(config.parallel_config, "enable_expert_parallel", both),
        ):
            ask.found[case] = {"error": next(refusals(config))}


def graphs() -> dict[str, Any]:
    """What becomes of vLLM's settings for CUDA graphs on a GPU, by who serves the experts."""
    found = {}
    for server, splits in (("triton", None), ("reference", None), ("reference", []), ("triton", ["vllm::short_conv"])):
        compilation = CompilationConfig(cudagraph_mode="FULL_AND_PIECEWISE", splitting_ops=splits)
        row = mock.Mock(operator="moe_experts", server=server)
        keep_out_of_graphs(compilation, mock.Mock(choices=[row], device="cuda:sm_90"))
        found[f"{server} {splits}"] = [compilation.cudagraph_mode.name, compilation.splitting_ops]
    return {**found, "vLLM's": CompilationConfig._attention_ops}


def exported(ask: Asker, folder: Path) -> None:
    """The engine's own plan as a file, pinned, and pinned after an edit."""
    file = folder.parent / "plan.json"
    ask("plan exported", additional_config={"m3hal": {"backend": "reference", "export_plan": str(file)}})
    ask.found["plan"] = json.loads(file.read_text())
    ask("plan pinned", additional_config={"m3hal": {"plan": str(file)}})
    file.write_text(file.read_text().replace('"impl_id": "', '"impl_id": "0'))
    file.write_text(file.read_text().replace(ask.found["plan"]["fingerprint"], "0" * 16))
    ask("plan pinned elsewhere", additional_config={"m3hal": {"plan": str(file)}})
    tables = {"cpu": {"backend": "reference"}, "cuda:*": {"backend": "absent"}}
    ask("policy by device", additional_config={"m3hal": {"backend": "vllm", "devices": tables}})


def handshakes(ask: Asker) -> dict[str, str]:
    """What vLLM's NIXL connector compares with its peer, by how the caches lie."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import compute_nixl_compatibility_hash

    settings: dict[str, dict[str, Any]] = {
        "one": {},
        "the same": {"max_num_seqs": 4},
        "other index keys": {"attention_config": {"indexer_kv_dtype": "fp8"}},
    }
    configs = {name: ask(f"handshake of {name}", **more) for name, more in settings.items()}
    found = {
        name: compute_nixl_compatibility_hash(config, backend_name("hnd", config)) for name, config in configs.items()
    }
    return {
        **found,
        "other pages": compute_nixl_compatibility_hash(configs["one"], backend_name("nhd", configs["one"])),
    }


def refused(ask: Asker) -> None:
    ask("unknown backend", additional_config={"m3hal": {"backend": "refrence"}})
    ask("unusable backend", additional_config={"m3hal": {"backend": "absent"}})
    ask("unknown key", additional_config={"m3hal": {"backnd": "reference"}})
    ask("not an object", additional_config={"m3hal": "reference"})
    ask("page size", block_size=64)
    ask("kv format", kv_cache_dtype="fp8_e5m2")
    ask("dtype", dtype="float16")
    ask("pipeline parallelism", pipeline_parallel_size=2)
    ask("lora", enable_lora=True)
    ask("data parallelism", data_parallel_size=2)
    connector = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    ask("kv transfer", kv_transfer_config=connector)
    ask(
        "kv transfer of codes",
        kv_transfer_config={**connector, "kv_connector": "ExampleConnector"},
        kv_cache_dtype="nvfp4",
    )
    ask("kv offloading", kv_offloading_size=1.0)
    ask("routed experts", enable_return_routed_experts=True)
    ask("prompt embeddings", enable_prompt_embeds=True)
    ask("moe backend", moe_backend="triton")
    ask("online quantisation", quantization="fp8")
    ask("stock attention option", attention_config={"minimax_m3_msa_decode_backend": "cutlass"})
    ask("index format", attention_config={"indexer_kv_dtype": "nvfp4"}, kv_cache_dtype="fp8_per_token_head")
    with mock.patch.dict(os.environ, {"VLLM_BATCH_INVARIANT": "1"}):
        ask("batch invariance")
    ask("attention backend", attention_backend="CPU_ATTN")
    ask("skipped layers", kv_cache_dtype_skip_layers=["0"])
    ask("fast prefill", kv_sharing_fast_prefill=True)
    ask("another router", hf_overrides={"text_config": {"scoring_func": "softmax"}})
    with mock.patch("vllm.__version__", "0.34.1"):
        ask("version")
    with entry(VISION, Entry("other_vendor.model", "Other")):
        ask("another plugin")
        ask("another plugin, m3hal not asked for", additional_config={})


def left_alone(ask: Asker) -> None:
    ask("not asked for, stock class broken", additional_config={})
    working = replace(ModelRegistry.models[VISION], stock=Entry("vllm.models.minimax_m3", "Stock"))
    with entry(VISION, working), mock.patch.object(registry, "_has_torchvision", return_value=True):
        ask("not asked for", additional_config={})
        ask("backend vllm", additional_config={"m3hal": {"backend": "vllm"}})
        with mock.patch("m3hal.vllm.planning.device_of", return_value="cuda:sm_80"):
            ask("auto without a kernel for the device", additional_config={"m3hal": {}})
        ask("asked for, stock class works")
        with mock.patch.dict(os.environ, {"M3HAL_BACKEND": "reference"}):
            ask("asked for by the environment", additional_config={})
        with mock.patch.dict(os.environ, {"M3HAL_BACKEND": "", "M3HAL_CONFIG": ""}):
            ask("empty variables", additional_config={})


@dataclass(frozen=True)
class Entry:
    """A multimodal model in vLLM's registry that can be inspected."""

    module_name: str
    class_name: str

    def inspect_model_cls(self) -> Any:
        info = ModelRegistry.models[plugin.OURS].inspect_model_cls()
        return replace(info, architecture=self.class_name, supports_multimodal=True)

    def load_model_cls(self) -> Any:
        return torch.nn.Module


@contextmanager
def entry(architecture: str, new: Any) -> Iterator[None]:
    """Another entry in vLLM's registry, for a while."""
    old = ModelRegistry.models[architecture]
    ModelRegistry.models[architecture] = new
    try:
        yield
    finally:
        ModelRegistry.models[architecture] = old


def registered_again() -> dict[str, Any]:
    """Registering twice more changes neither table; a registration that breaks says so and returns."""
    before = dict(ModelRegistry.models), dict(MODELS_CONFIG_MAP)
    plugin.register()
    plugin.register()
    unchanged = before == (dict(ModelRegistry.models), dict(MODELS_CONFIG_MAP))
    with (
        mock.patch.object(plugin, "_register", side_effect=RuntimeError("a broken import")),
        mock.patch.object(plugin.logger, "warning") as warning,
    ):
        plugin.register()
    return {"unchanged": unchanged, "warnings": [call.args[0] % call.args[1:] for call in warning.call_args_list]}


if __name__ == "__main__":
    main(run)
