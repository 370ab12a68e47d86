"""Triton kernel of ``state_copy``: elements are moved as integers of their size, whatever they mean.

Most decode steps have nothing to copy, and a step has room for hundreds of copies of all layers. So the number of
programs is bounded, and each looks at what is due before it begins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BLOCK_BYTES = 16384
PROGRAMS = 528  # four for each multiprocessor of a Hopper GPU
COPIES = tl.constexpr(128)  # looked at together


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
    pieces = layers * triton.cdiv(size, block)
    _state_copy[(min(PROGRAMS, pieces),)](
        states.view(_INTEGERS[states.element_size()]),
        src_indices,
        dst_indices,
        src_indices.shape[0],
        pieces,
        size,
        *states.stride(),
        *src_indices.stride(),
        *dst_indices.stride(),
        BLOCK=block,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["copies", "pieces"])
def _state_copy(
    states_ptr,
    src_ptr,
    dst_ptr,
    copies,
    pieces,
    size,
    layer_stride,
    slot_stride,
    col_stride,
    src_row,
    dst_row,
    BLOCK: tl.constexpr,
):
    for start in range(0, copies, COPIES):
        i = start + tl.arange(0, COPIES)
        src = tl.load(src_ptr + i * src_row, mask=i < copies, other=-1)
        dst = tl.load(dst_ptr + i * dst_row, mask=i < copies, other=-1)
        if tl.sum(((src >= 0) & (dst >= 0)).to(tl.int32), axis=0) > 0:
            for copy in range(start, tl.minimum(start + COPIES, copies)):
                _copy_slot(
                    states_ptr,
                    tl.load(src_ptr + copy * src_row).to(tl.int64),
                    tl.load(dst_ptr + copy * dst_row).to(tl.int64),
                    pieces,
                    size,
                    layer_stride,
                    slot_stride,
                    col_stride,
                    BLOCK,
                )


@triton.jit
def _copy_slot(states_ptr, src, dst, pieces, size, layer_stride, slot_stride, col_stride, BLOCK: tl.constexpr):
    """This program's share of the pieces of one slot, layer after layer; nothing if an index is negative."""
    if (src >= 0) & (dst >= 0):
        per_layer = tl.cdiv(size, BLOCK)
        for piece in range(tl.program_id(0), pieces, tl.num_programs(0)):
            cols = (piece % per_layer).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            inside = cols < size
            layer = states_ptr + (piece // per_layer).to(tl.int64) * layer_stride + cols * col_stride
            tl.store(layer + dst * slot_stride, tl.load(layer + src * slot_stride, mask=inside), mask=inside)
