"""Triton kernel of ``situ_and_mul``: fp32 inside, one downcast."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from sglang_k3.kernels.triton_math import sigmoid, soft_cap

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 1024


def situ_and_mul(gate_up: Tensor, *, beta: float, linear_beta: float | None) -> Tensor:
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(tokens, width, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel() == 0:
        return out
    grid = (tokens, triton.cdiv(width, _BLOCK))
    _situ_and_mul[grid](gate_up, out, width, beta, linear_beta, *gate_up.stride(), BLOCK=_BLOCK, num_warps=4)
    return out


@triton.jit
def _situ_and_mul(gate_up_ptr, out_ptr, width, beta, linear_beta, row_stride, col_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < width
    gate_ptr = gate_up_ptr + row * row_stride
    gate = tl.load(gate_ptr + cols * col_stride, mask=inside).to(tl.float32)
    up = tl.load(gate_ptr + (cols + width) * col_stride, mask=inside).to(tl.float32)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    activated = soft_cap(gate, beta, dtype) * sigmoid(gate, dtype)
    if linear_beta is not None:
        up = soft_cap(up, linear_beta, dtype)
    tl.store(out_ptr + row * width + cols, (activated * up).to(dtype), mask=inside)
