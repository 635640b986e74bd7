"""Who serves, and what is refused before an engine starts; one process asks vLLM's own configuration many times."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.engine

PUBLISHED = "MiniMaxM3SparseForConditionalGeneration"
OURS = "M3HalForCausalLM"


@pytest.fixture(scope="module")
def found(engine: Any, checkpoint: Any) -> Any:
    return engine("configuring", checkpoint=checkpoint)


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        ("unknown backend", "no backend 'refrence' is installed. Did you mean 'reference'?"),
        (
            "unusable backend",
            "backend 'absent' is not usable on cpu: in-process: its accelerator card is not plugged in",
        ),
        ("unknown key", "'backnd' from the engine's additional_config['m3hal'] is no key of m3hal's configuration."),
        ("not an object", "must be an object such as"),
        ("page size", "--block-size 64 differs from the model's sparse_block_size 128"),
        ("kv format", "m3hal's KV cache holds float32, bfloat16, fp8, fp8_e4m3, nvfp4; --kv-cache-dtype fp8_e5m2 is"),
        ("dtype", "m3hal computes in float32 or bfloat16; --dtype is float16"),
        ("pipeline parallelism", "does not support pipeline parallelism"),
        ("lora", "does not support LoRA"),
        ("data parallelism", "does not support data parallelism (--data-parallel-size)"),
        ("data and expert parallelism", "--data-parallel-size together with --enable-expert-parallel"),
        ("context parallelism", "does not support context parallelism"),
        ("eplb", "does not support rebalancing experts (--enable-eplb)"),
        ("sleep", "does not support sleep mode (--enable-sleep-mode)"),
        ("kv transfer", "does not support moving KV caches between engines other than by ExampleConnector"),
        ("kv transfer of codes", "does not support moving KV caches between engines other than by ExampleConnector"),
        ("kv offloading", "does not support moving KV caches out of the device"),
        ("routed experts", "does not support reporting routed experts"),
        ("prompt embeddings", "does not support prompts as embeddings"),
        ("moe backend", "does not support choosing a backend of vLLM's (--moe-backend)"),
        ("online quantisation", "does not serve quantisation 'fp8 of an unquantised checkpoint'"),
        ("stock attention option", "does not support vLLM's options for its own MiniMax-M3"),
        ("index format", "--kv-cache-dtype fp8_per_token_head is not supported"),
        ("attention backend", "does not support choosing a backend of vLLM's"),
        ("skipped layers", "does not support keeping layers out of the KV cache's format"),
        ("fast prefill", "does not support sharing KV caches between layers"),
        ("drafter", "does not support speculative decoding other than 'ngram' and 'eagle3'"),
        ("another router", "implements MiniMax-M3 with scoring_func 'sigmoid'; this checkpoint has 'softmax'"),
        ("version", "vLLM 0.34.1 is outside the supported range >=0.32,<0.34"),
        ("another plugin", f"{PUBLISHED} is held by another vLLM plugin, other_vendor.model"),
        (
            "plan pinned elsewhere",
            "can't be made here (rms_norm at dense_attention, sparse_attention, dense_mlp, moe was",
        ),
        ("another plan on a rank", "the engine's front end planned 0123456789abcdef"),
    ],
)
def test_refusal_is_one_sentence(found: Any, case: str, sentence: str) -> None:
    """The message names what is wrong, on one line."""
    message = found[case]["error"]
    assert sentence in message
    assert "\n" not in message


def test_handshake_tells_the_layout(found: Any) -> None:
    """Engines whose pages or index keys lie otherwise refuse each other: vLLM's own hash does not know index keys."""
    hashes = dict(found["handshake"])
    one = hashes.pop("one")
    assert hashes.pop("the same") == one
    assert one not in hashes.values()
    assert len(set(hashes.values())) == 2


def test_no_graph_holds_attention(found: Any) -> None:
    """Compiled graphs are split at it, unless nothing is to be split; the reference's experts turn graphs off."""
    graphs = found["graphs"]
    assert graphs["triton None"] == ["FULL_AND_PIECEWISE", [*graphs["vLLM's"], "m3hal::attention"]]
    assert graphs["triton ['vllm::short_conv']"][1] == ["vllm::short_conv", "m3hal::attention"]
    assert graphs["reference None"][0] == "NONE"
    assert graphs["reference []"] == ["NONE", []]


def test_batch_invariance_is_a_requirement(found: Any) -> None:
    """VLLM_BATCH_INVARIANT=1 asks every implementation for the trait; the reference does not have it, and says so."""
    assert "the policy requires batch_invariant=yes; it declares no" in found["batch invariance"]["error"]


