"""One bf16 engine: the log-probabilities of given continuations, and in which dtypes its parameters are."""

from __future__ import annotations

from typing import Any

from _engine import main, start


def run(job: dict[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams

    llm = start(job["checkpoint"], dtype="bfloat16", enable_prefix_caching=False, max_num_batched_tokens=512)
    texts = [[*prompt, *tokens] for prompt, tokens in zip(job["prompts"], job["continuations"], strict=True)]
    sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": text} for text in texts], sampling, use_tqdm=False)
    scores = []
    for output, prompt, text in zip(outputs, job["prompts"], texts, strict=True):
        rest = range(len(prompt), len(text))
        scores.append([output.prompt_logprobs[at][text[at]].logprob for at in rest])
    return {"scores": scores, "dtypes": llm.apply_model(dtypes)[0]}


def dtypes(model: Any) -> dict[str, list[str]]:
    """Of the routers' parameters, and of all others."""
    found: dict[str, list[str]] = {"router": [], "other": []}
    for name, parameter in model.named_parameters():
        is_router = ".gate." in name or name.endswith("e_score_correction_bias")
        found["router" if is_router else "other"].append(str(parameter.dtype))
    return found


if __name__ == "__main__":
    main(run)
