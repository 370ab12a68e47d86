"""Triton kernels of ``mla_decode``: split each list of rows, attend per split, then merge the splits.

A program reads the rows of a split once for a tile of heads; the leading part of a row serves the scores and is the
value. How a list is split depends on its length alone, so a row has the same bits in every batch. The splits of list
``b`` are numbered from ``kv_indptr[b] // MIN_SPAN + b`` on, which leaves room for all of them and needs no sums over
the batch; a fixed number of programs share the numbers, so that nothing waits for the host. Weights meet 16-bit values
as a sum of two 16-bit numbers, so that the output keeps the accuracy of fp32.

Legend: B sequences, H heads, V value elements, R = D - V further key elements, N rows of a tile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

MANY_HEADS = 32
PROGRAMS = 264  # two for each multiprocessor of a Hopper GPU
MAX_SPLITS = 128
MERGE_V = 128
MERGE_S = tl.constexpr(16)
LN_2 = tl.constexpr(0.6931471805599453)
LOG2_E = 1.4426950408889634


def mla_decode(
    q: Tensor,
    kv_pool: Tensor,
    *,
    kv_indptr: Tensor,
    kv_indices: Tensor,
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
    # A longer split saves merging where there are many heads, a shorter one fills the device where there are few.
    head_tiles = triton.cdiv(num_heads, block_h)
    splitting = {"MIN_SPAN": 1024 if num_heads > MANY_HEADS else 512, "MAX_SPLITS": max(1, MAX_SPLITS // head_tiles)}
    num_splits = kv_indices.numel() // splitting["MIN_SPAN"] + num_seqs
    sums = torch.empty(num_splits, num_heads, v_dim, device=q.device)
    stats = torch.empty(num_splits, num_heads, 2, device=q.device)
    _attend[(head_tiles, min(num_splits, triton.cdiv(PROGRAMS, head_tiles)))](
        q,
        kv_pool,
        kv_indptr,
        kv_indices,
        kv_indices if owner_mask is None else owner_mask,
        sums,
        stats,
        q.stride(),
        kv_pool.stride(),
        kv_indptr.stride(0),
        kv_indices.stride(0),
        0 if owner_mask is None else owner_mask.stride(0),
        num_seqs,
        num_heads,
        scale * LOG2_E,
        V=v_dim,
        R=width - v_dim,
        BLOCK_H=block_h,
        BLOCK_N=block_n,
        BLOCK_V=max(16, triton.next_power_of_2(v_dim)),
        BLOCK_R=max(16, triton.next_power_of_2(width - v_dim)),
        DOT=dtype,
        OWNED=owner_mask is not None,
        **splitting,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    _merge[(triton.cdiv(v_dim, MERGE_V), num_heads, num_seqs)](
        sums,
        stats,
        kv_indptr,
        out,
        lse,
        kv_indptr.stride(0),
        V=v_dim,
        BLOCK_N=block_n,
        BLOCK_V=MERGE_V,
        **splitting,
    )
    return out, lse


def dot_dtype(*tensors: Tensor) -> tl.dtype:
    """What the matrix units multiply: the 16-bit dtype that all tensors share, else fp32."""
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1 or torch.float32 in dtypes:
        return tl.float32
    return tl.bfloat16 if torch.bfloat16 in dtypes else tl.float16


def _tile(num_heads: int, dtype: tl.dtype) -> tuple[int, int, int, int]:
    """Heads and rows of a tile, warps and pipeline stages."""
    if dtype == tl.float32:
        return 16, 16, 4, 1
    return (16 if num_heads <= 16 else 32), 32, 8, 4


@triton.jit
def add_weighted(total, weights, values):
    """``total + weights values``, fp32 weights; to 16 bits of their mantissa if the values are narrower."""
    if values.dtype == tl.float32:
        return tl.dot(weights, values, total, input_precision="ieee")
    high = weights.to(values.dtype)
    total = tl.dot(high, values, total)
    return tl.dot((weights - high.to(tl.float32)).to(values.dtype), values, total)


@triton.jit
def online_softmax(scores, peak, mass):
    """One step of a running softmax in base 2: new peak, new mass, weights of the scores, factor of what came before.

    A row that has seen no finite score keeps peak -inf and mass 0.
    """
    new_peak = tl.maximum(peak, tl.max(scores, axis=1))
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(scores - base[:, None])
    factor = tl.exp2(peak - base)
    return new_peak, mass * factor + tl.sum(weights, axis=1), weights, factor


@triton.jit
def sequence_of_slot(slot, offsets, stride, num_seqs, SIZE: tl.constexpr):
    """The last sequence whose first slot, ``offsets[b] // SIZE + b``, is at most ``slot``."""
    low = 0
    high = num_seqs - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(offsets + middle * stride) // SIZE + middle <= slot:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def _span(length, MIN_SPAN: tl.constexpr, MAX_SPLITS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Rows of a split of a list of ``length``."""
    return tl.maximum(MIN_SPAN, tl.cdiv(tl.cdiv(length, MAX_SPLITS), BLOCK_N) * BLOCK_N)


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
    """Slots of the rows from ``start`` on, and which of them are there."""
    n = start + tl.arange(0, BLOCK_N)
    seen = n < last
    if OWNED:
        seen = seen & (tl.load(owner_mask + (begin + n) * owner_stride, mask=seen, other=0) != 0)
    return tl.load(kv_indices + (begin + n) * indices_stride, mask=seen, other=0).to(tl.int64), seen