def test_served_by_m3hal(found: Any) -> None:
    """Asked for, the configuration carries m3hal's architecture, a page of one block, and the plan's fingerprint."""
    served = found["served"]
    assert (served["architecture"], served["architectures"], served["class"]) == (OURS, [OURS], OURS)
    assert served["block_size"] == 128
    assert len(served["additional_config"]["m3hal"].pop("fingerprint")) == 16
    assert served["additional_config"] == {"m3hal": {"backend": "reference"}}


def test_the_engines_plan_is_written_and_pinned(found: Any) -> None:
    """The file holds the plan that serves; pinned, the same plan comes out, under the same fingerprint."""
    written = found["plan"]
    assert written["sites"]["sparse_attention"]["kv_format"] == "float32"
    for case in ("plan exported", "plan pinned"):
        assert found[case]["additional_config"]["m3hal"]["fingerprint"] == written["fingerprint"], case
    assert {row["reason"] for row in written["choices"]} >= {"first choice"}


def test_the_policy_of_the_engines_device_counts(found: Any) -> None:
    """Of tables by device, the one that stands for vLLM's device; another machine's does no harm."""
    assert found["policy by device"]["architecture"] == OURS


def test_a_different_plan_names_both(found: Any) -> None:
    """A rank whose plan differs from the front end's stops, and says both fingerprints."""
    assert "this process plans" in found["another plan on a rank"]["error"]


@pytest.mark.parametrize("case", ["asked for, stock class works", "asked for by the environment"])
def test_served_by_m3hal_as_text_only(found: Any, case: str) -> None:
    """Also where vLLM could serve images with its own class; then nothing multimodal stays in the configuration."""
    assert (found[case]["architecture"], found[case]["class"], found[case]["multimodal"]) == (OURS, OURS, False)


@pytest.mark.parametrize("case", ["not asked for", "empty variables", "backend vllm"])
def test_stock_model_stays(found: Any, case: str) -> None:
    """Without a value for m3hal, or with backend 'vllm', vLLM's class, name and images stay, and nothing is said."""
    kept = found[case]
    assert (kept["architecture"], kept["architectures"], kept["class"]) == (PUBLISHED, [PUBLISHED], "Stock")
    assert kept["multimodal"] is True
    assert "fingerprint" not in str(kept["additional_config"])
    assert kept["warnings"] == []


def test_auto_leaves_an_accelerator_to_the_stock_model(found: Any) -> None:
    """Where auto finds no kernel for the device, vLLM's own model serves, and one warning says why."""
    outcome = found["auto without a kernel for the device"]
    assert (outcome["architecture"], outcome["class"]) == (PUBLISHED, "Stock")
    (warning,) = outcome["warnings"]
    assert warning.startswith(f"vLLM's own model serves {PUBLISHED} instead of m3hal's: ")


def test_stock_failure_stays(found: Any) -> None:
    """Where vLLM can't inspect its own class, it still says so itself when m3hal is not asked for."""
    outcome = found["not asked for, stock class broken"]
    if "error" not in outcome:  # this vLLM's own class is usable here
        assert outcome["class"] != OURS
        return
    assert f"Model architectures ['{PUBLISHED}'] failed to be inspected" in outcome["error"]


def test_other_plugin_is_only_named_when_not_asked_for(found: Any) -> None:
    """A model that another plugin holds is left to it, with one warning that names it."""
    outcome = found["another plugin, m3hal not asked for"]
    assert outcome["class"] == "Other"
    assert outcome["warnings"] == [f"m3hal is installed, but other_vendor.model of another plugin holds {PUBLISHED}."]


def test_registering_is_idempotent_and_never_raises(found: Any) -> None:
    """vLLM may call it in each process, more than once, and dies of what it raises."""
    again = found["register again"]
    assert again["unchanged"] is True
    assert again["warnings"] == ["m3hal is not available in this vLLM: RuntimeError: a broken import"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--block-size", "64"], "--block-size 64 differs from the model's sparse_block_size 128"),
        (["--kv-cache-dtype", "fp8_e5m2"], "--kv-cache-dtype fp8_e5m2 is not supported"),
    ],
)
def test_command_line_ends_with_the_sentence(python: Any, checkpoint: Any, arguments: list[str], sentence: str) -> None:
    """The server exits with 1 before an engine starts, and the last line it prints is the sentence."""
    server = ["-m", "vllm.entrypoints.openai.api_server", "--model", checkpoint, "--max-model-len", 2048]
    server += ["--dtype", "float32", "--additional-config", '{"m3hal": {"backend": "reference"}}', *arguments]
    done = python(*server, check=False)
    assert done.returncode == 1
    assert sentence in done.stderr.strip().splitlines()[-1]
    assert "EngineCore" not in done.stdout + done.stderr
