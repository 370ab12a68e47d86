"""Reference of ``depth_mix``."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_k3.kernels.elementwise import root_mean_square
from sglang_k3.kernels.rms_norm.reference import rms_norm


def depth_mix(
    bank: Tensor,
    prefix_sum: Tensor,
    folded_weight: Tensor,
    *,
    eps: float,
    norm_weight: Tensor | None = None,
    delta: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    if delta is not None:
        prefix_sum = prefix_sum + delta
    rows = torch.cat([bank, prefix_sum.unsqueeze(0)]).float()  # [N + 1, T, D]
    scores = (rows / root_mean_square(rows, eps=eps) * folded_weight).sum(-1, keepdim=True)  # [N + 1, T, 1]
    weights = torch.exp(scores - scores.amax(0))
    # Added row by row: the order in which .sum(0) adds depends on the number of tokens.
    mixed, total = torch.zeros_like(rows[0]), torch.zeros_like(weights[0])
    for weight, row in zip(weights, rows, strict=True):
        mixed += weight * row
        total += weight
    out = (mixed / total).to(prefix_sum.dtype)
    return out if norm_weight is None else rms_norm(out, norm_weight, eps=eps), prefix_sum
