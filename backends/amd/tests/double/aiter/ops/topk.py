"""The choice of experts as aiter's kernel makes it: the best of what is greater than minus infinity, slot by slot."""

import torch


def biased_grouped_topk_hip(
    gating_output: torch.Tensor,
    correction_bias: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    num_expert_group: int,
    topk_grp: int,
    need_renorm: bool,
    routed_scaling_factor: float = 1.0,
) -> None:
    assert num_expert_group == topk_grp == 1 and gating_output.stride(1) == 1 and len(gating_output)
    assert gating_output.dtype == correction_bias.dtype == topk_weights.dtype == torch.float32
    assert topk_ids.dtype == torch.int32 and topk_weights.stride() == topk_ids.stride()
    score = torch.sigmoid(gating_output)
    left = score + correction_bias
    for slot in range(topk_ids.shape[1]):
        best, expert = left.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).max(-1)
        expert = torch.where(best > -torch.inf, expert, slot)  # nothing left: the slot's own number
        topk_ids[:, slot] = expert
        topk_weights[:, slot] = score.gather(1, expert[:, None])[:, 0]
        left.scatter_(1, expert[:, None], -torch.inf)
    total = topk_weights.sum(-1, keepdim=True) if need_renorm else 1.0
    topk_weights.mul_(routed_scaling_factor / total)
