"""Reference of ``router_topk``."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_k3.kernels.elementwise import sigmoid


def router_topk(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    top_k: int,
    renormalize: bool,
    scaling_factor: float,
    num_expert_group: int = 1,
    topk_group: int = 1,
) -> tuple[Tensor, Tensor]:
    scores = sigmoid(x.float() @ weight.float().T)  # [T, E]
    choice = scores + bias
    if topk_group < num_expert_group:
        choice = _best_groups_only(choice, num_expert_group, topk_group)
    topk_ids = _top(choice, top_k)
    topk_weights = scores.gather(1, topk_ids)
    if renormalize:
        topk_weights = topk_weights / (topk_weights.sum(-1, keepdim=True) + 1e-20)
    return topk_weights * scaling_factor, topk_ids.int()


def _best_groups_only(choice: Tensor, num_groups: int, num_kept: int) -> Tensor:
    """Set the experts outside the best groups to -inf; a group scores the sum of its two best experts."""
    grouped = choice.view(choice.shape[0], num_groups, choice.shape[1] // num_groups)
    group_scores = grouped.topk(min(2, grouped.shape[2]), dim=2).values.sum(2)
    kept = torch.zeros_like(group_scores, dtype=torch.bool).scatter(1, _top(group_scores, num_kept), True)
    return grouped.masked_fill(~kept.unsqueeze(2), -torch.inf).flatten(1)


def _top(values: Tensor, k: int) -> Tensor:
    """Indices of the ``k`` largest of each row, ties by the lower index (``torch.topk`` leaves them open)."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :k]
