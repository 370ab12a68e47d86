"""How the Triton kernel wants packed experts to lie: what a program reads at a time is one stretch of memory.

A program multiplies ``TILE_ROWS`` rows of a weight, ``TILE_WORDS`` words (of 8 values) of each at a time. These tiles
follow one another: along the words of the same rows first, then on to the next rows. The last of either may be smaller.
Scales lie alike, in tiles of the same values.

Of ``w13`` eight rows of gate and the eight of up that belong to them alternate, so that one thread holds a pair, and
their order is that in which the product with ``w2`` takes its columns (``in_tiles``).

Within a row, the decode makes two bf16 at a time, of the same column in either word of a pair. Their bits therefore
share a word: the low halves of both words make the first, the high halves the second. In a word, its four pairs of
values lie where few steps bring a sign to bit 15 (31) and a magnitude to bits 8 to 6 (24 to 22), which are those of a
bf16: one pair is there, two need a rotation of the word, and the last one a multiplication (see ``DECODE_PTX``).
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

# Where a word keeps the bits of the four values of its first half, each from the lowest of the magnitude to the sign;
# those of the second half lie 16 bits further on, around the end.
PLACES = ((6, 7, 8, 15), (28, 29, 30, 5), (25, 26, 27, 2), (3, 4, 0, 1))
# To the left by as many bits, and a value lies as the first one does; what no rotation brings there a product does.
ROTATIONS, MULTIPLIER = (0, 10, 13), 2**3 + 2**8 + 2**14
VALUE_BITS, PIECES = (sum(1 << place | 1 << (place + 16) % 32 for place in PLACES[i]) for i in (0, 3))


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
            elements = _put_bits(elements)
        places = _places(name, matrix, slice(first_row, first_row + len(rows)))
        _elements(name, matrix).view(-1)[places] = elements


def _read(name: str, matrix: Tensor) -> Tensor:
    if matrix.dtype != torch.uint8:
        return matrix.clone()
    elements = _elements(name, matrix).view(-1)[_places(name, matrix, slice(None))]
    return (elements if _is_scale(name) else _take_bits(elements)).view(torch.uint8)


def _forget() -> None:
    """The host may take the memory in which weights are loaded from under a table that stays."""
    _axes.cache_clear()
    _tables.cache_clear()


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


def _put_bits(words: Tensor) -> Tensor:
    """A copy of ``words [R, C]``, int32, with the bits of each pair where they go."""
    halves = _halves(words)  # [R, C / 2, word, half]
    first, second = _tables(words.device, back=False)
    return (first[halves[..., 0, :]] | second[halves[..., 1, :]]).flatten(-2)


def _take_bits(words: Tensor) -> Tensor:
    """The inverse of ``_put_bits``."""
    low, high = _halves(words).unbind(-1)  # [R, C / 2, half], what each word of the pair is now
    first, second = _tables(words.device, back=True)
    halves = torch.stack([first[low] | second[high], first[high] | second[low]], dim=-2)
    return halves.short().flatten(-3).view(torch.int32)


def _halves(words: Tensor) -> Tensor:
    """The 16-bit halves ``[R, C / 2, 2, 2]`` of the words of each pair, as indices."""
    halves: Tensor = words.view(torch.int16).int().bitwise_and_(0xFFFF).unflatten(-1, (-1, 2, 2))
    return halves


@functools.lru_cache(maxsize=16)
def _tables(device: torch.device, back: bool) -> tuple[Tensor, Tensor]:
    """What each of the 2^16 halves, as that of a first and of a second word, gives to the word that keeps it; or
    ``back``, what each low and each high half of such a word gives to the half of a first word that it keeps."""
    halves = torch.arange(2**16, dtype=torch.int32, device=device)
    first, second = torch.zeros_like(halves), torch.zeros_like(halves)
    for bit, place in enumerate(itertools.chain(*PLACES)):
        if back:
            table = first if place < 16 else second
            table |= (halves >> place % 16 & 1) << bit
        else:
            first |= (halves >> bit & 1) << place
            second |= (halves >> bit & 1) << (place + 16) % 32
    return first, second
