"""Triton kernel of ``kda_decode``: each program advances ``BV`` rows of one head's state, read once and written once.

Bound by the bandwidth of the state. A row of the state lies along the lanes of one warp, 16 bytes a lane at K = 128 in
fp32, and its two sums stay inside that warp. The tile does not depend on the batch, so neither do the bits of a row.

Legend: B sequences, H heads, K key channels, V value channels; BK, BV tiles; ``*_strides`` as of the tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from sglang_k3.kernels.kda_step import L2_NORM_EPS

if TYPE_CHECKING:
    from torch import Tensor

BV = 4
NUM_WARPS = 1
EPS = tl.constexpr(L2_NORM_EPS)


def kda_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    ssm_states: Tensor,
    cache_indices: Tensor,
    scale: float,
) -> Tensor:
    num_seqs, num_heads, key_dim = q.shape
    value_dim = v.shape[2]
    o = v.new_empty(v.shape)
    if o.numel() == 0:
        return o
    _kda_decode[(triton.cdiv(value_dim, BV), num_heads, num_seqs)](
        q,
        k,
        v,
        g,
        beta,
        o,
        ssm_states,
        cache_indices,
        q.stride(),
        k.stride(),
        v.stride(),
        g.stride(),
        beta.stride(),
        o.stride(),
        ssm_states.stride(),
        cache_indices.stride(0),
        scale,
        K=key_dim,
        V=value_dim,
        BK=triton.next_power_of_2(key_dim),
        BV=BV,
        num_warps=NUM_WARPS,
    )
    return o


@triton.jit
def _kda_decode(
    q,
    k,
    v,
    g,
    beta,
    o,
    ssm_states,
    cache_indices,
    q_strides,
    k_strides,
    v_strides,
    g_strides,
    beta_strides,
    o_strides,
    state_strides,
    cache_indices_stride,
    scale,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    i_h, i_b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    o_v, o_k = tl.program_id(0) * BV + tl.arange(0, BV), tl.arange(0, BK)
    m_v, m_k = o_v < V, o_k < K
    p_o = o + i_b * o_strides[0] + i_h * o_strides[1] + o_v * o_strides[2]
    slot = tl.load(cache_indices + i_b * cache_indices_stride).to(tl.int64)
    if slot < 0:
        tl.store(p_o, tl.zeros([BV], dtype=tl.float32).to(o.dtype.element_ty), mask=m_v)
        return

    p_state = ssm_states + slot * state_strides[0] + i_h * state_strides[1]
    p_state += o_v[:, None].to(tl.int64) * state_strides[2] + o_k[None, :] * state_strides[3]
    m_state = m_v[:, None] & m_k[None, :]
    b_state_vk = tl.load(p_state, mask=m_state, other=0.0).to(tl.float32)  # [BV, BK]

    b_q = tl.load(q + i_b * q_strides[0] + i_h * q_strides[1] + o_k * q_strides[2], mask=m_k, other=0.0)
    b_k = tl.load(k + i_b * k_strides[0] + i_h * k_strides[1] + o_k * k_strides[2], mask=m_k, other=0.0)
    b_g = tl.load(g + i_b * g_strides[0] + i_h * g_strides[1] + o_k * g_strides[2], mask=m_k, other=0.0)
    b_v = tl.load(v + i_b * v_strides[0] + i_h * v_strides[1] + o_v * v_strides[2], mask=m_v, other=0.0)
    b_beta = tl.load(beta + i_b * beta_strides[0] + i_h * beta_strides[1])

    b_q, b_k = l2_normalise(b_q) * scale, l2_normalise(b_k)
    b_state_vk, b_o = kda_step(b_state_vk, b_q, b_k, b_v.to(tl.float32), tl.exp(b_g), b_beta)
    tl.store(p_state, b_state_vk.to(ssm_states.dtype.element_ty), mask=m_state)
    tl.store(p_o, b_o.to(o.dtype.element_ty), mask=m_v)


@triton.jit
def kda_step(b_state_vk, b_q, b_k, b_v, b_decay, b_beta):
    """One token of ``kernels.kda_step``, fp32: state ``[BV, BK]``; q, k, decay ``[BK]``; v ``[BV]``; beta scalar."""
    b_state_vk *= b_decay[None, :]
    b_u = b_beta * (b_v - tl.sum(b_state_vk * b_k[None, :], axis=1))
    b_state_vk += b_u[:, None] * b_k[None, :]
    return b_state_vk, tl.sum(b_state_vk * b_q[None, :], axis=1)


@triton.jit
def l2_normalise(b_x):
    """``x / |x|`` over the last dimension, epsilon inside the root, fp32; zeros beyond K change nothing."""
    b_x = b_x.to(tl.float32)
    return b_x / tl.sqrt(tl.sum(b_x * b_x, axis=-1, keep_dims=True) + EPS)
