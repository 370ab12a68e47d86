"""Triton kernel of ``kda_gate``; heads and key channels of a token count as one row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from sglang_k3.kernels.triton_math import exp, sigmoid

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 512


def kda_gate(a: Tensor, A_log: Tensor, dt_bias: Tensor, *, lower_bound: float) -> Tensor:
    g = torch.empty(a.shape, dtype=torch.float32, device=a.device)
    if g.numel() == 0:
        return g
    tokens, heads, key_dim = a.shape
    _kda_gate[(tokens, triton.cdiv(heads * key_dim, _BLOCK))](
        a,
        A_log,
        dt_bias,
        g,
        heads * key_dim,
        lower_bound,
        *a.stride(),
        *A_log.stride(),
        *dt_bias.stride(),
        K=key_dim,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return g


@triton.jit
def _kda_gate(
    a_ptr,
    A_log_ptr,
    dt_bias_ptr,
    g_ptr,
    width,
    lower_bound,
    a_token,
    a_head,
    a_col,
    A_log_head,
    dt_bias_head,
    dt_bias_col,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < width
    head, col = channels // K, channels % K
    a = tl.load(a_ptr + token * a_token + head * a_head + col * a_col, mask=inside).to(tl.float32)
    A_log = tl.load(A_log_ptr + head * A_log_head, mask=inside)
    dt_bias = tl.load(dt_bias_ptr + head * dt_bias_head + col * dt_bias_col, mask=inside)
    g = lower_bound * sigmoid(exp(A_log) * (a + dt_bias))
    tl.store(g_ptr + token * width + channels, g, mask=inside)
