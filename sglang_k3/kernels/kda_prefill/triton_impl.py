"""Triton kernels of ``kda_prefill``: the recurrence by chunks of ``C`` tokens.

With G the sum of g since the begin of a chunk, S ``[K, V]`` the state at its begin and u the errors that tokens write,

    A_ij = beta_i sum_c k_ic k_jc exp(G_ic - G_jc), j < i          M_ij = sum_c q_ic k_jc exp(G_ic - G_jc), j <= i
    [u_0 W] = (I + A)^-1 diag(beta) [v (k exp(G))]
    u  = u_0 - W S
    o  = (q exp(G)) S + M u
    S <- diag(exp(G_C)) S + (k exp(G_C - G))^T u

in three launches: ``_cut_chunks`` lists the chunks, cut so that one ends at the depth of a snapshot; ``_within_chunks``
does for all of them at once what needs no state; ``_over_chunks`` carries a tile of the state through a sequence.

``exp(-G)`` would overflow, so tokens meet through one between them (see ``_meet``): in halves of a stretch, where no
exponent is positive, and within the shortest stretches through their middle, which is as far as ``lower_bound`` lets
exponents of either sign be. Sums of g are sums over what lies between, never differences. Lengths stay on the device:
nothing waits for it.

Products take operands of ``DTYPE`` and sum in fp32. For fp32 inputs that is fp32, in three passes of tf32; for narrower
ones bf16, to which the state is rounded where it is read, never where it is carried.

Tiles have 64 rows and columns where operands have 16 bits, however few channels there are: with narrower ones Triton
3.6 gives wrong products for Hopper.

Legend: T tokens, B sequences, H heads, K key channels, V value channels, N chunks (upper bound); C, BK, BS, BV tiles.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from sglang_k3.kernels.kda_step import L2_NORM_EPS
from sglang_k3.kernels.triton_math import LOG2_E

if TYPE_CHECKING:
    from torch import Tensor

C, BS, BV = 64, 64, 64  # tokens, channels in _within_chunks, value channels in _over_chunks
FP32_TILE = 32  # all three: operands of fp32 are twice as wide and come in parts
NUM_WARPS = 4
WITHIN_STAGES, OVER_STAGES = 1, 3
EPS, PER_LN_2 = tl.constexpr(L2_NORM_EPS), tl.constexpr(LOG2_E)
LARGEST_POWER = 64  # of two, that an operand may be scaled with
FORGOTTEN = tl.constexpr(-200.0)  # a binary log decay that is 0 in fp32, so that lower ones are no lower


def kda_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    ssm_states: Tensor,
    cu_seqlens: Tensor,
    cache_indices: Tensor,
    has_initial_state: Tensor,
    scale: float,
    lower_bound: float = -math.inf,
    track_lens: Tensor | None = None,
    track_indices: Tensor | None = None,
) -> Tensor:
    (num_tokens, num_heads, key_dim), num_seqs, value_dim = q.shape, cache_indices.shape[0], v.shape[2]
    o = v.new_zeros(v.shape)
    if num_seqs == 0:
        return o
    tile = _tile(q, k, v)
    sequences = (cu_seqlens, cache_indices, track_lens)
    chunks, first_chunks, spans = _cut(num_tokens, tile, *sequences)

    block_k = max(tile.block, triton.next_power_of_2(key_dim))
    q_in, w, k_out, u, mix = (
        q.new_empty(num_tokens, num_heads, width, dtype=tile.dtype)
        for width in (block_k, block_k, block_k, value_dim, tile.chunk)
    )
    decay = g.new_empty(chunks.shape[0], num_heads, block_k)
    within = (q_in, w, k_out, u, mix, decay)
    sizes = {"H": num_heads, "K": key_dim, "V": value_dim, "C": tile.chunk, "BK": block_k, "DTYPE": tile.dot_dtype}
    inputs = (q, k, v, g, beta)
    _within_chunks[(num_heads, chunks.shape[0])](
        *inputs,
        chunks,
        spans,
        *within,
        *(x.stride() for x in inputs),
        scale,
        **sizes,
        LEVELS=spans.shape[0],
        STRETCH=_stretch(tile, lower_bound),
        BS=tile.block,
        SOLVE_DTYPE=tile.solve_dtype,
        num_warps=NUM_WARPS,
        num_stages=WITHIN_STAGES,
    )
    _over_chunks[(triton.cdiv(value_dim, tile.block_v), num_heads, num_seqs)](
        o,
        *within,
        ssm_states,
        *sequences,
        has_initial_state,
        track_indices,
        first_chunks,
        *(x.stride() for x in (o, ssm_states)),
        **sizes,
        BV=tile.block_v,
        num_warps=NUM_WARPS,
        num_stages=OVER_STAGES if block_k <= 128 else 1,
    )
    return o


class Tile(NamedTuple):
    """What is multiplied and stored between the launches, and by how many tokens and channels at a time."""

    dtype: torch.dtype
    dot_dtype: tl.dtype
    solve_dtype: tl.dtype
    chunk: int
    block: int
    block_v: int


def _tile(q: Tensor, k: Tensor, v: Tensor) -> Tile:
    if torch.float32 in (q.dtype, k.dtype, v.dtype):
        return Tile(torch.float32, tl.float32, tl.float32, FP32_TILE, FP32_TILE, FP32_TILE)
    return Tile(torch.bfloat16, tl.bfloat16, tl.float16, C, BS, BV)


def _stretch(tile: Tile, lower_bound: float) -> int:
    """Tokens that can meet through their middle, as a power of two; fp32 operands would lose digits there."""
    if tile.dtype == torch.float32:
        return 0
    longest_half = LARGEST_POWER / max(-lower_bound * LOG2_E, 1.0)
    return max(0, min(tile.chunk.bit_length() - 1, math.frexp(longest_half)[1]))


def _cut(
    num_tokens: int, tile: Tile, cu_seqlens: Tensor, cache_indices: Tensor, track_lens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Begin and length of the chunks ``[N, 2]``, the first one of each sequence ``[B]``, and ``spans``."""
    num_seqs, levels = cache_indices.shape[0], tile.chunk.bit_length() - 1
    parts = 1 if track_lens is None else 2  # before and after the snapshot; each may end in a short chunk
    max_chunks = num_tokens // tile.chunk + parts * num_seqs
    chunks = cu_seqlens.new_empty(max_chunks, 2, dtype=torch.int32)
    first_chunks = cu_seqlens.new_empty(num_seqs, dtype=torch.int32)
    spans = cu_seqlens.new_empty(levels, tile.chunk, tile.chunk, dtype=tile.dtype)
    _cut_chunks[(num_seqs + 1,)](
        cu_seqlens,
        cache_indices,
        track_lens,
        chunks,
        first_chunks,
        spans,
        num_seqs,
        max_chunks,
        C=tile.chunk,
        LEVELS=levels,
        BB=triton.next_power_of_2(num_seqs),
        BN=128,
    )
    return chunks, first_chunks, spans


