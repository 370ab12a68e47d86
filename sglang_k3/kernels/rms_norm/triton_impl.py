"""Triton kernel of ``rms_norm``: one program per row, which it reads once. Rounds where the reference does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from sglang_k3.kernels.triton_math import normalise

if TYPE_CHECKING:
    from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    width = x.shape[-1]
    rows = x.reshape(-1, width)
    block = triton.next_power_of_2(width)
    _rms_norm[(rows.shape[0],)](
        rows,
        weight,
        out,
        width,
        eps,
        rows.stride(0),
        rows.stride(1),
        weight.stride(0),
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
    )
    return out


@triton.jit
def _rms_norm(x_ptr, weight_ptr, out_ptr, width, eps, x_row, x_col, weight_col, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < width
    x = tl.load(x_ptr + row * x_row + cols * x_col, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + cols * weight_col, mask=inside, other=0.0)
    tl.store(out_ptr + row * width + cols, normalise(x, weight, width, eps, out_ptr.dtype.element_ty), mask=inside)
