"""Triton kernel of ``gated_rms_norm``: a few heads per program, one warp for each head of K3's size; one downcast."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from sglang_k3.kernels.triton_math import sigmoid

if TYPE_CHECKING:
    from torch import Tensor

_HEADS_PER_PROGRAM = 4


def gated_rms_norm(o: Tensor, gate: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if out.numel() == 0:
        return out
    tokens, heads, value_dim = gate.shape
    _gated_rms_norm[(triton.cdiv(tokens * heads, _HEADS_PER_PROGRAM),)](
        o,
        gate,
        weight,
        out,
        tokens * heads,
        heads,
        eps,
        *o.stride(),
        *gate.stride(),
        weight.stride(0),
        V=value_dim,
        BLOCK_V=triton.next_power_of_2(value_dim),
        ROWS=_HEADS_PER_PROGRAM,
        num_warps=4,
    )
    return out


@triton.jit
def _gated_rms_norm(
    o_ptr,
    gate_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    heads,
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
    ROWS: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK_V)
    inside = (rows < num_rows)[:, None] & (cols < V)[None, :]
    token, head = (rows // heads)[:, None], (rows % heads)[:, None]
    o = tl.load(o_ptr + token * o_token + head * o_head + cols[None, :] * o_col, mask=inside, other=0.0)
    gate_offset = token * gate_token + head * gate_head + cols[None, :] * gate_col
    gate = tl.load(gate_ptr + gate_offset, mask=inside, other=0.0)
    weight = tl.load(weight_ptr + cols * weight_col, mask=cols < V, other=0.0)
    o = o.to(tl.float32)
    inverse = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(o * o, axis=1) / V + eps))
    normed = o * inverse[:, None] * weight[None, :]
    out = normed * sigmoid(gate.to(tl.float32), gate.dtype)
    tl.store(out_ptr + rows[:, None] * V + cols[None, :], out.to(gate.dtype), mask=inside)
