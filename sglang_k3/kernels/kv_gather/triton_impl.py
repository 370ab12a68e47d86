"""Triton kernel of ``kv_gather``: one program per row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor


def kv_gather(kv_pool: Tensor, *, loc: Tensor, owner_mask: Tensor | None = None) -> Tensor:
    num_rows, width = loc.shape[0], kv_pool.shape[1]
    rows = torch.empty(num_rows, width, dtype=kv_pool.dtype, device=kv_pool.device)
    if rows.numel() == 0:
        return rows
    _kv_gather[(num_rows,)](
        kv_pool,
        loc,
        owner_mask,
        rows,
        width,
        *kv_pool.stride(),
        loc.stride(0),
        0 if owner_mask is None else owner_mask.stride(0),
        BLOCK=triton.next_power_of_2(width),
        num_warps=2,
    )
    return rows


@triton.jit
def _kv_gather(
    pool_ptr, loc_ptr, owner_ptr, rows_ptr, width, pool_row, pool_col, loc_row, owner_row, BLOCK: tl.constexpr
):
    n = tl.program_id(0).to(tl.int64)
    slot = tl.load(loc_ptr + n * loc_row).to(tl.int64)
    read = slot >= 0
    if owner_ptr is not None:
        read &= tl.load(owner_ptr + n * owner_row) != 0
    cols = tl.arange(0, BLOCK)
    inside = cols < width
    row = tl.load(pool_ptr + slot * pool_row + cols * pool_col, mask=inside & read, other=0.0)
    tl.store(rows_ptr + n * width + cols, row, mask=inside)
