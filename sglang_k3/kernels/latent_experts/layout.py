"""How the Triton kernel wants packed experts to lie: what a program reads at a time is one stretch of memory.

A program multiplies ``TILE_ROWS`` rows of a weight, ``TILE_WORDS`` words (of 8 values) of each at a time. These tiles
follow one another: along the words of the same rows first, then on to the next rows. The last of either may be smaller.
Scales lie alike, in tiles of the same values.

Of ``w13`` eight rows of gate and the eight of up that belong to them alternate, so that one thread holds a pair, and
their order is that in which the product with ``w2`` takes its columns (``in_tiles``).

Within a row, the decode makes two bf16 at a time, of the same column in either word of a pair. Their bits therefore
share a word: the low halves of both words make the first, the high halves the second. In each half, its four values lie
where few steps bring a sign to bit 15 and a magnitude to bits 8 to 6, which are those of a bf16 (see ``DECODE_PTX``).
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from sglang_k3.kernels.dispatch import Layout

TILE_ROWS, TILE_WORDS = 128, 16
TILE_GROUPS = TILE_WORDS // 4  # of values that share a scale

# Where a half keeps the bits of its four values, each from the lowest of the magnitude to the sign.
PLACES = ((6, 7, 8, 15), (3, 4, 5, 12), (0, 1, 2, 9), (13, 10, 11, 14))


def in_tiles(columns: Tensor, num_columns: int) -> Tensor:
    """The order in which a product takes columns: of each tile all first values of its words, then all second ones."""
    words = columns // 8
    start, width = _tiles(words, num_columns // 8, TILE_WORDS)
    return 8 * start + columns % 8 * width + words - start


def _write(name: str, matrix: Tensor, rows: Tensor, first_row: int) -> None:
    if matrix.dtype != torch.uint8:  # plain weights lie as they are published
        matrix[first_row : first_row + len(rows)] = rows
    else:
        # A copy, since only memory of its own is known to begin where a word may.
        elements = _elements(name, rows.to(matrix.device, copy=True, memory_format=torch.contiguous_format))
        if not _is_scale(name):
            elements = _move_bits(elements, back=False)
        places = _places(name, matrix, slice(first_row, first_row + len(rows)))
        _elements(name, matrix).view(-1)[places] = elements


def _read(name: str, matrix: Tensor) -> Tensor:
    if matrix.dtype != torch.uint8:
        return matrix.clone()
    elements = _elements(name, matrix).view(-1)[_places(name, matrix, slice(None))]
    return (elements if _is_scale(name) else _move_bits(elements, back=True)).view(torch.uint8)


def _forget() -> None:
    """The host may take the memory in which weights are loaded from under a table that stays."""
    _axes.cache_clear()
    _moved_halves.cache_clear()


TILES = Layout(("w13", "w2", "w13_scale", "w2_scale"), _write, _read, _forget)


def _is_scale(name: str) -> bool:
    return name.endswith("_scale")


def _elements(name: str, matrix: Tensor) -> Tensor:
    """What moves as one: a word of weights, the scale of a group."""
    return matrix if _is_scale(name) else matrix.view(torch.int32)


class _Axis(NamedTuple):
    """Of each row or column of a matrix: the begin and the size of its tile, and how far behind the begin it lies."""

    start: Tensor
    size: Tensor
    offset: Tensor


def _places(name: str, matrix: Tensor, rows: slice) -> Tensor:
    """Where in the memory of ``matrix [R, C]`` the elements of published ``rows`` lie."""
    num_rows, num_columns = _elements(name, matrix).shape
    row, column = _axes(name, num_rows, num_columns, matrix.device)
    start, size, offset = (values[rows, None] for values in row)
    return start * num_columns + column.start * size + offset * column.size + column.offset


@functools.lru_cache(maxsize=16)
def _axes(name: str, num_rows: int, num_columns: int, device: torch.device) -> tuple[_Axis, _Axis]:
    rows, columns = torch.arange(num_rows, device=device), torch.arange(num_columns, device=device)
    if name.startswith("w13") and num_rows:
        width = num_rows // 2
        order = in_tiles(rows % width, width)
        rows = order // 8 * 16 + rows // width * 8 + order % 8
    axes = []
    for index, number, tile in (
        (rows, num_rows, TILE_ROWS),
        (columns, num_columns, TILE_GROUPS if _is_scale(name) else TILE_WORDS),
    ):
        start, size = _tiles(index, number, tile)
        axes.append(_Axis(start, size, index - start))
    return axes[0], axes[1]


def _tiles(index: Tensor, number: int, tile: int) -> tuple[Tensor, Tensor]:
    """Begin and size of the tile of each index below ``number``; the last may be smaller."""
    start = index // tile * tile
    return start, (number - start).clamp(max=tile)


def _move_bits(words: Tensor, *, back: bool) -> Tensor:
    """A copy of ``words [R, C]``, int32, with the bits of each pair where they go, or where they came from."""
    halves = words.view(torch.int16)
    moved = _moved_halves(words.device, back)[halves.int().bitwise_and_(0xFFFF)]
    result: Tensor = moved.unflatten(-1, (-1, 2, 2)).transpose(-1, -2).flatten(-3).view(torch.int32)
    return result


@functools.lru_cache(maxsize=16)
def _moved_halves(device: torch.device, back: bool) -> Tensor:
    """What becomes of each of the 2^16 halves."""
    halves = torch.arange(2**16, dtype=torch.int32, device=device)
    moved = torch.zeros_like(halves)
    for bit, place in enumerate(itertools.chain(*PLACES)):
        source, destination = (place, bit) if back else (bit, place)
        moved |= (halves >> source & 1) << destination
    return moved.short()
