"""Triton kernel of ``mxfp4_dequant``: a program decodes some groups of one row, 16 bytes to 32 columns each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

_MAX_GROUPS = 128


def mxfp4_dequant(packed: Tensor, scale: Tensor, *, dtype: torch.dtype) -> Tensor:
    *leading, num_rows, num_bytes = packed.shape
    out = torch.empty(*leading, num_rows, 2 * num_bytes, dtype=dtype, device=packed.device)
    if out.numel() == 0:
        return out
    # Experts by rows: a slice of the rows of all experts is then still a view.
    packed, scale = (t.reshape(-1, *t.shape[-2:]) for t in (packed, scale))
    num_groups = scale.shape[-1]
    block = min(triton.next_power_of_2(num_groups), _MAX_GROUPS)
    _mxfp4_dequant[(packed.shape[0] * num_rows, triton.cdiv(num_groups, block))](
        packed,
        scale,
        out,
        num_rows,
        num_groups,
        *packed.stride(),
        *scale.stride(),
        BLOCK=block,
        num_warps=4,
    )
    return out


@triton.jit
def _mxfp4_dequant(
    packed_ptr,
    scale_ptr,
    out_ptr,
    num_rows,
    num_groups,
    packed_matrix,
    packed_row,
    packed_col,
    scale_matrix,
    scale_row,
    scale_col,
    BLOCK: tl.constexpr,
):
    flat_row = tl.program_id(0).to(tl.int64)
    matrix, row = flat_row // num_rows, flat_row % num_rows
    groups = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = groups < num_groups
    scale_offset = matrix * scale_matrix + row * scale_row + groups * scale_col
    code = tl.load(scale_ptr + scale_offset, mask=inside, other=0).to(tl.int32)
    # The code is the exponent field of fp32, but for 0 (subnormal) and 255 (NaN).
    bits = tl.where(code == 0, 1 << 22, tl.where(code == 255, 0x7FC00000, code << 23))
    factor = bits.to(tl.float32, bitcast=True)[:, None]
    at = groups[:, None] * 16 + tl.arange(0, 16)[None, :]
    packed_offset = matrix * packed_matrix + row * packed_row + at * packed_col
    packed = tl.load(packed_ptr + packed_offset, mask=inside[:, None], other=0).to(tl.int32)
    decoded = tl.interleave(_e2m1(packed & 0xF) * factor, _e2m1(packed >> 4) * factor)
    cols = groups[:, None] * 32 + tl.arange(0, 32)[None, :]
    out_ptr += flat_row * (32 * num_groups) + cols
    tl.store(out_ptr, decoded.to(out_ptr.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _e2m1(nibble):
    """Sign, two bits of exponent, one of mantissa; exponent 0 is subnormal. By the bits of fp32, -0 included."""
    exponent, mantissa = (nibble >> 1) & 3, nibble & 1
    normal = ((exponent + 126) << 23) | (mantissa << 22)
    subnormal = mantissa * 0x3F000000  # 0.5
    magnitude = tl.where(exponent == 0, subnormal, normal)
    return (magnitude | ((nibble >> 3) << 31)).to(tl.float32, bitcast=True)