@triton.jit(do_not_specialize=["num_seqs", "max_chunks"])
def _cut_chunks(
    cu_seqlens,
    cache_indices,
    track_lens,
    chunks,
    first_chunks,
    spans,
    num_seqs,
    max_chunks,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    BB: tl.constexpr,
    BN: tl.constexpr,
):
    """Program b writes begin and length of each chunk of sequence b; one more empties the rest and writes ``spans``."""
    i_b = tl.program_id(0)
    o_b, o_n = tl.arange(0, BB), tl.arange(0, BN)
    begin, depth, length = _extent(cu_seqlens, cache_indices, track_lens, o_b, o_b < num_seqs)
    b_counts = tl.cdiv(depth, C) + tl.cdiv(length - depth, C)
    first = tl.sum(tl.where(o_b < i_b, b_counts, 0), axis=0)
    begin, depth, length = _extent(cu_seqlens, cache_indices, track_lens, i_b, i_b < num_seqs)
    before = tl.cdiv(depth, C)
    count = before + tl.cdiv(length - depth, C)
    if i_b < num_seqs:
        tl.store(first_chunks + i_b, first)
    else:
        count = max_chunks - first
        for level in range(LEVELS):
            _write_span(spans, level, C)
    for n in range(0, count, BN):
        i_n = n + o_n
        is_before = i_n < before
        offset = tl.where(is_before, i_n * C, depth + (i_n - before) * C)
        size = tl.maximum(tl.minimum(tl.where(is_before, depth, length) - offset, C), 0)
        tl.store(chunks + 2 * (first + i_n), begin + offset, mask=i_n < count)
        tl.store(chunks + 2 * (first + i_n) + 1, size, mask=i_n < count)


