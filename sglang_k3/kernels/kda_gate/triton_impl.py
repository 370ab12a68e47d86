"""Triton kernel of ``kda_gate``: a few heads of one token per program."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from sglang_k3.kernels.triton_math import exp, sigmoid

if TYPE_CHECKING:
    from torch import Tensor

_HEADS_PER_PROGRAM = 8


def kda_gate(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, *, lower_bound: float) -> tuple[Tensor, Tensor]:
    g = torch.empty(a.shape, dtype=torch.float32, device=a.device)
    beta = torch.empty(b.shape, dtype=torch.float32, device=b.device)
    if g.numel() == 0:
        return g, beta
    tokens, heads, key_dim = a.shape
    _kda_gate[(tokens, triton.cdiv(heads, _HEADS_PER_PROGRAM))](
        a,
        b,
        A_log,
        dt_bias,
        g,
        beta,
        heads,
        lower_bound,
        *a.stride(),
        *b.stride(),
        *A_log.stride(),
        *dt_bias.stride(),
        K=key_dim,
        BLOCK_K=triton.next_power_of_2(key_dim),
        BLOCK_H=_HEADS_PER_PROGRAM,
        num_warps=4,
    )
    return g, beta


@triton.jit
def _kda_gate(
    a_ptr,
    b_ptr,
    A_log_ptr,
    dt_bias_ptr,
    g_ptr,
    beta_ptr,
    num_heads,
    lower_bound,
    a_token,
    a_head,
    a_col,
    b_token,
    b_head,
    A_log_head,
    dt_bias_head,
    dt_bias_col,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
    cols = tl.arange(0, BLOCK_K)[None, :]
    of_head = heads < num_heads
    inside = of_head & (cols < K)
    a = tl.load(a_ptr + token * a_token + heads * a_head + cols * a_col, mask=inside).to(tl.float32)
    b = tl.load(b_ptr + token * b_token + heads * b_head, mask=of_head).to(tl.float32)
    A_log = tl.load(A_log_ptr + heads * A_log_head, mask=of_head)
    dt_bias = tl.load(dt_bias_ptr + heads * dt_bias_head + cols * dt_bias_col, mask=inside)
    row = token * num_heads + heads
    g = lower_bound / (1.0 + exp(-exp(A_log) * (a + dt_bias)))  # not rounded correctly, which the class does not need
    tl.store(g_ptr + row * K + cols, g, mask=inside)
    tl.store(beta_ptr + row, sigmoid(b), mask=of_head)
