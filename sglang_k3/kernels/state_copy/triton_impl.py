"""Triton kernel of ``state_copy``: elements are moved as integers of their size, whatever they mean."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BLOCK_BYTES = 16384


def state_copy(states: Tensor, *, src_indices: Tensor, dst_indices: Tensor) -> None:
    if states.numel() == 0 or src_indices.numel() == 0:
        return
    while states.ndim > 3:
        if states.shape[2] > 1 and states.stride(2) != states.shape[3] * states.stride(3):
            for part in states.unbind(2):  # its dimensions do not lie in one run of equal steps
                state_copy(part, src_indices=src_indices, dst_indices=dst_indices)
            return
        states = states.flatten(2, 3)
    layers, _, size = states.shape
    block = _BLOCK_BYTES // states.element_size()
    _state_copy[(src_indices.shape[0], layers, triton.cdiv(size, block))](
        states.view(_INTEGERS[states.element_size()]),
        src_indices,
        dst_indices,
        size,
        *states.stride(),
        *src_indices.stride(),
        *dst_indices.stride(),
        BLOCK=block,
        num_warps=4,
    )


@triton.jit
def _state_copy(
    states_ptr, src_ptr, dst_ptr, size, layer_stride, slot_stride, col_stride, src_row, dst_row, BLOCK: tl.constexpr
):
    copy = tl.program_id(0).to(tl.int64)
    src = tl.load(src_ptr + copy * src_row).to(tl.int64)
    dst = tl.load(dst_ptr + copy * dst_row).to(tl.int64)
    if (src >= 0) & (dst >= 0):
        cols = tl.program_id(2).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = cols < size
        layer = states_ptr + tl.program_id(1).to(tl.int64) * layer_stride + cols * col_stride
        tl.store(layer + dst * slot_stride, tl.load(layer + src * slot_stride, mask=inside), mask=inside)
