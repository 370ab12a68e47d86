"""``mla_decode`` by FlashMLA, which comes with the host: made for many heads and whole pages on a Hopper GPU.

It takes a table of pages instead of a list of slots. How it divides the work depends on the whole batch, so the last
bits of a row do, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from sglang_k3.kernels.mla_decode.flashmla import PAGE

if TYPE_CHECKING:
    from torch import Tensor

TABLE_BLOCK = 1024


def mla_decode(
    q: Tensor,
    kv_pool: Tensor,
    *,
    kv_spans: Tensor,
    kv_indices: Tensor,
    max_len: int,
    scale: float,
    v_dim: int,
    owner_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    assert owner_mask is None, "FlashMLA attends to whole lists"
    num_seqs, num_heads, _ = q.shape
    out = torch.empty(num_seqs, num_heads, v_dim, device=q.device)
    lse = torch.empty(num_seqs, num_heads, device=q.device)
    if lse.numel() == 0:
        return out, lse
    num_pages = max(1, triton.cdiv(max_len, PAGE))
    # Zeros: where launches of Triton kernels are only noted, FlashMLA still runs.
    lens = torch.zeros(num_seqs, dtype=torch.int32, device=q.device)
    table = torch.zeros(num_seqs, num_pages, dtype=torch.int32, device=q.device)
    _list_pages[(num_seqs, triton.cdiv(num_pages, TABLE_BLOCK))](
        kv_spans, kv_indices, table, lens, kv_spans.stride(), kv_indices.stride(0), num_pages, PAGE, TABLE_BLOCK
    )
    pages = kv_pool[: kv_pool.shape[0] // PAGE * PAGE].unflatten(0, (-1, PAGE)).unsqueeze(2)
    ops = torch.ops.sgl_kernel
    schedule = ops.get_mla_decoding_metadata.default(lens, num_heads, 1, None, False, None)
    rounded, sums = ops.fwd_kvcache_mla.default(
        q.unsqueeze(1), pages, v_dim, lens, table, scale, False, *schedule, False, *[None] * 6
    )
    _finish[(num_seqs, num_heads)](
        rounded, sums, lens, out, lse, rounded.stride(), sums.stride(), v_dim, triton.next_power_of_2(v_dim)
    )
    return out, lse


@triton.jit(do_not_specialize=["num_pages"])
def _list_pages(
    kv_spans,
    kv_indices,
    table,
    lens,
    span_strides,
    indices_stride,
    num_pages,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The page of every ``PAGE``-th row of a list, and how many rows it has."""
    b = tl.program_id(0).to(tl.int64)
    begin = tl.load(kv_spans + b * span_strides[0])
    length = tl.load(kv_spans + b * span_strides[0] + span_strides[1]) - begin
    page = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = (page < num_pages) & (page * PAGE < length)
    slots = tl.load(kv_indices + (begin + page * PAGE) * indices_stride, mask=there, other=0)
    tl.store(table + b * num_pages + page, (slots // PAGE).to(tl.int32), mask=there)
    if tl.program_id(1) == 0:
        tl.store(lens + b, length.to(tl.int32))


@triton.jit
def _finish(rounded, sums, lens, out, lse, rounded_strides, sums_strides, V: tl.constexpr, BLOCK: tl.constexpr):
    """To fp32; nothing for a list without rows."""
    b, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    is_empty = tl.load(lens + b) == 0
    v = tl.arange(0, BLOCK)
    values = tl.load(rounded + b * rounded_strides[0] + h * rounded_strides[2] + v, mask=v < V)
    row = b * tl.num_programs(1) + h
    tl.store(out + row * V + v, tl.where(is_empty, 0.0, values.to(tl.float32)), mask=v < V)
    total = tl.load(sums + b * sums_strides[0] + h * sums_strides[1])
    tl.store(lse + row, tl.where(is_empty, float("-inf"), total))
