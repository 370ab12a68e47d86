"""Triton kernels of ``mla_decode``: split each list of rows, attend per split, then merge the splits.

A program reads the rows of a split once for a tile of heads; the leading part of a row serves the scores and is the
value. How a list is split depends on its length alone, so a row has the same bits in every batch. A slot is one split;
slots are numbered list after list. A fixed number of programs share them, and each counts the splits of all lists for
itself, so that nothing waits for the host. The output of a tile is computed transposed, ``[V, H]``.

Legend: B sequences, H heads, V value elements, R = D - V further key elements, N rows of a tile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from sglang_k3.kernels.triton_math import LN_2, LOG2_E, dot_dtype, online_softmax

if TYPE_CHECKING:
    from torch import Tensor

PROGRAMS = 132  # one for each multiprocessor of a Hopper GPU, whose shared memory one program fills
MIN_SPAN, LONG_SPAN = tl.constexpr(256), tl.constexpr(1024)  # rows of a split
FEW_SPLITS, MAX_SPLITS = tl.constexpr(4), tl.constexpr(64)
SEQS = tl.constexpr(128)  # lists whose splits are counted at once
MERGE_S = tl.constexpr(8)


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
    num_seqs, num_heads, width = q.shape
    out = torch.empty(num_seqs, num_heads, v_dim, device=q.device)
    lse = torch.empty(num_seqs, num_heads, device=q.device)
    if lse.numel() == 0:
        return out, lse
    dtype = dot_dtype(q, kv_pool)
    block_h, block_n, num_warps, num_stages = _tile(num_heads, dtype)
    head_tiles = triton.cdiv(num_heads, block_h)
    block_v = max(16, triton.next_power_of_2(v_dim))
    num_slots = num_seqs * max_splits(max_len)
    sums = torch.empty(num_slots, num_heads, v_dim, device=q.device)
    stats = torch.empty(num_slots, num_heads, 2, device=q.device)
    _attend[(head_tiles, min(num_slots, triton.cdiv(PROGRAMS, head_tiles)))](
        q,
        kv_pool,
        kv_spans,
        kv_indices,
        kv_indices if owner_mask is None else owner_mask,
        sums,
        stats,
        q.stride(),
        kv_pool.stride(),
        kv_spans.stride(),
        kv_indices.stride(0),
        0 if owner_mask is None else owner_mask.stride(0),
        num_seqs,
        num_heads,
        scale * LOG2_E,
        V=v_dim,
        R=width - v_dim,
        BLOCK_H=block_h,
        BLOCK_N=block_n,
        BLOCK_V=block_v,
        BLOCK_R=max(16, triton.next_power_of_2(width - v_dim)),
        DOT=dtype,
        OWNED=owner_mask is not None,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    _merge[(num_heads, num_seqs)](sums, stats, kv_spans, out, lse, kv_spans.stride(), V=v_dim, BLOCK_V=block_v)
    return out, lse


def max_splits(max_len: int) -> int:
    """The most splits that a list of up to ``max_len`` rows has (see ``_span``), at least one."""
    few: int = min(FEW_SPLITS.value, triton.cdiv(max_len, MIN_SPAN.value))
    many: int = min(MAX_SPLITS.value, triton.cdiv(max_len, LONG_SPAN.value))
    return max(1, few, many)


def _tile(num_heads: int, dtype: tl.dtype) -> tuple[int, int, int, int]:
    """Heads and rows of a tile, warps and pipeline stages."""
    if dtype == tl.float32:
        return 16, 16, 4, 1
    if num_heads > 32:
        return 64, 64, 8, 3  # the queries and two tiles of rows fill the shared memory of a Hopper GPU
    if num_heads > 16:
        return 32, 32, 8, 4  # 64 rows do not fit into 99 KiB, which is what smaller GPUs have
    return 16, 64, 8, 3


@triton.jit
def _span(length):
    """Rows of a split of a list of ``length``: a multiple of 256.

    Short splits make a short list fast when it is alone, long ones save merging in a large batch. Four splits as long
    as they have 256 to 1024 rows, then splits of 1024, and never more than 64.
    """
    span = tl.minimum(tl.cdiv(length, FEW_SPLITS), LONG_SPAN)
    span = tl.maximum(tl.maximum(span, tl.cdiv(length, MAX_SPLITS)), MIN_SPAN)
    return tl.cdiv(span, MIN_SPAN) * MIN_SPAN


@triton.jit
def _num_splits(kv_spans, i, num_seqs, strides):
    """How many splits each of the lists ``i`` has; none from ``num_seqs`` on."""
    begin = tl.load(kv_spans + i * strides[0], mask=i < num_seqs, other=0)
    length = (tl.load(kv_spans + i * strides[0] + strides[1], mask=i < num_seqs, other=0) - begin).to(tl.int32)
    return tl.cdiv(length, _span(length))


@triton.jit
def _list_of_slot(slot, kv_spans, strides, num_seqs):
    """The list that ``slot`` belongs to, ``num_seqs`` if to none, and the first slot of the list."""
    b = 0
    first_slot = 0
    counted = 0
    for start in range(0, num_seqs, SEQS):
        i = start + tl.arange(0, SEQS)
        ends = counted + tl.cumsum(_num_splits(kv_spans, i, num_seqs, strides), axis=0)
        before = (ends <= slot) & (i < num_seqs)
        b += tl.sum(before.to(tl.int32), axis=0)
        first_slot = tl.maximum(first_slot, tl.max(tl.where(before, ends, 0), axis=0))
        counted = tl.max(ends, axis=0)
    return b, first_slot


@triton.jit
def _slots(
    kv_indices,
    owner_mask,
    start,
    last,
    begin,
    indices_stride,
    owner_stride,
    BLOCK_N: tl.constexpr,
    OWNED: tl.constexpr,
):
    """Slots of the rows from ``start`` on, -1 for a row that is not there."""
    n = start + tl.arange(0, BLOCK_N)
    seen = n < last
    if OWNED:
        seen = seen & (tl.load(owner_mask + (begin + n) * owner_stride, mask=seen, other=0) != 0)
    return tl.load(kv_indices + (begin + n) * indices_stride, mask=seen, other=-1).to(tl.int32)


@triton.jit
def _scores(q_value, q_rest, value, rest, scale_log2, R: tl.constexpr):
    """``[H, N]``, for powers of two; scaled apart, because Triton would make a chain of one sum (see ``_attend``)."""
    scores = tl.dot(q_value, tl.trans(value), input_precision="ieee") * scale_log2
    if R > 0:
        scores += tl.dot(q_rest, tl.trans(rest), input_precision="ieee") * scale_log2
    return scores


@triton.jit(do_not_specialize=["num_seqs"])
def _attend(
    q,
    kv_pool,
    kv_spans,
    kv_indices,
    owner_mask,
    sums,
    stats,
    q_strides,
    pool_strides,
    span_strides,
    indices_stride,
    owner_stride,
    num_seqs,
    num_heads,
    scale_log2,
    V: tl.constexpr,
    R: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
    DOT: tl.constexpr,
    OWNED: tl.constexpr,
):
    h = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    v = tl.arange(0, BLOCK_V)
    r = tl.arange(0, BLOCK_R)
    head, in_value, in_rest = h[:, None] < num_heads, v[None, :] < V, r[None, :] < R
    slot = tl.program_id(1)
    b, first_slot = _list_of_slot(slot, kv_spans, span_strides, num_seqs)
    while b < num_seqs:
        begin = tl.load(kv_spans + b * span_strides[0]).to(tl.int64)
        length = (tl.load(kv_spans + b * span_strides[0] + span_strides[1]) - begin).to(tl.int32)
        first = (slot - first_slot) * _span(length)
        last = tl.minimum(first + _span(length), length)
        q_rows = q + tl.cast(b, tl.int64) * q_strides[0] + h[:, None].to(tl.int64) * q_strides[1]
        q_value = tl.load(q_rows + v[None, :] * q_strides[2], mask=head & in_value, other=0.0).to(DOT)
        q_rest = tl.load(q_rows + (V + r[None, :]) * q_strides[2], mask=head & in_rest, other=0.0).to(DOT)
        peak = tl.full([BLOCK_H], float("-inf"), tl.float32)
        mass = tl.zeros([BLOCK_H], tl.float32)
        total = tl.zeros([BLOCK_V, BLOCK_H], tl.float32)
        slots = _slots(kv_indices, owner_mask, first, last, begin, indices_stride, owner_stride, BLOCK_N, OWNED)
        for start in range(first, last, BLOCK_N):
            rows = kv_pool + slots[:, None].to(tl.int64) * pool_strides[0]
            listed = slots[:, None] >= 0
            value = tl.load(rows + v[None, :] * pool_strides[1], mask=listed & in_value, other=0.0).to(DOT)
            if R > 0:
                rest_columns = rows + (V + r[None, :]) * pool_strides[1]
                rest = tl.load(rest_columns, mask=listed & in_rest, other=0.0).to(DOT)
            else:
                rest = value
            # Most tiles need no mask. The branches also hide from Triton that these products lead to another one: in
            # such a chain all scores would be computed twice, once by each group of four warps.
            if start + BLOCK_N <= last and not OWNED:
                scores = _scores(q_value, q_rest, value, rest, scale_log2, R)
            else:
                scores = _scores(q_value, q_rest, value, rest, scale_log2, R)
                there = slots >= 0 if OWNED else start + tl.arange(0, BLOCK_N) < last
                scores = tl.where(there[None, :], scores, float("-inf"))
            # The slots of the next tile are known a tile early, so that rows can be fetched several tiles ahead.
            slots = _slots(
                kv_indices, owner_mask, start + BLOCK_N, last, begin, indices_stride, owner_stride, BLOCK_N, OWNED
            )
            peak, mass, weights, factor = online_softmax(scores, peak, mass)
            weights = tl.trans(weights.to(DOT))
            total = tl.dot(tl.trans(value), weights, total * factor[None, :], input_precision="ieee")
        out_rows = tl.cast(slot, tl.int64) * num_heads + h
        tl.store(sums + out_rows[:, None] * V + v[None, :], tl.trans(total), mask=head & in_value)
        tl.store(stats + out_rows * 2, peak, mask=h < num_heads)
        tl.store(stats + out_rows * 2 + 1, mass, mask=h < num_heads)
        slot += tl.num_programs(1)
        b, first_slot = _list_of_slot(slot, kv_spans, span_strides, num_seqs)


@triton.jit
def _merge(sums, stats, kv_spans, out, lse, span_strides, V: tl.constexpr, BLOCK_V: tl.constexpr):
    h = tl.program_id(0)
    num_heads = tl.num_programs(0)
    b = tl.program_id(1)
    first_slot = 0
    for start in range(0, b, SEQS):
        first_slot += tl.sum(_num_splits(kv_spans, start + tl.arange(0, SEQS), b, span_strides), axis=0)
    num_splits = tl.max(_num_splits(kv_spans, b + tl.arange(0, 1), b + 1, span_strides), axis=0)
    v = tl.arange(0, BLOCK_V)
    peak = tl.full([1], float("-inf"), tl.float32)
    mass = tl.zeros([1], tl.float32)
    total = tl.zeros([BLOCK_V], tl.float32)
    for start in range(0, num_splits, MERGE_S):
        s = start + tl.arange(0, MERGE_S)
        rows = (first_slot + s).to(tl.int64) * num_heads + h
        peaks = tl.load(stats + rows * 2, mask=s < num_splits, other=float("-inf"))
        masses = tl.load(stats + rows * 2 + 1, mask=s < num_splits, other=0.0)
        mask = (s[:, None] < num_splits) & (v[None, :] < V)
        parts = tl.load(sums + rows[:, None] * V + v[None, :], mask=mask, other=0.0)
        new_peak = tl.maximum(peak, tl.max(peaks, axis=0))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(peaks - base)
        factor = tl.exp2(peak - base)
        mass = mass * factor + tl.sum(weights * masses, axis=0)
        total = total * factor + tl.sum(weights[:, None] * parts, axis=0)
        peak = new_peak
    row = tl.cast(b, tl.int64) * num_heads + h
    tl.store(out + row * V + v, tl.where(mass == 0.0, 0.0, total / mass), mask=v < V)
    tl.store(lse + row + tl.arange(0, 1), (peak + tl.log2(mass)) * LN_2)