@triton.jit
def _extent(cu_seqlens, cache_indices, track_lens, i_b, mask):
    """Begin, depth of the snapshot (0 without one) and length of sequences; no tokens where padding or masked."""
    begin = tl.load(cu_seqlens + i_b, mask=mask, other=0).to(tl.int32)
    end = tl.load(cu_seqlens + i_b + 1, mask=mask, other=0).to(tl.int32)
    is_used = tl.load(cache_indices + i_b, mask=mask, other=-1) >= 0
    depth = tl.zeros_like(begin)
    if track_lens is not None:
        depth = tl.maximum(tl.load(track_lens + i_b, mask=mask & is_used, other=0).to(tl.int32), 0)
    return begin, depth, tl.where(is_used, end - begin, 0)


@triton.jit
def _write_span(spans, level, C: tl.constexpr):
    """Row i of ``[C, C]``: 1 at the tokens between i, itself in a second half, and the middle (see ``_meet``)."""
    o_i, o_j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    half, is_second = _half(o_i, level)
    first = tl.where(is_second, half, o_i + 1)
    end = tl.where(is_second, o_i + 1, half + (1 << level))
    b_span = tl.where((o_j >= first) & (o_j < end), 1.0, 0.0)
    tl.store(spans + (level * C + o_i) * C + o_j, b_span.to(spans.dtype.element_ty))


@triton.jit
def _within_chunks(
    q,
    k,
    v,
    g,
    beta,
    chunks,
    spans,
    q_in,
    w,
    k_out,
    u,
    mix,
    decay,
    q_strides,
    k_strides,
    v_strides,
    g_strides,
    beta_strides,
    scale,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    DTYPE: tl.constexpr,
    LEVELS: tl.constexpr,
    STRETCH: tl.constexpr,
    BS: tl.constexpr,
    SOLVE_DTYPE: tl.constexpr,
):
    """What a chunk of one head needs beside the state: ``q_in`` is q exp(G), ``k_out`` k exp(G_C - G), ``mix`` is M."""
    i_h, i_n = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    begin, length = tl.load(chunks + 2 * i_n).to(tl.int64), tl.load(chunks + 2 * i_n + 1)
    if length == 0:
        return
    o_c, o_t = tl.arange(0, C), begin + tl.arange(0, C)
    m_t = o_c < length
    p_q = q + i_h * q_strides[1] + o_t[:, None] * q_strides[0]
    p_k = k + i_h * k_strides[1] + o_t[:, None] * k_strides[0]
    p_v = v + i_h * v_strides[1] + o_t[:, None] * v_strides[0]
    p_g = g + i_h * g_strides[1] + o_t[:, None] * g_strides[0]
    b_beta = tl.load(beta + i_h * beta_strides[1] + o_t * beta_strides[0], mask=m_t, other=0.0)
    o_th = (o_t[:, None] * H + i_h).to(tl.int64)

    b_a, b_mix = tl.zeros([C, C], dtype=tl.float32), tl.zeros([C, C], dtype=tl.float32)
    b_q_square, b_k_square = tl.zeros([C], dtype=tl.float32), tl.zeros([C], dtype=tl.float32)
    for first in range(0, BK, BS):
        b_q, b_k, b_g = _load_channels(p_q, p_k, p_g, q_strides, k_strides, g_strides, first, m_t, K, BS)
        b_q_square += tl.sum(b_q * b_q, axis=1)
        b_k_square += tl.sum(b_k * b_k, axis=1)
        tokens = (b_q, b_k, b_g, spans)
        if STRETCH > 0:
            b_a, b_mix = _meet(b_a, b_mix, tokens, STRETCH - 1, True, C, DTYPE)
        else:
            b_mix += tl.where(o_c[:, None] == o_c[None, :], tl.sum(b_q * b_k, axis=1)[:, None], 0.0)
        for level in range(STRETCH, LEVELS):
            b_a, b_mix = _meet(b_a, b_mix, tokens, level, False, C, DTYPE)
    b_q_factor = scale / tl.sqrt(b_q_square + EPS)  # [C]
    b_k_factor = 1.0 / tl.sqrt(b_k_square + EPS)
    b_mix *= b_q_factor[:, None] * b_k_factor[None, :]
    tl.store(mix + o_th * C + o_c[None, :], b_mix.to(DTYPE), mask=m_t[:, None])
    b_a *= (b_beta * b_k_factor)[:, None] * b_k_factor[None, :]
    b_solve = (_inverse(b_a, C, LEVELS, SOLVE_DTYPE) * b_beta[None, :]).to(DTYPE)

    b_until = tl.where(o_c[:, None] >= o_c[None, :], 1.0, 0.0)
    for first in range(0, BK, BS):
        b_q, b_k, b_g = _load_channels(p_q, p_k, p_g, q_strides, k_strides, g_strides, first, m_t, K, BS)
        b_decay = tl.exp2(_sum_rows(b_until, b_g, DTYPE))
        b_after = tl.exp2(_sum_rows(1.0 - b_until, b_g, DTYPE))
        b_k *= b_k_factor[:, None]
        o_k = first + tl.arange(0, BS)
        o_tk = o_th * BK + o_k[None, :]
        tl.store(q_in + o_tk, (b_q * b_q_factor[:, None] * b_decay).to(DTYPE), mask=m_t[:, None])
        tl.store(k_out + o_tk, (b_k * b_after).to(DTYPE), mask=m_t[:, None])
        tl.store(w + o_tk, _dot(b_solve, b_k * b_decay, None, DTYPE).to(DTYPE), mask=m_t[:, None])
        tl.store(decay + (i_n * H + i_h) * BK + o_k, tl.exp2(tl.sum(b_g, axis=0)))
    for first in range(0, V, BS):
        o_v = first + tl.arange(0, BS)
        m_tv = m_t[:, None] & (o_v < V)[None, :]
        b_v = tl.load(p_v + o_v[None, :] * v_strides[2], mask=m_tv, other=0.0)
        tl.store(u + o_th * V + o_v[None, :], _dot(b_solve, b_v, None, DTYPE).to(DTYPE), mask=m_tv)