@triton.jit(do_not_specialize=["num_seqs"])
def _attend(
    q,
    kv_pool,
    kv_indptr,
    kv_indices,
    owner_mask,
    sums,
    stats,
    q_strides,
    pool_strides,
    indptr_stride,
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
    MIN_SPAN: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    h = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    v = tl.arange(0, BLOCK_V)
    r = tl.arange(0, BLOCK_R)
    head, in_value, in_rest = h[:, None] < num_heads, v[None, :] < V, r[None, :] < R
    num_slots = (tl.load(kv_indptr + num_seqs * indptr_stride) // MIN_SPAN).to(tl.int32) + num_seqs
    for slot in range(tl.program_id(1), num_slots, tl.num_programs(1)):
        b = sequence_of_slot(slot, kv_indptr, indptr_stride, num_seqs, MIN_SPAN)
        begin = tl.load(kv_indptr + b * indptr_stride).to(tl.int64)
        length = (tl.load(kv_indptr + (b + 1) * indptr_stride) - begin).to(tl.int32)
        span = _span(length, MIN_SPAN, MAX_SPLITS, BLOCK_N)
        first = (slot - b - (begin // MIN_SPAN).to(tl.int32)) * span
        last = tl.minimum(first + span, length)
        q_rows = q + tl.cast(b, tl.int64) * q_strides[0] + h[:, None].to(tl.int64) * q_strides[1]
        q_value = tl.load(q_rows + v[None, :] * q_strides[2], mask=head & in_value, other=0.0).to(DOT)
        q_rest = tl.load(q_rows + (V + r[None, :]) * q_strides[2], mask=head & in_rest, other=0.0).to(DOT)
        peak = tl.full([BLOCK_H], float("-inf"), tl.float32)
        mass = tl.zeros([BLOCK_H], tl.float32)
        total = tl.zeros([BLOCK_H, BLOCK_V], tl.float32)
        slots, seen = _slots(kv_indices, owner_mask, first, last, begin, indices_stride, owner_stride, BLOCK_N, OWNED)
        for start in range(first, last, BLOCK_N):
            rows = kv_pool + slots[:, None] * pool_strides[0]
            value = tl.load(rows + v[None, :] * pool_strides[1], mask=seen[:, None] & in_value, other=0.0).to(DOT)
            scores = tl.dot(q_value, tl.trans(value), input_precision="ieee")
            if R > 0:
                rest_columns = rows + (V + r[None, :]) * pool_strides[1]
                rest = tl.load(rest_columns, mask=seen[:, None] & in_rest, other=0.0).to(DOT)
                scores = tl.dot(q_rest, tl.trans(rest), scores, input_precision="ieee")
            scores = tl.where(seen[None, :], scores * scale_log2, float("-inf"))
            # The slots of the next tile are known a tile early, so that rows can be fetched several tiles ahead.
            slots, seen = _slots(
                kv_indices, owner_mask, start + BLOCK_N, last, begin, indices_stride, owner_stride, BLOCK_N, OWNED
            )
            peak, mass, weights, factor = online_softmax(scores, peak, mass)
            total = add_weighted(total * factor[:, None], weights, value)
        if first < length:
            out_rows = tl.cast(slot, tl.int64) * num_heads + h
            tl.store(sums + out_rows[:, None] * V + v[None, :], total, mask=head & in_value)
            tl.store(stats + out_rows * 2, peak, mask=h < num_heads)
            tl.store(stats + out_rows * 2 + 1, mass, mask=h < num_heads)


@triton.jit
def _merge(
    sums,
    stats,
    kv_indptr,
    out,
    lse,
    indptr_stride,
    V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    MIN_SPAN: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    h = tl.program_id(1)
    num_heads = tl.num_programs(1)
    b = tl.program_id(2).to(tl.int64)
    begin = tl.load(kv_indptr + b * indptr_stride)
    length = (tl.load(kv_indptr + (b + 1) * indptr_stride) - begin).to(tl.int32)
    first_slot = begin // MIN_SPAN + b
    num_splits = tl.cdiv(length, _span(length, MIN_SPAN, MAX_SPLITS, BLOCK_N))
    v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    peak = tl.full([1], float("-inf"), tl.float32)
    mass = tl.zeros([1], tl.float32)
    total = tl.zeros([BLOCK_V], tl.float32)
    for start in range(0, num_splits, MERGE_S):
        s = start + tl.arange(0, MERGE_S)
        rows = (first_slot + s) * num_heads + h
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
    row = b * num_heads + h
    tl.store(out + row * V + v, tl.where(mass > 0.0, total / mass, 0.0), mask=v < V)
    if tl.program_id(0) == 0:
        tl.store(lse + row + tl.arange(0, 1), (peak + tl.log2(mass)) * LN_2)
