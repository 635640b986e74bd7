"""One engine: the whole batch at once, the same again from the prefix cache, one by one without it; then its speed."""

from __future__ import annotations

import itertools
import time
from typing import Any

from _engine import complete, main, start

#: a PNG of one pixel
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


def run(job: dict[str, Any]) -> dict[str, Any]:
    import vllm

    prompts = job["prompts"]
    llm = start(job["checkpoint"], max_num_batched_tokens=4096)
    found = {"batched": complete(llm, prompts), "cached": complete(llm, prompts)}
    assert llm.reset_prefix_cache()
    found["one by one"] = [complete(llm, [prompt])[0] for prompt in prompts]
    config = llm.llm_engine.vllm_config
    return {
        "rounds": found,
        "architecture": config.model_config.architecture,
        "additional_config": config.additional_config,
        "seconds_between_tokens": intervals(llm, prompts[-1][:256], 128),
        "captured": captured(llm, prompts[1]),
        "image": refusal_of_an_image(llm),
        "metrics": metrics(),
        "version": vllm.__version__,
    }


def captured(llm: Any, prompt: list[int]) -> dict[str, Any]:
    """A completion while vLLM believes that it captures CUDA graphs, and how often the capture was broken."""
    from vllm.compilation import breakable_cudagraph as graphs

    class Capture:
        _capturing, breaks = True, 0

        def add_eager(self, run: Any) -> Any:
            self.breaks += 1
            return run()

    graphs._weak_ref_capture_arg = lambda tensor: tensor  # the CPU's build has no such operator
    capture = graphs.BreakableCUDAGraphCapture._tls.active = Capture()
    completion = complete(llm, [prompt], 4)
    graphs.BreakableCUDAGraphCapture._tls.active = None
    return {"completion": completion, "breaks": capture.breaks}


def metrics() -> str:
    """What the server's /metrics answers in this process."""
    from fastapi import FastAPI
    from fastapi.testclient import TestClient
    from vllm.entrypoints.serve.instrumentator.metrics import attach_router

    app = FastAPI()
    attach_router(app)
    return TestClient(app).get("/metrics").text


def refusal_of_an_image(llm: Any) -> str:
    """What a chat request with a picture is answered."""
    picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
    try:
        llm.chat([{"role": "user", "content": [{"type": "text", "text": "What is this?"}, picture]}])
    except ValueError as error:
        return str(error)
    return ""


def intervals(llm: Any, prompt: list[int], tokens: int) -> list[float]:
    """Wall-clock seconds from each token of one request to the next."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    engine.add_request("timed", {"prompt_token_ids": prompt}, SamplingParams(max_tokens=tokens, ignore_eos=True))
    ends = []
    while engine.has_unfinished_requests():
        engine.step()
        ends.append(time.perf_counter())
    return [later - earlier for earlier, later in itertools.pairwise(ends)]


if __name__ == "__main__":
    main(run)
