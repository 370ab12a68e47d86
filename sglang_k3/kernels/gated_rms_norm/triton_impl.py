"""Triton kernel of ``gated_rms_norm``: a few heads of one token per program; one downcast."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from sglang_k3.kernels.triton_math import sigmoid

if TYPE_CHECKING:
    from torch import Tensor

_HEADS_PER_PROGRAM = 8


def gated_rms_norm(o: Tensor, gate: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if out.numel() == 0:
        return out
    tokens, heads, value_dim = gate.shape
    _gated_rms_norm[(tokens, triton.cdiv(heads, _HEADS_PER_PROGRAM))](
        o,
        gate,
        weight,
        out,
        heads,
        eps,
        *o.stride(),
        *gate.stride(),
        weight.stride(0),
        V=value_dim,
        BLOCK_V=triton.next_power_of_2(value_dim),
        BLOCK_H=_HEADS_PER_PROGRAM,
        num_warps=4,
    )
    return out


@triton.jit
def _gated_rms_norm(
    o_ptr,
    gate_ptr,
    weight_ptr,
    out_ptr,
    num_heads,
    eps,
    o_token,
    o_head,
    o_col,
    gate_token,
    gate_head,
    gate_col,
    weight_col,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
    cols = tl.arange(0, BLOCK_V)[None, :]
    inside = (heads < num_heads) & (cols < V)
    o = tl.load(o_ptr + token * o_token + heads * o_head + cols * o_col, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + token * gate_token + heads * gate_head + cols * gate_col, mask=inside, other=0.0)
    weight = tl.load(weight_ptr + cols * weight_col, mask=cols < V, other=0.0)
    inverse = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(o * o, axis=1) / V + eps))
    out = o * inverse[:, None] * weight * sigmoid(gate.to(tl.float32), gate.dtype)
    tl.store(out_ptr + (token * num_heads + heads) * V + cols, out.to(gate.dtype), mask=inside)
