"""Reference of ``attn_merge``."""

from __future__ import annotations

import torch
from torch import Tensor


def attn_merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    largest = torch.maximum(lse_a, lse_b)
    # With both parts empty the largest is -inf, and -inf - -inf would be NaN.
    shift = largest.masked_fill(largest == -torch.inf, 0.0)
    weight_a, weight_b = torch.exp(lse_a - shift), torch.exp(lse_b - shift)
    total = weight_a + weight_b
    weighted = _weighted(out_a, weight_a) + _weighted(out_b, weight_b)
    out = weighted / total.masked_fill(total == 0.0, 1.0).unsqueeze(-1)
    return out, shift + total.log()


def _weighted(out: Tensor, weight: Tensor) -> Tensor:
    """A part of no weight counts as zero, whatever its output holds."""
    weight = weight.unsqueeze(-1)
    return (out * weight).masked_fill(weight == 0.0, 0.0)
