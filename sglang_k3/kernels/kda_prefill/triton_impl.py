"""Triton kernels of ``kda_prefill``: the recurrence by chunks of ``C`` tokens.

With G the sum of g since the begin of a chunk, S ``[K, V]`` the state at its begin and u the errors that tokens write,

    A_ij = beta_i sum_c k_ic k_jc exp(G_ic - G_jc), j < i          M_ij = sum_c q_ic k_jc exp(G_ic - G_jc), j <= i
    u  = (I + A)^-1 diag(beta) (v - (k exp(G)) S)
    o  = (q exp(G)) S + M u
    S <- diag(exp(G_C)) S + (k exp(G_C - G))^T u

in three launches: ``_cut_chunks`` lists the chunks, cut so that one ends at the depth of a snapshot; ``_within_chunks``
does for all of them at once what needs no state; ``_over_chunks`` carries a tile of the state through a sequence.

``exp(-G)`` would overflow, so pairs of tokens are taken by halves (see ``_interact``): no exponent is ever positive and
none is a difference, whatever g. Lengths stay on the device: nothing waits for it. With fp32 inputs products are taken
in three passes of tf32, which keeps the state to fp32; narrower inputs are worth one.

Legend: T tokens, B sequences, H heads, K key channels, V value channels, N chunks (upper bound); C, BK, BS, BV tiles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from sglang_k3.kernels.kda_step import L2_NORM_EPS

if TYPE_CHECKING:
    from torch import Tensor

C, BS, BV = 32, 32, 32  # tokens, key channels in _within_chunks, value channels in _over_chunks
WITHIN_WARPS = 2
OVER_WARPS = 4
OVER_STAGES = 2
EPS = tl.constexpr(L2_NORM_EPS)


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
    cu_seqlens, cache_indices, has_initial_state = (
        x.contiguous() for x in (cu_seqlens, cache_indices, has_initial_state)
    )
    if track_lens is not None and track_indices is not None:
        track_lens, track_indices = track_lens.contiguous(), track_indices.contiguous()
    sequences = (cu_seqlens, cache_indices, track_lens)
    _cut_chunks[(num_seqs + 1,)](
        *sequences, chunks, first_chunks, num_seqs, max_chunks, C=C, BB=triton.next_power_of_2(num_seqs), BN=128
    )

    block_k = max(16, triton.next_power_of_2(key_dim))
    q_in, k_in, k_out = (g.new_empty(num_tokens, num_heads, block_k) for _ in range(3))
    solve, mix = (g.new_empty(num_tokens, num_heads, C) for _ in range(2))
    decay = g.new_empty(max_chunks, num_heads, block_k)
    within = (q_in, k_in, k_out, solve, mix, decay)
    is_fp32 = torch.float32 in (q.dtype, k.dtype, v.dtype)
    sizes = {
        "H": num_heads,
        "K": key_dim,
        "C": C,
        "BK": block_k,
        "STATE_PASSES": 3 if is_fp32 else 1,
        "OUT_PASSES": 3 if v.dtype == torch.float32 else 1,
    }
    inputs = (q, k, g, beta)
    _within_chunks[(max_chunks, num_heads)](
        *inputs,
        chunks,
        *within,
        *(x.stride() for x in inputs),
        scale,
        **sizes,
        LEVELS=C.bit_length() - 1,
        BS=min(BS, block_k),
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
        *(x.stride() for x in (v, o, ssm_states)),
        **sizes,
        V=value_dim,
        BV=BV,
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
    BK: tl.constexpr,
    STATE_PASSES: tl.constexpr,
    OUT_PASSES: tl.constexpr,
    LEVELS: tl.constexpr,
    BS: tl.constexpr,
):
    """What a chunk of one head needs beside the state; ``solve [C, C]`` is ``(I + A)^-1 diag(beta)``, ``mix`` is M."""
    i_n, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    begin, length = tl.load(chunks + 2 * i_n).to(tl.int64), tl.load(chunks + 2 * i_n + 1)
    if length == 0:
        return
    o_c, o_t = tl.arange(0, C), begin + tl.arange(0, C)
    m_t = o_c < length
    p_q = q + i_h * q_strides[1] + o_t[:, None] * q_strides[0]
    p_k = k + i_h * k_strides[1] + o_t[:, None] * k_strides[0]
    p_g = g + i_h * g_strides[1] + o_t[:, None] * g_strides[0]
    b_q_factor = scale / _norm(p_q, q_strides[2], m_t, K, BK)  # [C, 1]
    b_k_factor = 1.0 / _norm(p_k, k_strides[2], m_t, K, BK)
    b_beta = tl.load(beta + i_h * beta_strides[1] + o_t * beta_strides[0], mask=m_t, other=0.0)

    b_a, b_mix = tl.zeros([C, C], dtype=tl.float32), tl.zeros([C, C], dtype=tl.float32)
    for first in range(0, BK, BS):
        o_k = first + tl.arange(0, BS)
        m_tk = m_t[:, None] & (o_k < K)[None, :]
        b_q = tl.load(p_q + o_k[None, :] * q_strides[2], mask=m_tk, other=0.0).to(tl.float32) * b_q_factor
        b_k = tl.load(p_k + o_k[None, :] * k_strides[2], mask=m_tk, other=0.0).to(tl.float32) * b_k_factor
        b_g = tl.load(p_g + o_k[None, :] * g_strides[2], mask=m_tk, other=0.0)
        b_a, b_mix, b_before, b_after = _interact(b_a, b_mix, b_q, b_k, b_g, C, LEVELS, BS, STATE_PASSES, OUT_PASSES)
        b_decay = tl.exp(b_before)
        o_tk = (o_t[:, None] * H + i_h) * BK + o_k[None, :]
        tl.store(q_in + o_tk, b_q * b_decay, mask=m_t[:, None])
        tl.store(k_in + o_tk, b_k * b_decay, mask=m_t[:, None])
        tl.store(k_out + o_tk, b_k * tl.exp(b_after), mask=m_t[:, None])
        # Rows beyond the chunk do not decay, so its whole decay stands in the last row.
        b_decay_all = tl.sum(tl.where((o_c == C - 1)[:, None], b_decay, 0.0), axis=0)
        tl.store(decay + (i_n * H + i_h) * BK + o_k, b_decay_all)

    o_tc = (o_t[:, None] * H + i_h) * C + o_c[None, :]
    b_solve = _inverse(b_a * b_beta[:, None], C, LEVELS, STATE_PASSES) * b_beta[None, :]
    tl.store(solve + o_tc, b_solve, mask=m_t[:, None])
    tl.store(mix + o_tc, b_mix, mask=m_t[:, None])


@triton.jit
def _norm(p_x, stride, m_t, K: tl.constexpr, BK: tl.constexpr):
    """Lengths of the rows at ``p_x [C, 1]``."""
    o_k = tl.arange(0, BK)
    b_x = tl.load(p_x + o_k[None, :] * stride, mask=m_t[:, None] & (o_k < K)[None, :], other=0.0).to(tl.float32)
    return tl.sqrt(tl.sum(b_x * b_x, axis=1, keep_dims=True) + EPS)


@triton.jit
def _interact(
    b_a,
    b_mix,
    b_q,
    b_k,
    b_g,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    BS: tl.constexpr,
    STATE_PASSES: tl.constexpr,
    OUT_PASSES: tl.constexpr,
):
    """What ``BS`` key channels give to A (without beta) and to M ``[C, C]``, added by halves of 2, 4, ..., C tokens.

    A token i of the second half meets a token j of the first one through the last token m of the first half:
    exp(G_i - G_j) = exp(G_i - G_m) exp(G_m - G_j). So i needs the sum of g from the begin of its half to itself, j that
    of the tokens after it in its half; both grow from half to half, and nothing is ever subtracted. In the end they are
    the sums over the chunk, which are returned too.
    """
    o_c = tl.arange(0, C)
    b_before, b_after = b_g, tl.zeros_like(b_g)
    b_mix += tl.where(o_c[:, None] == o_c[None, :], tl.sum(b_q * b_k, axis=1)[:, None], 0.0)
    for level in range(LEVELS):
        is_second = (o_c >> level & 1 == 1)[:, None]
        b_decay = tl.exp(tl.where(is_second, b_before, b_after))
        b_k_middle = b_k * b_decay
        m_cross = _crosses(level, C)
        b_a += tl.where(m_cross, _dot(b_k_middle, tl.trans(b_k_middle), None, STATE_PASSES), 0.0)
        b_mix += tl.where(m_cross, _dot(b_q * b_decay, tl.trans(b_k_middle), None, OUT_PASSES), 0.0)

        # The sum over the other half stands in its last row.
        o_last = ((o_c[:, None] >> level) + tl.where(is_second, 0, 2) << level) - 1
        b_other = tl.gather(b_before, tl.broadcast_to(o_last, (C, BS)), axis=0)
        b_before += tl.where(is_second, b_other, 0.0)
        b_after += tl.where(is_second, 0.0, b_other)
    return b_a, b_mix, b_before, b_after


@triton.jit
def _inverse(b_a, C: tl.constexpr, LEVELS: tl.constexpr, PASSES: tl.constexpr):
    """``(I + A)^-1`` of a strictly lower triangular A ``[C, C]``.

    By halves again: if R inverts I + A inside either half, then R - R A' R inverts it inside the whole, where A' is the
    part of A that crosses from the first half to the second.
    """
    o_c = tl.arange(0, C)
    b_inverse = tl.where(o_c[:, None] == o_c[None, :], 1.0, 0.0)
    for level in range(LEVELS):
        b_right = _dot(tl.where(_crosses(level, C), b_a, 0.0), b_inverse, None, PASSES)
        b_inverse -= _dot(b_inverse, b_right, None, PASSES)
    return b_inverse


@triton.jit
def _crosses(level, C: tl.constexpr):
    """Pairs ``[C, C]`` whose row is in the second and whose column in the first half of the same 2^(level+1) tokens."""
    o_i, o_j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    return (o_i >> level == (o_j >> level) + 1) & (o_i >> level + 1 == o_j >> level + 1)


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
    C: tl.constexpr,
    BK: tl.constexpr,
    STATE_PASSES: tl.constexpr,
    OUT_PASSES: tl.constexpr,
    V: tl.constexpr,
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
    rows = (v, o, v_strides, o_strides, q_in, k_in, k_out, solve, mix, decay)
    if track_lens is not None:
        b_state_vk = _advance(b_state_vk, begin, cut, chunk, rows, i_h, o_v, H, V, C, BK, STATE_PASSES, OUT_PASSES)
        if tl.load(track_lens + i_b) >= 0:
            target = tl.load(track_indices + i_b).to(tl.int64)
            tl.store(p_state + target * state_strides[0], b_state_vk.to(ssm_states.dtype.element_ty), mask=m_state)
        chunk += tl.cdiv(depth, C)
    b_state_vk = _advance(b_state_vk, cut, end, chunk, rows, i_h, o_v, H, V, C, BK, STATE_PASSES, OUT_PASSES)
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
    STATE_PASSES: tl.constexpr,
    OUT_PASSES: tl.constexpr,
):
    """Tokens ``begin`` to ``end`` of one head, whose first chunk is ``chunk``; writes the outputs, gives the state."""
    v, o, v_strides, o_strides, q_in, k_in, k_out, solve, mix, decay = rows
    o_c, o_k = tl.arange(0, C).to(tl.int64), tl.arange(0, BK)
    for first in range(begin, end, C):
        o_t, m_t = first + o_c, first + o_c < end
        m_vt = (o_v < V)[:, None] & m_t[None, :]
        o_tk = (o_t[:, None] * H + i_h) * BK + o_k[None, :]
        o_tc = (o_t[:, None] * H + i_h) * C + o_c[None, :]
        p_v = v + i_h * v_strides[1] + o_v[:, None] * v_strides[2] + o_t[None, :] * v_strides[0]
        p_o = o + i_h * o_strides[1] + o_v[:, None] * o_strides[2] + o_t[None, :] * o_strides[0]
        b_k_in = tl.load(k_in + o_tk, mask=m_t[:, None], other=0.0)
        b_v = tl.load(p_v, mask=m_vt, other=0.0).to(tl.float32)
        b_solve = tl.load(solve + o_tc, mask=m_t[:, None], other=0.0)
        b_u = b_v - _dot(b_state_vk, tl.trans(b_k_in), None, STATE_PASSES)
        b_u = _dot(b_u, tl.trans(b_solve), None, STATE_PASSES)  # [BV, C]

        b_q_in = tl.load(q_in + o_tk, mask=m_t[:, None], other=0.0)
        b_mix = tl.load(mix + o_tc, mask=m_t[:, None], other=0.0)
        b_o = _dot(b_state_vk, tl.trans(b_q_in), None, OUT_PASSES)
        b_o = _dot(b_u, tl.trans(b_mix), b_o, OUT_PASSES)
        tl.store(p_o, b_o.to(o.dtype.element_ty), mask=m_vt)

        b_k_out = tl.load(k_out + o_tk, mask=m_t[:, None], other=0.0)
        b_decay = tl.load(decay + (chunk.to(tl.int64) * H + i_h) * BK + o_k)
        b_state_vk *= b_decay[None, :]
        b_state_vk = _dot(b_u, b_k_out, b_state_vk, STATE_PASSES)
        chunk += 1
    return b_state_vk


@triton.jit
def _dot(b_x, b_y, acc, PASSES: tl.constexpr):
    """``acc + x @ y`` of fp32 on tensor cores, which read the upper 19 bits: each operand in two parts, in 3 passes."""
    if PASSES == 1:
        return tl.dot(b_x, b_y, acc=acc, input_precision="tf32")
    b_x_high, b_x_low = _split(b_x)
    b_y_high, b_y_low = _split(b_y)
    b_small = tl.dot(b_x_low, b_y_high, acc=acc, input_precision="tf32")
    b_small = tl.dot(b_x_high, b_y_low, acc=b_small, input_precision="tf32")
    return tl.dot(b_x_high, b_y_high, acc=b_small, input_precision="tf32")


@triton.jit
def _split(b_x):
    """``x`` as one number of tf32 and the rest."""
    b_high = (b_x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    return b_high, b_x - b_high
