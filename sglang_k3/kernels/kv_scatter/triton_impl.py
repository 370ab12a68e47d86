"""Triton kernel of ``kv_scatter``: one program per row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor


def kv_scatter(rows: Tensor, kv_pool: Tensor, *, loc: Tensor, owner_mask: Tensor | None = None) -> None:
    if rows.numel() == 0:
        return
    tokens, width = rows.shape
    _kv_scatter[(tokens,)](
        rows,
        kv_pool,
        loc,
        owner_mask,
        width,
        *rows.stride(),
        *kv_pool.stride(),
        loc.stride(0),
        0 if owner_mask is None else owner_mask.stride(0),
        BLOCK=triton.next_power_of_2(width),
        num_warps=2,
    )


@triton.jit
def _kv_scatter(
    rows_ptr,
    pool_ptr,
    loc_ptr,
    owner_ptr,
    width,
    rows_row,
    rows_col,
    pool_row,
    pool_col,
    loc_row,
    owner_row,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(loc_ptr + token * loc_row).to(tl.int64)
    written = slot >= 0
    if owner_ptr is not None:
        written &= tl.load(owner_ptr + token * owner_row) != 0
    if written:
        cols = tl.arange(0, BLOCK)
        inside = cols < width
        row = tl.load(rows_ptr + token * rows_row + cols * rows_col, mask=inside)
        tl.store(pool_ptr + slot * pool_row + cols * pool_col, row.to(pool_ptr.dtype.element_ty), mask=inside)
