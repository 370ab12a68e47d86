"""Triton kernel of ``short_conv_decode``: a program takes some channels of one sequence, convolves and shifts them.

Channels are independent of each other, so each is read before it is overwritten by the thread that owns it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from sglang_k3.kernels.triton_math import sigmoid

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 1024


def short_conv_decode(x: Tensor, weight: Tensor, *, conv_states: Tensor, cache_indices: Tensor) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    batch, channels = x.shape
    _short_conv_decode[(batch, triton.cdiv(channels, _BLOCK))](
        x,
        weight,
        conv_states,
        cache_indices,
        y,
        channels,
        *x.stride(),
        *weight.stride(),
        *conv_states.stride(),
        *cache_indices.stride(),
        W=weight.shape[1],
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return y


@triton.jit
def _short_conv_decode(
    x_ptr,
    weight_ptr,
    state_ptr,
    slot_ptr,
    y_ptr,
    num_channels,
    x_row,
    x_col,
    weight_row,
    weight_col,
    state_slot,
    state_row,
    state_col,
    slot_row,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < num_channels
    slot = tl.load(slot_ptr + sequence * slot_row).to(tl.int64)
    used = inside & (slot >= 0)
    # What does not wait for the slot comes first.
    x = tl.load(x_ptr + sequence * x_row + channels * x_col, mask=inside)
    weight_ptr += channels * weight_row
    state_ptr += slot * state_slot + channels * state_col
    y = tl.zeros([BLOCK], tl.float32)
    for tap in tl.static_range(W - 1):
        weight = tl.load(weight_ptr + tap * weight_col, mask=inside)
        held = tl.load(state_ptr + tap * state_row, mask=used, other=0.0)
        if tap > 0:
            tl.store(state_ptr + (tap - 1) * state_row, held, mask=used)
        y += held.to(tl.float32) * weight
    if W > 1:
        tl.store(state_ptr + (W - 2) * state_row, x.to(state_ptr.dtype.element_ty), mask=used)
    y += x.to(tl.float32) * tl.load(weight_ptr + (W - 1) * weight_col, mask=inside)
    y *= sigmoid(y, y_ptr.dtype.element_ty)
    tl.store(y_ptr + sequence * num_channels + channels, tl.where(used, y, 0.0).to(y_ptr.dtype.element_ty), mask=inside)
