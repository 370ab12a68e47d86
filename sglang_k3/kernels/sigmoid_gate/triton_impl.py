"""Triton kernel of ``sigmoid_gate``. Rounds where the reference does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from sglang_k3.kernels.triton_math import sigmoid

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 1024


def sigmoid_gate(o: Tensor, gate: Tensor) -> Tensor:
    out = torch.empty(o.shape, dtype=o.dtype, device=o.device)
    if out.numel() == 0:
        return out
    width = o.shape[-1] if o.ndim else 1
    o, gate = o.reshape(-1, width), gate.reshape(-1, width)
    grid = (o.shape[0], triton.cdiv(width, _BLOCK))
    _sigmoid_gate[grid](o, gate, out, width, *o.stride(), *gate.stride(), BLOCK=_BLOCK, num_warps=4)
    return out


@triton.jit
def _sigmoid_gate(o_ptr, gate_ptr, out_ptr, width, o_row, o_col, gate_row, gate_col, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < width
    o = tl.load(o_ptr + row * o_row + cols * o_col, mask=inside).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_row + cols * gate_col, mask=inside)
    rounded = sigmoid(gate.to(tl.float32), gate.dtype).to(gate.dtype).to(tl.float32)
    tl.store(out_ptr + row * width + cols, (o * rounded).to(gate.dtype), mask=inside)