@triton.jit
def _load_channels(p_q, p_k, p_g, q_strides, k_strides, g_strides, first, m_t, K: tl.constexpr, BS: tl.constexpr):
    """q, k and g ``[C, BS]`` of ``BS`` channels from ``first`` on, in fp32; g to the base of 2."""
    o_k = first + tl.arange(0, BS)
    m_tk = m_t[:, None] & (o_k < K)[None, :]
    b_q = tl.load(p_q + o_k[None, :] * q_strides[2], mask=m_tk, other=0.0).to(tl.float32)
    b_k = tl.load(p_k + o_k[None, :] * k_strides[2], mask=m_tk, other=0.0).to(tl.float32)
    b_g = tl.load(p_g + o_k[None, :] * g_strides[2], mask=m_tk, other=0.0)
    return b_q, b_k, tl.maximum(b_g * PER_LN_2, FORGOTTEN, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _meet(b_a, b_mix, tokens, level, WITHIN: tl.constexpr, C: tl.constexpr, DTYPE: tl.constexpr):
    """What some key channels give to A (without beta) and to M ``[C, C]``, by pairs in stretches of 2^(level+1) tokens.

    Token i meets an earlier token j through the last token m of the first half of their stretch: exp(G_i - G_j) =
    exp(G_i - G_m) exp(G_m - G_j). So one in the second half needs the sum of g from the middle to itself, one in the
    first half that of the tokens after it. Pairs of one half are met at lower levels, or here too if ``WITHIN``.
    """
    b_q, b_k, b_g, spans = tokens
    o_i, o_j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    b_until = _sum_rows(tl.load(spans + (level * C + o_i) * C + o_j), b_g, DTYPE)
    if WITHIN:
        _, is_second = _half(o_i, level)
        b_until = tl.where(is_second, b_until, -b_until)
        b_before = tl.exp2(-b_until)
        m_mix = (o_i >> level + 1 == o_j >> level + 1) & (o_i >= o_j)
        m_a = m_mix & (o_i > o_j)
    else:
        b_before = tl.exp2(b_until)
        m_mix = _crosses(level, C)
        m_a = m_mix
    b_until = tl.exp2(b_until)
    b_k_before = tl.trans((b_k * b_before).to(DTYPE))
    b_a = tl.where(m_a, b_a + _dot(b_k * b_until, b_k_before, None, DTYPE), b_a)
    b_mix = tl.where(m_mix, b_mix + _dot(b_q * b_until, b_k_before, None, DTYPE), b_mix)
    return b_a, b_mix


@triton.jit
def _inverse(b_a, C: tl.constexpr, LEVELS: tl.constexpr, DTYPE: tl.constexpr):
    """``(I + A)^-1`` of a strictly lower triangular A ``[C, C]``.

    By halves again: if R inverts I + A inside either half, then R - R A' R inverts it inside the whole, where A' is the
    part of A that crosses from the first half to the second. No entry exceeds 1: it is what a unit error at one token
    changes at a later one, and on the way a state only shrinks.
    """
    o_i, o_j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    b_inverse = tl.where(o_i == o_j, 1.0, tl.where(_crosses(0, C), -b_a, 0.0))
    for level in range(1, LEVELS):
        b_right = _dot(tl.where(_crosses(level, C), b_a, 0.0), b_inverse, None, DTYPE)
        b_inverse -= _dot(b_inverse, b_right, None, DTYPE)
    return b_inverse


@triton.jit
def _half(o_c, level):
    """First token of the half of 2^level tokens to which a token belongs, and whether that is the second half."""
    return o_c >> level << level, o_c >> level & 1 == 1


@triton.jit
def _crosses(level, C: tl.constexpr):
    """Pairs ``[C, C]`` whose row is in the second and whose column in the first half of the same 2^(level+1) tokens."""
    o_i, o_j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    half, is_second = _half(o_i, level)
    return (o_j >= tl.where(is_second, half - (1 << level), C)) & (o_j < half)


@triton.jit
def _over_chunks(
    o,
    q_in,
    w,
    k_out,
    u,
    mix,
    decay,
    ssm_states,
    cu_seqlens,
    cache_indices,
    track_lens,
    has_initial_state,
    track_indices,
    first_chunks,
    o_strides,
    state_strides,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    DTYPE: tl.constexpr,
    BV: tl.constexpr,
):
    """One sequence of one head, ``BV`` value channels: from the state to the outputs, snapshot and last state."""
    i_h, i_b = tl.program_id(1).to(tl.int64), tl.program_id(2)
    slot = tl.load(cache_indices + i_b).to(tl.int64)
    if slot < 0:
        return
    o_k, o_v = tl.arange(0, BK), tl.program_id(0) * BV + tl.arange(0, BV)
    m_state = (o_v < V)[:, None] & (o_k < K)[None, :]
    p_state = ssm_states + i_h * state_strides[1]
    p_state += o_v[:, None].to(tl.int64) * state_strides[2] + o_k[None, :] * state_strides[3]
    m_start = m_state & tl.load(has_initial_state + i_b)
    b_state_vk = tl.load(p_state + slot * state_strides[0], mask=m_start, other=0.0).to(tl.float32)  # [BV, BK]

    begin, depth, length = _extent(cu_seqlens, cache_indices, track_lens, i_b, True)
    chunk = tl.load(first_chunks + i_b)
    cut, end = begin + depth, begin + length
    rows = (o, o_strides, q_in, w, k_out, u, mix, decay)
    if track_lens is not None:
        b_state_vk = _advance(b_state_vk, begin, cut, chunk, rows, i_h, o_v, H, V, C, BK, DTYPE)
        if tl.load(track_lens + i_b) >= 0:
            target = tl.load(track_indices + i_b).to(tl.int64)
            tl.store(p_state + target * state_strides[0], b_state_vk.to(ssm_states.dtype.element_ty), mask=m_state)
        chunk += tl.cdiv(depth, C)
    b_state_vk = _advance(b_state_vk, cut, end, chunk, rows, i_h, o_v, H, V, C, BK, DTYPE)
    tl.store(p_state + slot * state_strides[0], b_state_vk.to(ssm_states.dtype.element_ty), mask=m_state)


@triton.jit
def _advance(
    b_state_vk,
    begin,
    end,
    chunk,
    rows,
    i_h,
    o_v,
    H: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Tokens ``begin`` to ``end`` of one head, whose first chunk is ``chunk``; writes the outputs, gives the state."""
    o, o_strides, q_in, w, k_out, u, mix, decay = rows
    o_c, o_k = tl.arange(0, C).to(tl.int64), tl.arange(0, BK)
    p_decay = decay + (chunk.to(tl.int64) * H + i_h) * BK + o_k
    b_next_decay = tl.load(p_decay, mask=begin < end, other=0.0)
    for first in range(begin, end, C):
        b_decay = b_next_decay
        p_decay += H * BK
        b_next_decay = tl.load(p_decay, mask=first + C < end, other=0.0)
        o_t, m_t = first + o_c, first + o_c < end
        o_th = o_t[:, None] * H + i_h
        m_vt = (o_v < V)[:, None] & m_t[None, :]
        b_w = tl.load(w + o_th * BK + o_k[None, :], mask=m_t[:, None], other=0.0)
        b_u = tl.load(u + (o_t[None, :] * H + i_h) * V + o_v[:, None], mask=m_vt, other=0.0).to(tl.float32)  # [BV, C]
        b_u -= _dot(b_state_vk, tl.trans(b_w), None, DTYPE)

        b_q_in = tl.load(q_in + o_th * BK + o_k[None, :], mask=m_t[:, None], other=0.0)
        b_mix = tl.load(mix + o_th * C + o_c[None, :], mask=m_t[:, None], other=0.0)
        b_o = _dot(b_state_vk, tl.trans(b_q_in), None, DTYPE)
        b_o = _dot(b_u, tl.trans(b_mix), b_o, DTYPE)
        p_o = o + i_h * o_strides[1] + o_v[:, None] * o_strides[2] + o_t[None, :] * o_strides[0]
        tl.store(p_o, b_o.to(o.dtype.element_ty), mask=m_vt)

        b_k_out = tl.load(k_out + o_th * BK + o_k[None, :], mask=m_t[:, None], other=0.0)
        b_state_vk = _dot(b_u, b_k_out, b_state_vk * b_decay[None, :], DTYPE)
    return b_state_vk


@triton.jit
def _dot(b_x, b_y, acc, DTYPE: tl.constexpr):
    """``acc + x @ y`` with operands of ``DTYPE``, summed in fp32.

    Tensor cores read the upper 19 bits of fp32, so there each operand comes in two parts, in three passes.
    """
    if not DTYPE.is_fp32():
        return tl.dot(b_x.to(DTYPE), b_y.to(DTYPE), acc=acc)
    b_x_high, b_x_low = _split(b_x, DTYPE)
    b_y_high, b_y_low = _split(b_y, DTYPE)
    b_small = tl.dot(b_x_low, b_y_high, acc=acc, input_precision="tf32")
    b_small = tl.dot(b_x_high, b_y_low, acc=b_small, input_precision="tf32")
    return tl.dot(b_x_high, b_y_high, acc=b_small, input_precision="tf32")


@triton.jit
def _sum_rows(b_rows, b_x, DTYPE: tl.constexpr):
    """Sums of the rows of ``x`` that have a 1 in ``rows [C, C]``, on tensor cores: 0 and 1 are exact, x is in parts."""
    b_rows = b_rows.to(DTYPE)
    b_x_high, b_x_low = _split(b_x, DTYPE)
    return tl.dot(b_rows, b_x_high, acc=tl.dot(b_rows, b_x_low, input_precision="tf32"), input_precision="tf32")


@triton.jit
def _split(b_x, DTYPE: tl.constexpr):
    """``x`` of fp32 as one number that tensor cores read whole, tf32 or of a narrower ``DTYPE``, and the rest."""
    if DTYPE.is_fp32():
        b_high = (b_x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    else:
        b_high = b_x.to(DTYPE)
    return b_high, (b_x - b_high.to(tl.float32)).to(DTYPE)
