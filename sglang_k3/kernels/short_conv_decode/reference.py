"""Reference of ``short_conv_decode``."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_k3.kernels.short_conv_step import conv_silu


def short_conv_decode(x: Tensor, weight: Tensor, *, conv_states: Tensor, cache_indices: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    used = cache_indices >= 0
    slots = cache_indices[used].long()
    rows = torch.cat([conv_states[slots].float(), x[used].float().unsqueeze(1)], dim=1)  # [B, W, C]
    y[used] = conv_silu(rows, weight).squeeze(1).to(x.dtype)
    conv_states[slots] = rows[:, 1:].to(conv_states.dtype)
    return y
