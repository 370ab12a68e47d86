"""Triton kernels of ``kda_prefill``: the recurrence by chunks of ``C`` tokens.

With G the sum of g since the begin of a chunk, S ``[K, V]`` the state at its begin and u_t the error that token t writes,

    A_ij = beta_i sum_c k_ic k_jc exp(G_ic - G_jc), j < i          M_ij = sum_c q_ic k_jc exp(G_ic - G_jc), j <= i
    u  = (I + A)^-1 diag(beta) (v - (k exp(G)) S)
    o  = (q exp(G)) S + M u
    S <- diag(exp(G_C)) S + (k exp(G_C - G))^T u

in three launches: ``_cut_chunks`` lists the chunks, cut so that one ends at the depth of a snapshot; ``_within_chunks``
does for all of them at once what needs no state; ``_over_chunks`` carries a tile of the state through a sequence.

``exp(-G)`` would overflow, so pairs of tokens are taken by halves (see ``_interactions``) and no exponent is ever
positive, whatever g. Lengths stay on the device: nothing waits for it. Products of fp32 are taken in three passes of
tf32, which keeps the state to fp32; those that only a narrower output sees take one.

Legend: T tokens, B sequences, H heads, K key channels, V value channels, N chunks (upper bound); C, BK, BV tiles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from sglang_k3.kernels.kda_decode.triton_impl import l2_normalise

if TYPE_CHECKING:
    from torch import Tensor

C = 32
BV = 32
WITHIN_WARPS = 8
OVER_WARPS = 4
OVER_STAGES = 2
STATE_PRECISION = "tf32x3"


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
    track_lens: Tensor | None = None,
    track_indices: Tensor | None = None,
) -> Tensor:
    (num_tokens, num_heads, key_dim), num_seqs, value_dim = q.shape, cache_indices.shape[0], v.shape[2]
    o = v.new_zeros(v.shape)
    if num_seqs == 0:
        return o
    parts = 1 if track_lens is None else 2  # before and after the snapshot; each may end in a short chunk
    max_chunks = num_tokens // C + parts * num_seqs
    chunks = cu_seqlens.new_empty(max_chunks, 2, dtype=torch.int32)
    first_chunks = cu_seqlens.new_empty(num_seqs, dtype=torch.int32)
    sequences = (cu_seqlens, cache_indices, track_lens)
    _cut_chunks[(num_seqs + 1,)](
        *sequences, chunks, first_chunks, num_seqs, max_chunks, C=C, BB=triton.next_power_of_2(num_seqs), BN=128
    )

    block_k = max(16, triton.next_power_of_2(key_dim))
    q_in, k_in, k_out = (g.new_empty(num_tokens, num_heads, block_k) for _ in range(3))
    solve, mix = (g.new_empty(num_tokens, num_heads, C) for _ in range(2))
    decay = g.new_empty(max_chunks, num_heads, block_k)
    within = (q_in, k_in, k_out, solve, mix, decay)
    precision = {
        "STATE_PRECISION": STATE_PRECISION,
        "OUT_PRECISION": STATE_PRECISION if v.dtype == torch.float32 else "tf32",
    }
    _within_chunks[(max_chunks, num_heads)](
        q,
        k,
        g,
        beta,
        chunks,
        *within,
        q.stride(),
        k.stride(),
        g.stride(),
        beta.stride(),
        scale,
        H=num_heads,
        K=key_dim,
        C=C,
        LEVELS=C.bit_length() - 1,
        BK=block_k,
        **precision,
        num_warps=WITHIN_WARPS,
    )
    _over_chunks[(triton.cdiv(value_dim, BV), num_heads, num_seqs)](
        v,
        o,
        *within,
        ssm_states,
        *sequences,
        has_initial_state,
        track_indices,
        first_chunks,
        v.stride(),
        o.stride(),
        ssm_states.stride(),
        H=num_heads,
        K=key_dim,
        V=value_dim,
        C=C,
        BK=block_k,
        BV=BV,
        **precision,
        num_warps=OVER_WARPS,
        num_stages=OVER_STAGES,
    )
    return o


@triton.jit(do_not_specialize=["num_seqs", "max_chunks"])
def _cut_chunks(
    cu_seqlens,
    cache_indices,
    track_lens,
    chunks,
    first_chunks,
    num_seqs,
    max_chunks,
    C: tl.constexpr,
    BB: tl.constexpr,
    BN: tl.constexpr,
):
    """Program b writes begin and length of each chunk of sequence b; one more program empties the rest of the list."""
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
def _within_chunks(
    q,
    k,
    g,
    beta,
    chunks,
    q_in,
    k_in,
    k_out,
    solve,
    mix,
    decay,
    q_strides,
    k_strides,
    g_strides,
    beta_strides,
    scale,
    H: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    BK: tl.constexpr,
    STATE_PRECISION: tl.constexpr,
    OUT_PRECISION: tl.constexpr,
):
    """What a chunk of one head needs beside the state; ``solve [C, C]`` is ``(I + A)^-1 diag(beta)``, ``mix`` is M."""
    i_n, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    begin, length = tl.load(chunks + 2 * i_n).to(tl.int64), tl.load(chunks + 2 * i_n + 1)
    if length == 0:
        return
    o_c, o_k = tl.arange(0, C), tl.arange(0, BK)
    o_t, m_t = begin + o_c, o_c < length
    m_tk = m_t[:, None] & (o_k < K)[None, :]
    p_q = q + i_h * q_strides[1] + o_t[:, None] * q_strides[0] + o_k[None, :] * q_strides[2]
    p_k = k + i_h * k_strides[1] + o_t[:, None] * k_strides[0] + o_k[None, :] * k_strides[2]
    p_g = g + i_h * g_strides[1] + o_t[:, None] * g_strides[0] + o_k[None, :] * g_strides[2]
    b_q = l2_normalise(tl.load(p_q, mask=m_tk, other=0.0)) * scale  # [C, BK], as k and g
    b_k = l2_normalise(tl.load(p_k, mask=m_tk, other=0.0))
    b_g = tl.load(p_g, mask=m_tk, other=0.0)
    b_beta = tl.load(beta + i_h * beta_strides[1] + o_t * beta_strides[0], mask=m_t, other=0.0)
    b_g_sum = tl.cumsum(b_g, axis=0)
    b_solve, b_mix = _interactions(b_q, b_k, b_g_sum, b_beta, C, LEVELS, BK, STATE_PRECISION, OUT_PRECISION)

    # Tokens beyond the chunk decay by exp(0), so its whole decay stands in the last row.
    b_g_all = tl.sum(tl.where((o_c == C - 1)[:, None], b_g_sum, 0.0), axis=0)
    b_decay = tl.exp(b_g_sum)
    o_tk = (o_t[:, None] * H + i_h) * BK + o_k[None, :]
    o_tc = (o_t[:, None] * H + i_h) * C + o_c[None, :]
    tl.store(q_in + o_tk, b_q * b_decay, mask=m_t[:, None])
    tl.store(k_in + o_tk, b_k * b_decay, mask=m_t[:, None])
    tl.store(k_out + o_tk, b_k * tl.exp(b_g_all[None, :] - b_g_sum), mask=m_t[:, None])
    tl.store(solve + o_tc, b_solve, mask=m_t[:, None])
    tl.store(mix + o_tc, b_mix, mask=m_t[:, None])
    tl.store(decay + (i_n * H + i_h) * BK + o_k, tl.exp(b_g_all))


@triton.jit
def _interactions(
    b_q,
    b_k,
    b_g_sum,
    b_beta,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    BK: tl.constexpr,
    STATE_PRECISION: tl.constexpr,
    OUT_PRECISION: tl.constexpr,
):
    """``(I + A)^-1 diag(beta)`` and M, ``[C, C]``, by halves: of 2 tokens, then of 4, ... up to C.

    A token i of the second half meets a token j of the first one through the last token m of the first half:
    exp(G_i - G_j) = exp(G_i - G_m) exp(G_m - G_j), both at most one. And if R inverts I + A inside either half, then
    R - R A R inverts it inside the whole, A being what crosses from the first half to the second.
    """
    o_c = tl.arange(0, C)
    is_diagonal = o_c[:, None] == o_c[None, :]
    b_inverse = tl.where(is_diagonal, 1.0, 0.0)
    b_mix = tl.where(is_diagonal, tl.sum(b_q * b_k, axis=1)[:, None], 0.0)
    for level in range(LEVELS):
        b_pair, b_half = o_c >> (level + 1), (o_c >> level) & 1
        b_middle = tl.broadcast_to(((2 * b_pair + 1 << level) - 1)[:, None], (C, BK))
        b_decay = tl.exp(-tl.abs(b_g_sum - tl.gather(b_g_sum, b_middle, axis=0)))
        b_k_middle = b_k * b_decay
        crosses = (b_pair[:, None] == b_pair[None, :]) & (b_half[:, None] > b_half[None, :])
        b_a = tl.dot(b_k_middle, tl.trans(b_k_middle), input_precision=STATE_PRECISION)
        b_a = tl.where(crosses, b_beta[:, None] * b_a, 0.0)
        b_m = tl.dot(b_q * b_decay, tl.trans(b_k_middle), input_precision=OUT_PRECISION)
        b_mix += tl.where(crosses, b_m, 0.0)
        b_ar = tl.dot(b_a, b_inverse, input_precision=STATE_PRECISION)
        b_inverse -= tl.dot(b_inverse, b_ar, input_precision=STATE_PRECISION)
    return b_inverse * b_beta[None, :], b_mix


@triton.jit
def _over_chunks(
    v,
    o,
    q_in,
    k_in,
    k_out,
    solve,
    mix,
    decay,
    ssm_states,
    cu_seqlens,
    cache_indices,
    track_lens,
    has_initial_state,
    track_indices,
    first_chunks,
    v_strides,
    o_strides,
    state_strides,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    STATE_PRECISION: tl.constexpr,
    OUT_PRECISION: tl.constexpr,
):
    """One sequence of one head, ``BV`` value channels: from the state to the outputs, snapshot and last state."""
    i_h, i_b = tl.program_id(1).to(tl.int64), tl.program_id(2)
    slot = tl.load(cache_indices + i_b).to(tl.int64)
    if slot < 0:
        return
    o_k, o_v = tl.arange(0, BK), tl.program_id(0) * BV + tl.arange(0, BV)
    m_state = (o_k < K)[:, None] & (o_v < V)[None, :]
    p_state = ssm_states + i_h * state_strides[1]
    p_state += o_k[:, None] * state_strides[3] + o_v[None, :].to(tl.int64) * state_strides[2]
    continues = tl.load(has_initial_state + i_b)
    b_state = tl.load(p_state + slot * state_strides[0], mask=m_state & continues, other=0.0).to(tl.float32)  # [BK, BV]

    begin, depth, length = _extent(cu_seqlens, cache_indices, track_lens, i_b, True)
    chunk = tl.load(first_chunks + i_b)
    cut = begin + depth
    rows = (v, o, q_in, k_in, k_out, solve, mix, decay)
    if track_lens is not None:
        b_state = _advance(
            b_state, begin, cut, chunk, rows, v_strides, o_strides, i_h, o_v,
            H, V, C, BK, STATE_PRECISION, OUT_PRECISION,
        )  # fmt: skip
        if tl.load(track_lens + i_b) >= 0:
            target = tl.load(track_indices + i_b).to(tl.int64)
            tl.store(p_state + target * state_strides[0], b_state.to(ssm_states.dtype.element_ty), mask=m_state)
    b_state = _advance(
        b_state, cut, begin + length, chunk + tl.cdiv(depth, C), rows, v_strides, o_strides, i_h, o_v,
        H, V, C, BK, STATE_PRECISION, OUT_PRECISION,
    )  # fmt: skip
    tl.store(p_state + slot * state_strides[0], b_state.to(ssm_states.dtype.element_ty), mask=m_state)


@triton.jit
def _advance(
    b_state,
    begin,
    end,
    chunk,
    rows,
    v_strides,
    o_strides,
    i_h,
    o_v,
    H: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    STATE_PRECISION: tl.constexpr,
    OUT_PRECISION: tl.constexpr,
):
    """Tokens ``begin`` to ``end`` of one head, whose first chunk is ``chunk``; writes the outputs, gives the state."""
    v, o, q_in, k_in, k_out, solve, mix, decay = rows
    o_c, o_k = tl.arange(0, C).to(tl.int64), tl.arange(0, BK)
    for first in range(begin, end, C):
        o_t, m_t = first + o_c, first + o_c < end
        m_tv = m_t[:, None] & (o_v < V)[None, :]
        o_tk = (o_t[:, None] * H + i_h) * BK + o_k[None, :]
        o_tc = (o_t[:, None] * H + i_h) * C + o_c[None, :]
        p_v = v + i_h * v_strides[1] + o_t[:, None] * v_strides[0] + o_v[None, :] * v_strides[2]
        p_o = o + i_h * o_strides[1] + o_t[:, None] * o_strides[0] + o_v[None, :] * o_strides[2]
        b_k_in = tl.load(k_in + o_tk, mask=m_t[:, None], other=0.0)
        b_v = tl.load(p_v, mask=m_tv, other=0.0).to(tl.float32)
        b_solve = tl.load(solve + o_tc, mask=m_t[:, None], other=0.0)
        b_u = b_v - tl.dot(b_k_in, b_state, input_precision=STATE_PRECISION)
        b_u = tl.dot(b_solve, b_u, input_precision=STATE_PRECISION)  # [C, BV]

        b_q_in = tl.load(q_in + o_tk, mask=m_t[:, None], other=0.0)
        b_mix = tl.load(mix + o_tc, mask=m_t[:, None], other=0.0)
        b_o = tl.dot(b_q_in, b_state, input_precision=OUT_PRECISION)
        b_o = tl.dot(b_mix, b_u, acc=b_o, input_precision=OUT_PRECISION)
        tl.store(p_o, b_o.to(o.dtype.element_ty), mask=m_tv)

        b_k_out = tl.load(k_out + o_tk, mask=m_t[:, None], other=0.0)
        b_decay = tl.load(decay + (chunk.to(tl.int64) * H + i_h) * BK + o_k)
        b_state *= b_decay[:, None]
        b_state = tl.dot(tl.trans(b_k_out), b_u, acc=b_state, input_precision=STATE_PRECISION)
        chunk += 1
    return b_state
