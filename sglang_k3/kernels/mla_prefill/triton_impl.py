"""Triton kernel of ``mla_prefill``: one program attends with a tile of queries of one head, in one pass over the keys.

The grid needs sizes only: sequence ``b`` owns the tiles from ``cu_seqlens_q[b] // M + b`` on, which leaves room for
each of its queries; a program finds its sequence by bisection and ends at once if its tile is empty. The channels of a
key come in two parts, each padded to a power of two: its own and those of all heads, or its leading power of two and
the rest, so that 192 channels cost 128 + 64.

Legend: H heads, B sequences, M queries and N keys of a tile, A + C channels of both parts of a key, V value channels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from sglang_k3.kernels.triton_math import LN_2, LOG2_E, dot_dtype, has_small_shared_memory, online_softmax

if TYPE_CHECKING:
    from torch import Tensor


def mla_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    k_shared: Tensor | None = None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    num_tokens, num_heads, _ = q.shape
    value_dim = v.shape[2]
    num_seqs = cu_seqlens_q.numel() - 1
    out = torch.empty(num_tokens, num_heads, value_dim, device=q.device)
    lse = torch.empty(num_tokens, num_heads, device=q.device)
    if lse.numel() == 0:
        return out, lse
    dtype = dot_dtype(q, k, v, *(() if k_shared is None else (k_shared,)))
    block_m, block_n, num_warps, num_stages = _tile(q.device, dtype)
    if k_shared is None:  # cut so that the first part fills its tile
        leading = 1 << (k.shape[2].bit_length() - 1)
        k, k_rest = k[:, :, :leading], k[:, :, leading:]
    else:
        k_rest = k_shared.unsqueeze(1).expand(-1, num_heads, -1)
    key_dim, rest_dim = k.shape[2], k_rest.shape[2]
    _prefill[(num_tokens // block_m + num_seqs, num_heads)](
        q,
        k,
        k_rest,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        out,
        lse,
        q.stride(),
        k.stride(),
        k_rest.stride(),
        v.stride(),
        cu_seqlens_q.stride(0),
        cu_seqlens_k.stride(0),
        out.stride(),
        lse.stride(),
        num_seqs,
        scale * LOG2_E,
        A=key_dim,
        C=rest_dim,
        V=value_dim,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_A=max(16, triton.next_power_of_2(key_dim)),
        BLOCK_C=max(16, triton.next_power_of_2(rest_dim)),
        BLOCK_V=max(16, triton.next_power_of_2(value_dim)),
        DOT=dtype,
        CAUSAL=causal,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    return out, lse


def _tile(device: torch.device, dtype: tl.dtype) -> tuple[int, int, int, int]:
    """Queries and keys of a tile, warps and pipeline stages."""
    if dtype == tl.float32:
        return 32, 32, 4, 1
    return 128, 32 if has_small_shared_memory(device) else 64, 8, 3


@triton.jit
def _sequence_of_tile(tile, offsets, stride, num_seqs, SIZE: tl.constexpr):
    """The last sequence whose first tile, ``offsets[b] // SIZE + b``, is at most ``tile``."""
    low = 0
    high = num_seqs - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(offsets + middle * stride) // SIZE + middle <= tile:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit(do_not_specialize=["num_seqs"])
def _prefill(
    q,
    k,
    k_rest,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    out,
    lse,
    q_strides,
    k_strides,
    k_rest_strides,
    v_strides,
    cu_q_stride,
    cu_k_stride,
    out_strides,
    lse_strides,
    num_seqs,
    scale_log2,
    A: tl.constexpr,
    C: tl.constexpr,
    V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_V: tl.constexpr,
    DOT: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # under a causal mask the last tiles take longest
    h = tl.program_id(1).to(tl.int64)
    b = _sequence_of_tile(tile, cu_seqlens_q, cu_q_stride, num_seqs, BLOCK_M)
    q_begin = tl.load(cu_seqlens_q + b * cu_q_stride)
    num_q = (tl.load(cu_seqlens_q + (b + 1) * cu_q_stride) - q_begin).to(tl.int32)
    first = ((tile - b - q_begin // BLOCK_M) * BLOCK_M).to(tl.int32)
    if first >= num_q:
        return
    k_begin = tl.load(cu_seqlens_k + b * cu_k_stride)
    num_k = (tl.load(cu_seqlens_k + (b + 1) * cu_k_stride) - k_begin).to(tl.int32)

    m = first + tl.arange(0, BLOCK_M)
    a = tl.arange(0, BLOCK_A)
    c = tl.arange(0, BLOCK_C)
    value_channels = tl.arange(0, BLOCK_V)
    query = m[:, None] < num_q
    tokens = q_begin.to(tl.int64) + m
    q_rows = q + tokens[:, None] * q_strides[0] + h * q_strides[1]
    q_a = tl.load(q_rows + a[None, :] * q_strides[2], mask=query & (a[None, :] < A), other=0.0).to(DOT)
    if C > 0:
        q_c = tl.load(q_rows + (A + c[None, :]) * q_strides[2], mask=query & (c[None, :] < C), other=0.0).to(DOT)

    reach = m + 1 + num_k - num_q if CAUSAL else m * 0 + num_k  # keys below it are seen
    end = tl.minimum(num_k, first + BLOCK_M + num_k - num_q) if CAUSAL else num_k
    seen_by_all = tl.minimum(num_k, first + 1 + num_k - num_q) if CAUSAL else num_k
    unmasked_end = tl.maximum(seen_by_all, 0) // BLOCK_N * BLOCK_N
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    total = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for masked in tl.static_range(2):  # tiles that every query sees, then those at the mask and at the end
        for start in range(unmasked_end if masked else 0, end if masked else unmasked_end, BLOCK_N):
            n = start + tl.arange(0, BLOCK_N)
            key = (n < (num_k if masked else start + BLOCK_N))[:, None]
            rows = k_begin.to(tl.int64) + n
            k_rows = k + rows[:, None] * k_strides[0] + h * k_strides[1]
            k_a = tl.load(k_rows + a[None, :] * k_strides[2], mask=key & (a[None, :] < A), other=0.0).to(DOT)
            scores = tl.dot(q_a, tl.trans(k_a), input_precision="ieee")
            if C > 0:
                p_rest = k_rest + rows[:, None] * k_rest_strides[0] + h * k_rest_strides[1]
                k_c = tl.load(p_rest + c[None, :] * k_rest_strides[2], mask=key & (c[None, :] < C), other=0.0).to(DOT)
                scores = tl.dot(q_c, tl.trans(k_c), scores, input_precision="ieee")
            scores *= scale_log2
            if masked:
                seen = (n[None, :] < num_k) & (n[None, :] < reach[:, None])
                scores = tl.where(seen, scores, float("-inf"))
            peak, mass, weights, factor = online_softmax(scores, peak, mass)
            v_rows = v + rows[:, None] * v_strides[0] + h * v_strides[1]
            v_mask = key & (value_channels[None, :] < V)
            values = tl.load(v_rows + value_channels[None, :] * v_strides[2], mask=v_mask, other=0.0).to(DOT)
            total = tl.dot(weights.to(DOT), values, total * factor[:, None], input_precision="ieee")

    out_rows = out + tokens[:, None] * out_strides[0] + h * out_strides[1]
    tl.store(
        out_rows + value_channels[None, :] * out_strides[2],
        tl.where(mass[:, None] == 0.0, 0.0, total / mass[:, None]),
        mask=query & (value_channels[None, :] < V),
    )
    tl.store(lse + tokens * lse_strides[0] + h * lse_strides[1], (peak + tl.log2(mass)) * LN_2, mask=m < num_q)
