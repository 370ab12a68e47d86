"""Triton kernels of ``short_conv_prefill``: one for the outputs, then one for the states that the outputs started from.

The outputs are tiles of packed tokens by channels. Each token finds the start of its sequence by bisection, so neither
the number of sequences nor their lengths shape the grid, and the host never waits for them. Where a tile lies inside
one sequence, behind its first tokens, a row of inputs is read once and serves the outputs of all taps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from sglang_k3.kernels.triton_math import sigmoid

if TYPE_CHECKING:
    from torch import Tensor

_TOKENS, _CHANNELS, _START_CHANNELS = 16, 1024, 128
_STATE_CHANNELS = 512


def short_conv_prefill(
    x: Tensor,
    weight: Tensor,
    *,
    conv_states: Tensor,
    cu_seqlens: Tensor,
    cache_indices: Tensor,
    has_initial_state: Tensor,
    track_lens: Tensor | None = None,
    track_indices: Tensor | None = None,
) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_seqs, (tokens, channels), taps = cache_indices.shape[0], x.shape, weight.shape[1]
    # The kernels take these few integers as they are, one after the other.
    cu_seqlens, cache_indices, has_initial_state = (
        t.contiguous() for t in (cu_seqlens, cache_indices, has_initial_state)
    )
    states = (conv_states, *conv_states.stride())
    sequences = (cu_seqlens, cache_indices, has_initial_state)
    if y.numel() > 0:
        _outputs[(triton.cdiv(tokens, _TOKENS), triton.cdiv(channels, _CHANNELS))](
            x,
            *x.stride(),
            *states,
            *sequences,
            weight,
            *weight.stride(),
            y,
            tokens,
            channels,
            num_seqs,
            num_seqs.bit_length(),
            W=taps,
            BLOCK_T=_TOKENS,
            BLOCK_C=_CHANNELS,
            BLOCK_START=_START_CHANNELS,
            num_warps=4,
        )
    if num_seqs > 0 and taps > 1 and channels > 0:
        _states[(num_seqs, triton.cdiv(channels, _STATE_CHANNELS))](
            x,
            *x.stride(),
            *states,
            *sequences,
            None if track_lens is None else track_lens.contiguous(),
            None if track_indices is None else track_indices.contiguous(),
            channels,
            W=taps,
            BLOCK_C=_STATE_CHANNELS,
            num_warps=4,
        )
    return y


@triton.jit(do_not_specialize=["num_tokens", "num_seqs", "num_halvings"])
def _outputs(
    x_ptr,
    x_row,
    x_col,
    state_ptr,
    state_slot,
    state_row,
    state_col,
    cu_seqlens_ptr,
    slot_ptr,
    continues_ptr,
    weight_ptr,
    weight_row,
    weight_col,
    y_ptr,
    num_tokens,
    num_channels,
    num_seqs,
    num_halvings,
    W: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_START: tl.constexpr,
):
    begin = tl.program_id(0) * BLOCK_T
    tokens = begin + tl.arange(0, BLOCK_T)
    first_channel = tl.program_id(1) * BLOCK_C
    channels = first_channel + tl.arange(0, BLOCK_C)
    inside = channels < num_channels
    # These wait for nothing; a tile with a start, or at an end, does without them.
    rows: tl.tuple = ()
    for n in tl.static_range(BLOCK_T + W - 1):
        token = begin + n - (W - 1)
        in_x = inside & (token >= 0) & (token < num_tokens)
        rows += (tl.load(x_ptr + token.to(tl.int64) * x_row + channels * x_col, mask=in_x, other=0.0),)
    taps: tl.tuple = ()
    for tap in tl.static_range(W):
        taps += (tl.load(weight_ptr + channels * weight_row + tap * weight_col, mask=inside, other=0.0),)

    sequence = _sequence_of(tokens, cu_seqlens_ptr, num_seqs, num_halvings)
    in_sequence = (tokens < num_tokens) & (sequence < num_seqs)
    slot = tl.load(slot_ptr + sequence, mask=in_sequence, other=-1).to(tl.int64)
    used = slot >= 0
    depth = tokens - tl.load(cu_seqlens_ptr + sequence, mask=used, other=0).to(tl.int32)
    depth = tl.where(used, depth, -1)
    y_ptr += begin.to(tl.int64) * num_channels
    if tl.min(depth) >= W - 1:
        for n in tl.static_range(BLOCK_T):
            y = tl.zeros([BLOCK_C], tl.float32)
            for tap in tl.static_range(W):
                y += rows[n + tap].to(tl.float32) * taps[tap]
            _store(y_ptr + n * num_channels + channels, y, inside)
    else:
        continues = used & (tl.load(continues_ptr + sequence, mask=used, other=0) != 0)
        for first in range(first_channel, tl.minimum(first_channel + BLOCK_C, num_channels), BLOCK_START):
            _outputs_at_starts(
                first + tl.arange(0, BLOCK_START)[None, :],
                depth[:, None],
                continues[:, None],
                x_ptr + (tokens.to(tl.int64) * x_row)[:, None],
                x_row,
                x_col,
                state_ptr + (slot * state_slot)[:, None],
                state_row,
                state_col,
                weight_ptr,
                weight_row,
                weight_col,
                y_ptr + (tl.arange(0, BLOCK_T) * num_channels)[:, None],
                (tokens < num_tokens)[:, None],
                num_channels,
                W,
            )


@triton.jit
def _outputs_at_starts(
    channels,
    depth,
    continues,
    x_ptr,
    x_row,
    x_col,
    state_ptr,
    state_row,
    state_col,
    weight_ptr,
    weight_row,
    weight_col,
    y_ptr,
    in_tokens,
    num_channels,
    W: tl.constexpr,
):
    """Each token looks where its taps are: in x, in the history, or nowhere. Those of no sequence have depth -1."""
    inside = channels < num_channels
    y = tl.zeros([depth.shape[0], channels.shape[1]], tl.float32)
    for tap in tl.static_range(W):
        back = W - 1 - tap
        value = tl.load(x_ptr - back * x_row + channels * x_col, mask=(depth >= back) & inside, other=0.0)
        value = value.to(tl.float32)
        if back > 0:  # row i of the history stands W - 1 - i tokens before the start
            in_history = continues & (depth < back) & inside
            p_history = state_ptr + (depth + tap).to(tl.int64) * state_row + channels * state_col
            value += tl.load(p_history, mask=in_history, other=0.0).to(tl.float32)
        y += value * tl.load(weight_ptr + channels * weight_row + tap * weight_col, mask=inside, other=0.0)
    _store(y_ptr + channels, tl.where(depth >= 0, y, 0.0), in_tokens & inside)


@triton.jit
def _store(y_ptr, y, mask):
    y *= sigmoid(y, y_ptr.dtype.element_ty)
    tl.store(y_ptr, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _states(
    x_ptr,
    x_row,
    x_col,
    state_ptr,
    state_slot,
    state_row,
    state_col,
    cu_seqlens_ptr,
    slot_ptr,
    continues_ptr,
    depth_ptr,
    target_ptr,
    num_channels,
    W: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    sequence = tl.program_id(0)
    channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channels < num_channels
    slot = tl.load(slot_ptr + sequence).to(tl.int64)
    if slot >= 0:
        begin = tl.load(cu_seqlens_ptr + sequence).to(tl.int64)
        length = tl.load(cu_seqlens_ptr + sequence + 1).to(tl.int64) - begin
        continues = tl.load(continues_ptr + sequence) != 0
        inputs = x_ptr + begin * x_row + channels * x_col
        own = state_ptr + slot * state_slot + channels * state_col
        if depth_ptr is not None:
            depth = tl.load(depth_ptr + sequence).to(tl.int64)
            if depth >= 0:
                target = tl.load(target_ptr + sequence).to(tl.int64)
                snapshot = state_ptr + target * state_slot + channels * state_col
                _write_state(snapshot, own, inputs, depth, continues, state_row, x_row, inside, W)
        _write_state(own, own, inputs, length, continues, state_row, x_row, inside, W)


@triton.jit
def _write_state(target_ptr, history_ptr, x_ptr, depth, continues, state_row, x_row, inside, W: tl.constexpr):
    """The ``W - 1`` inputs up to ``depth``. Where target and history are one, a row is read before it is written."""
    dtype = target_ptr.dtype.element_ty
    for n in tl.static_range(W - 1):
        row = depth + n  # of history and extend together
        from_x = inside & (row >= W - 1)
        from_history = inside & (row < W - 1) & continues
        x = tl.load(x_ptr + (row - (W - 1)) * x_row, mask=from_x, other=0.0)
        held = tl.load(history_ptr + row * state_row, mask=from_history, other=0.0)
        tl.store(target_ptr + n * state_row, tl.where(row >= W - 1, x.to(dtype), held), mask=inside)


@triton.jit
def _sequence_of(tokens, cu_seqlens_ptr, num_seqs, num_halvings):
    """How many sequences end at or before each token: the index of its own, or ``num_seqs`` past the last one."""
    low = tl.zeros_like(tokens)
    high = low + num_seqs
    for _ in range(num_halvings):
        middle = (low + high) // 2
        open_ = low < high
        ended = open_ & (tl.load(cu_seqlens_ptr + middle + 1, mask=open_, other=0) <= tokens)
        low = tl.where(ended, middle + 1, low)
        high = tl.where(open_ & (ended == 0), middle, high)
    return low
