"""Triton kernels of ``latent_experts``: grouped products straight from the 4-bit weights.

The choices are dealt out by expert into blocks. Then two grouped products run over (block, tile of weight rows), into
the places of the blocks, and a last kernel weights and adds the outputs of a token, in the order of its choices. The
first product finds the token of each place. Where even small blocks have many choices, tokens are copied into the
places first: their addresses would take so many registers that fewer programs run at once. An expert with many choices
has large blocks, which decode its weights less often; what is left over goes to small ones. Nothing waits for the
host: the number of blocks has a bound from sizes alone, and programs beyond the last block end at once. Places that
stay empty are neither read nor written. A single token needs no plan: each choice is a block of one.

The product is taken as ``weight x^T``: the matrix units accept their left operand from registers, so weights are
decoded where they are used and only their 4 bits pass through shared memory. A word of a weight holds 8 columns. For
each 16 words, activations are laid out as all first columns of these words, then all second ones and so on, so that
column i of its words meets one stretch of a row and nothing is interleaved. Packed weights and scales lie as programs
take them, not as they are published (``layout``): otherwise a program would gather short pieces of many rows.

Sizes that change from call to call (blocks, choices) are not specialised, so that each tile is compiled once.

A program reads a block's activations once and multiplies them with one part of its weight rows after the other; where
experts have many choices, the cache is busy with such reads.

Legend: T tokens, P = T k choices, E experts, M choices of a block, N weight rows of a part, K contracted columns,
W = K / 8 words of a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from sglang_k3.kernels.latent_experts import layout
from sglang_k3.kernels.triton_math import dot_dtype, has_small_shared_memory, sigmoid, soft_cap

if TYPE_CHECKING:
    from torch import Tensor

PLAN_BLOCK = 1024
ARRANGE_BLOCK = 512
COMBINE_BLOCK = 1024
MAX_FOUND = 32  # choices of a small block, if tokens are found where they are
GROUP_WORDS = tl.constexpr(4)  # 32 values share a scale
TILE_ROWS = tl.constexpr(layout.TILE_ROWS)
TILE_WORDS = tl.constexpr(layout.TILE_WORDS)
TILE_GROUPS = tl.constexpr(layout.TILE_GROUPS)

# Two bf16 at a time, a column of each word of a pair: the layout has both in one register. A rotation of it brings
# a value to where its sign belongs and its magnitude does: the lowest bits of the exponent and the highest of the
# mantissa. The fourth lies in pieces, and one multiplication moves each as far as it must go. That is 2^-126 times the
# value, 0.5 (a subnormal) included. The factor makes it 2^-62 times the weight and the sum is multiplied by 2^62, so
# that one product serves all scales from 2^-63 to 2^63 exactly, and no others.
ROTATIONS, MULTIPLIER = tl.constexpr(layout.ROTATIONS), tl.constexpr(layout.MULTIPLIER)
VALUE_BITS, PIECES = tl.constexpr(layout.VALUE_BITS), tl.constexpr(layout.PIECES)
DECODE_PTX = tl.constexpr(
    "{ .reg .b32 bits, nil; mov.b32 nil, 0x80008000;"
    + "".join(
        step + f"and.b32 bits, bits, {layout.VALUE_BITS:#x}; fma.rn.bf16x2 ${first + i}, bits, $10, nil;"
        for word, first in (("$8", 0), ("$9", 4))
        for i, step in enumerate(
            (
                *(f"shf.l.wrap.b32 bits, {word}, {word}, {rotation};" for rotation in layout.ROTATIONS),
                f"and.b32 bits, {word}, {layout.PIECES:#x}; mul.lo.u32 bits, bits, {layout.MULTIPLIER};",
            )
        )
    )
    + "}"
)


class Tile(NamedTuple):
    """Choices, weight rows and words (columns, if not packed) of a tile, warps and pipeline stages."""

    m: int
    n: int
    k: int
    num_warps: int
    num_stages: int


# Blocks for an expert that many tokens choose where the mean expert has few choices. Blocks of those are too narrow for
# the products of four warps (wgmma), whose last bits are others; so these are multiplied by two warps each.
SKEWED = Tile(32, 128, 32, 2, 2)


class Blocks(NamedTuple):
    """Blocks of one size: their tile, their first place, and a table of the expert of each (-1 without one) and the
    number of its choices; no table for a single token."""

    tile: Tile
    num_blocks: int
    first_place: int
    table: Tensor | None


def latent_experts(
    z: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    w13: Tensor,
    w2: Tensor,
    *,
    w13_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
    beta: float,
    linear_beta: float | None,
    expert_offset: int = 0,
) -> Tensor:
    num_tokens, latent = z.shape
    num_experts, top_k = w13.shape[0], topk_ids.shape[1]
    num_pairs, width = num_tokens * top_k, w13.shape[1] // 2
    out = torch.empty(z.shape, dtype=z.dtype, device=z.device)
    if out.numel() == 0:
        return out
    is_packed = w13_scale is not None
    tiles = _tiles(num_tokens, num_pairs / num_experts, is_packed=is_packed, dtype=z.dtype, device=z.device)
    if is_packed:
        w13, w2 = w13.view(torch.int32), w2.view(torch.int32)
    if num_tokens == 1:
        # Half as many weight rows at a time give all parts of a GPU something to do.
        blocks, num_places = [Blocks(tiles[-1]._replace(n=tiles[-1].n // 2), top_k, 0, None)], top_k
        places = token_of_place = None
    else:
        blocks, num_places, places, token_of_place = _plan(topk_ids, num_experts, expert_offset, tiles)
    is_copied = num_tokens > 1 and tiles[-1].m > MAX_FOUND
    x = z.new_empty(num_places if is_copied else num_tokens, latent)
    _arrange[(num_tokens, triton.cdiv(latent, ARRANGE_BLOCK))](
        z, places if is_copied else None, x, z.stride(), TOP_K=top_k, L=latent, PACKED=is_packed, BLOCK=ARRANGE_BLOCK
    )

    def product(
        rows: Tensor, row_of_place: Tensor | None, weight: Tensor, scale: Tensor | None, columns: int
    ) -> Tensor:
        result = z.new_empty(num_places, columns)
        for tile, num_blocks, first_place, table in blocks:
            _expert_linear[(num_blocks * triton.cdiv(weight.shape[1], tile.n),)](
                rows[first_place:] if row_of_place is None else rows,
                None if row_of_place is None else row_of_place[first_place:],
                weight,
                scale,
                result[first_place:],
                table,
                topk_ids,
                num_experts,
                expert_offset,
                beta,
                linear_beta,
                weight.stride(),
                (0, 0, 0) if scale is None else scale.stride(),
                topk_ids.stride(1),
                ROWS=weight.shape[1],
                K=rows.shape[1],
                GATE_UP=weight is w13,
                M=tile.m,
                N=min(tile.n, layout.TILE_ROWS),
                PARTS=triton.cdiv(tile.n, layout.TILE_ROWS),
                BLOCK_K=tile.k,
                DOT=dot_dtype(z),
                ON_GPU=z.device.type != "cpu",
                num_warps=tile.num_warps,
                num_stages=tile.num_stages,
            )
        return result

    hidden = product(x, None if is_copied else token_of_place, w13, w13_scale, width)
    del x  # the outputs may have its memory
    outputs = product(hidden, None, w2, w2_scale, latent)
    _combine[(num_tokens, triton.cdiv(latent, COMBINE_BLOCK))](
        outputs,
        topk_weights,
        topk_ids,
        places,
        out,
        num_experts,
        expert_offset,
        topk_weights.stride(),
        topk_ids.stride(1),
        TOP_K=top_k,
        L=latent,
        BLOCK=COMBINE_BLOCK,
    )
    return out


def _tiles(
    num_tokens: int, pairs_per_expert: float, *, is_packed: bool, dtype: torch.dtype, device: torch.device
) -> tuple[Tile, ...]:
    """Of large blocks, if any, and small ones.

    By the mean number of choices of an expert, an upper bound where other ranks hold experts too. Both take columns
    in the same order and by the same instructions, so that the bits of a row do not depend on its block. Words come in
    whole tiles of the layout.
    """
    if dtype == torch.float32:
        k = 16 if is_packed else 32
        small = Tile(16, 32, k, 4, 1)
        return (small,) if pairs_per_expert <= 8 else (Tile(64, 32, k, 4, 1), small)
    if pairs_per_expert <= 8:
        small = Tile(8, 128, 32 if is_packed else 128, 4, 3)
        # A large block is more than half full, and a token chooses an expert once.
        return (SKEWED, small) if is_packed and num_tokens > SKEWED.m // 2 else (small,)
    k = 16 if is_packed else 64
    large = Tile(128, 128, k, 4, 2 if has_small_shared_memory(device) else 3)
    if pairs_per_expert > 32:
        return large, Tile(64, 128, k, 4, 3)
    return large, Tile(32, 256 if is_packed else 128, k, 4, 3)


def part_sizes(*sizes: int) -> list[int]:
    """Of int32 in one piece of memory, each begun at a multiple of 16 bytes, or Triton would compile kernels twice."""
    return [triton.cdiv(size, 4) * 4 for size in sizes]


def _plan(
    topk_ids: Tensor, num_experts: int, expert_offset: int, tiles: tuple[Tile, ...]
) -> tuple[list[Blocks], int, Tensor, Tensor]:
    """Blocks, number of places, the place of each choice (-1 if another rank holds its expert), and the token of each
    place; nothing where no choice is."""
    num_pairs, top_k = topk_ids.numel(), topk_ids.shape[1]
    small, large = tiles[-1].m, tiles[0].m if len(tiles) > 1 else 0
    # The last block of an expert may be partly empty: a large one by less than half, a small one by all but one place.
    num_hit = min(num_pairs, num_experts)
    num_large, num_small = 0, (num_pairs + num_hit * (small - 1)) // small
    if large:
        half = large // 2
        num_large = (num_pairs + min(num_pairs // (half + 1), num_hit) * (half - 1)) // large
        num_small = min(num_small, num_hit * triton.cdiv(half, small))
    num_places = num_large * large + num_small * small
    sizes = part_sizes(num_experts, num_pairs, 2 * num_large, 2 * num_small)
    memory = torch.full((sum(sizes),), -1, dtype=torch.int32, device=topk_ids.device)
    last_ranks, places, *tables = memory.split(sizes)
    token_of_place = memory.new_empty(num_places)
    grid = (triton.cdiv(num_pairs, PLAN_BLOCK),)
    common = (topk_ids, topk_ids.stride(), num_pairs, num_experts, expert_offset, last_ranks, places)
    _rank[grid](*common, TOP_K=top_k, BLOCK=PLAN_BLOCK)
    _deal[grid](
        *common,
        token_of_place,
        *tables,
        num_large,
        TOP_K=top_k,
        BLOCK=PLAN_BLOCK,
        BLOCK_E=triton.next_power_of_2(num_experts),
        LARGE=large,
        SMALL=small,
    )
    blocks = [Blocks(tiles[-1], num_small, num_large * large, tables[1])]
    if num_large:
        blocks.insert(0, Blocks(tiles[0], num_large, 0, tables[0]))
    return blocks, num_places, places, token_of_place


@triton.jit
def _local_experts(topk_ids, ids_strides, pairs, inside, num_experts, expert_offset, TOP_K: tl.constexpr):
    """Local expert of each choice, and whether this rank holds it."""
    rows = (pairs // TOP_K).to(tl.int64)
    local = tl.load(topk_ids + rows * ids_strides[0] + pairs % TOP_K * ids_strides[1], mask=inside, other=-1)
    local = tl.where(inside, local - expert_offset, -1).to(tl.int32)
    return local, (local >= 0) & (local < num_experts)


@triton.jit(do_not_specialize=["num_pairs"])
def _rank(
    topk_ids,
    ids_strides,
    num_pairs,
    num_experts,
    expert_offset,
    last_ranks,
    places,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Number the choices of each expert; which gets which number does not matter, every row is computed alike."""
    pairs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    local, held = _local_experts(topk_ids, ids_strides, pairs, pairs < num_pairs, num_experts, expert_offset, TOP_K)
    rank = tl.atomic_add(last_ranks + local, 1, mask=held) + 1
    tl.store(places + pairs, rank, mask=held)


@triton.jit(do_not_specialize=["num_pairs", "num_large"])
def _deal(
    topk_ids,
    ids_strides,
    num_pairs,
    num_experts,
    expert_offset,
    last_ranks,
    places,
    token_of_place,
    large_table,
    small_table,
    num_large,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,
    LARGE: tl.constexpr,
    SMALL: tl.constexpr,
):
    """From the number of each choice among those of its expert to its place in the blocks of that expert.

    Large blocks are more than half full; what is left of an expert goes to small ones.
    """
    experts = tl.arange(0, BLOCK_E)
    counts = tl.load(last_ranks + experts, mask=experts < num_experts, other=-1) + 1
    pairs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    local, held = _local_experts(topk_ids, ids_strides, pairs, pairs < num_pairs, num_experts, expert_offset, TOP_K)
    index = tl.where(held, local, 0)
    rank = tl.load(places + pairs, mask=held, other=0)
    rest = tl.gather(counts, index, axis=0) - rank  # of the choices of its expert: this one and those behind it
    place, is_small = tl.zeros_like(rank), held
    if LARGE > 0:
        large = (counts + (LARGE // 2 - 1)) // LARGE
        block = tl.gather(tl.cumsum(large, axis=0) - large, index, axis=0) + rank // LARGE
        is_large = held & (rank < tl.gather(large, index, axis=0) * LARGE)
        place = block * LARGE + rank % LARGE
        _enter(large_table, block, local, rest, is_large & (rank % LARGE == 0), LARGE)
        is_small = held & ~is_large
        rank -= tl.gather(large, index, axis=0) * LARGE
        counts = tl.maximum(counts - large * LARGE, 0)
    small = tl.cdiv(counts, SMALL)
    block = tl.gather(tl.cumsum(small, axis=0) - small, index, axis=0) + rank // SMALL
    place = tl.where(is_small, num_large * LARGE + block * SMALL + rank % SMALL, place)
    _enter(small_table, block, local, rest, is_small & (rank % SMALL == 0), SMALL)
    tl.store(places + pairs, place, mask=held)
    tl.store(token_of_place + place, pairs // TOP_K, mask=held)


@triton.jit
def _enter(table, block, local, rest, is_first, M: tl.constexpr):
    """Into the table of blocks, from the first choice of each."""
    tl.store(table + 2 * block, local, mask=is_first)
    tl.store(table + 2 * block + 1, tl.minimum(rest, M), mask=is_first)


@triton.jit
def _arrange(z, places, x, z_strides, TOP_K: tl.constexpr, L: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr):
    """Copy a token to the places of its choices, if any are given, or to its own row, its columns in the order in which
    the products take them."""
    token = tl.program_id(0).to(tl.int64)
    order = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    columns = _column(order, L) if PACKED else order
    values = tl.load(z + token * z_strides[0] + columns * z_strides[1], mask=order < L)
    if places is None:
        tl.store(x + token * L + order, values, mask=order < L)
    else:
        for choice in range(TOP_K):
            place = tl.load(places + token * TOP_K + choice).to(tl.int64)
            tl.store(x + place * L + order, values, mask=(order < L) & (place >= 0))


@triton.jit
def _column(order, K: tl.constexpr):
    """Which of K columns comes where: the inverse of ``layout.in_tiles``."""
    start = order // (8 * TILE_WORDS) * TILE_WORDS
    words = tl.minimum(K // 8 - start, TILE_WORDS)
    rest = order - 8 * start
    return 8 * (start + rest % words) + rest // words


@triton.jit
def _expert_linear(
    x,
    row_of_place,
    weight,
    scale,
    out,
    table,
    topk_ids,
    num_experts,
    expert_offset,
    beta,
    linear_beta,
    weight_strides,
    scale_strides,
    ids_stride,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    GATE_UP: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOT: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """``weight x^T`` for ``PARTS`` times ``N`` weight rows and one block of choices, activated if the rows are gate and
    up."""
    # The tiles of a block run side by side: they share its rows of x, and the next block may be of the same expert.
    num_tiles: tl.constexpr = tl.cdiv(ROWS, PARTS * N)
    first_part = tl.program_id(0) % num_tiles * PARTS
    block = tl.program_id(0) // num_tiles
    m = tl.arange(0, M)
    if table is None:
        expert = tl.load(topk_ids + block * ids_stride).to(tl.int32) - expert_offset
        num_live = 1
        out_row = block.to(tl.int64)
        x_row = out_row * 0 if GATE_UP else out_row
    else:
        expert = tl.load(table + 2 * block)
        num_live = tl.load(table + 2 * block + 1)
        out_row = block.to(tl.int64) * M
        x_row = out_row
    if (expert < 0) | (expert >= num_experts):
        return
    live = m[:, None] < num_live
    if row_of_place is None:
        x_rows = x + x_row * K + m[:, None] * K
    else:
        x_rows = x + tl.load(row_of_place + out_row + m[:, None], mask=live, other=0).to(tl.int64) * K
    weight += expert.to(tl.int64) * weight_strides[0]
    width: tl.constexpr = ROWS // 2 if GATE_UP else ROWS
    PTX: tl.constexpr = ON_GPU and DOT.is_bf16() and scale is not None
    n = tl.arange(0, N)
    if scale is None:
        # Eight rows of gate and eight of up alternate, as packed ones lie: a thread holds both of a pair.
        places = first_part * (N // 2) + n // 16 * 8 + n % 8 if GATE_UP else first_part * N + n
        rows = n // 8 % 2 * width + places if GATE_UP else places
        weight_rows = weight + rows[:, None].to(tl.int64) * weight_strides[1]
        total = tl.zeros([N, M], tl.float32)
        for start in range(0, K, BLOCK_K):
            k = (start + tl.arange(0, BLOCK_K))[None, :]
            w = tl.load(weight_rows + k * weight_strides[2], mask=(places[:, None] < width) & (k < K), other=0.0)
            a = tl.load(x_rows + k, mask=live & (k < K), other=0.0)
            total = tl.dot(w, tl.trans(a), total, input_precision="ieee")
        totals = (total,)
    else:
        scale += expert.to(tl.int64) * scale_strides[0]
        totals = _packed_products(
            x_rows, live, weight, scale, first_part, ROWS, K, M, N, PARTS, BLOCK_K, DOT, ON_GPU, PTX
        )
    dtype = out.dtype.element_ty
    out_rows = out + out_row * width + m[None, :] * width
    for i in tl.static_range(PARTS):
        total = (totals[i] * 4.611686018427388e18 if PTX else totals[i]).to(dtype)  # 2^62
        # Outputs lie as the next product wants them.
        if GATE_UP:
            gate, up = tl.split(tl.permute(tl.reshape(total.to(tl.float32), [N // 16, 2, 8, M]), (0, 2, 3, 1)))
            gate, up = tl.reshape(gate, [N // 2, M]), tl.reshape(up, [N // 2, M])
            up = up if linear_beta is None else soft_cap(up, linear_beta, dtype)
            total = (soft_cap(gate, beta, dtype) * sigmoid(gate, dtype) * up).to(dtype)
        columns = (first_part + i) * total.shape[0] + tl.arange(0, total.shape[0])[:, None]
        tl.store(out_rows + columns, total, mask=tl.trans(live) & (columns < width))


@triton.jit
def _packed_products(
    x_rows,
    live,
    weight,
    scale,
    first_part,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOT: tl.constexpr,
    ON_GPU: tl.constexpr,
    PTX: tl.constexpr,
):
    """Sums ``[N, M]`` of each part, 2^62 too small with PTX."""
    W: tl.constexpr = K // 8
    G: tl.constexpr = W // GROUP_WORDS
    WHOLE: tl.constexpr = W % BLOCK_K == 0  # tiles fill the row, no column needs a check
    first_row = first_part * N // TILE_ROWS * TILE_ROWS  # of the layout's tile; a part never spans two
    rows = (first_part * N % TILE_ROWS + tl.arange(0, N))[:, None]
    w = tl.arange(0, BLOCK_K)[None, :]
    g = tl.arange(0, BLOCK_K // GROUP_WORDS)[None, :]
    k = tl.arange(0, 8 * BLOCK_K)[None, :]  # all first columns of these words, then all second ones
    x_tile = k // TILE_WORDS % (BLOCK_K // TILE_WORDS)
    totals = ()
    for _ in tl.static_range(PARTS):
        totals = totals + (tl.zeros([N, M], tl.float32),)  # type: ignore[assignment]
    for start in range(0, W, BLOCK_K):
        # A row of x lies as if column i of all words were row i of eight.
        at, has_column = _in_tiles(start, x_tile, k % TILE_WORDS, k // BLOCK_K, 8, W, TILE_WORDS, WHOLE)
        a = tl.trans(tl.load(x_rows + at, mask=live & has_column, other=0.0))
        sums = ()
        for i in tl.static_range(PARTS):
            first = first_row + i * N
            size = TILE_ROWS if ROWS // TILE_ROWS * TILE_ROWS == ROWS else tl.minimum(ROWS - first, TILE_ROWS)
            at, has_word = _in_tiles(start, w // TILE_WORDS, w % TILE_WORDS, rows, size, W, TILE_WORDS, WHOLE)
            words = tl.load(weight + first * W + at, mask=(first + rows < ROWS) & has_word, other=0)
            first_code = start // GROUP_WORDS
            at, has_code = _in_tiles(first_code, g // TILE_GROUPS, g % TILE_GROUPS, rows, size, G, TILE_GROUPS, WHOLE)
            codes = tl.load(scale + first * G + at, mask=(first + rows < ROWS) & has_code, other=0)
            total = tl.dot(_decode(words, codes, DOT, PTX), a, totals[i], input_precision="ieee")
            if ON_GPU:
                # Nothing, but it reads the sum. Triton 3.6 lets products of the next round overwrite weights that a
                # product of this one still reads, unless somebody waits for it.
                total = tl.inline_asm_elementwise("", "=r,0", [total], dtype=tl.float32, is_pure=True, pack=1)
            sums = sums + (total,)  # type: ignore[assignment]
        totals = sums
    return totals


@triton.jit
def _in_tiles(
    start, tiles, offsets, rows, num_rows, NUM_COLUMNS: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr
):
    """Where elements of ``rows`` lie that are ``offsets`` inside the ``tiles`` behind column ``start``.

    Tiles of ``TILE`` columns of all ``num_rows`` follow one another. Returns offsets, and which columns there are.
    """
    tile_start = start + tiles * TILE
    size = TILE if WHOLE else tl.minimum(NUM_COLUMNS - tile_start, TILE)
    return tile_start * num_rows + rows * size + offsets, offsets < size


@triton.jit
def _decode(words, codes, DOT: tl.constexpr, PTX: tl.constexpr):
    """Each of the 8 columns of ``words [N, W]`` times its scale ``codes [N, W / 4]``; with PTX 2^-62 times that."""
    if PTX:
        factors = _spread((codes.to(tl.int32) + 64) * 0x00800080, words.shape)
        values = tl.inline_asm_elementwise(
            DECODE_PTX,
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r",
            [words, factors],
            dtype=(tl.bfloat16,) * 8,
            is_pure=True,
            pack=2,
        )
    else:
        bits = tl.where(codes == 0, 1 << 22, tl.where(codes == 255, 0x7FC00000, codes.to(tl.int32) << 23))
        factors = _spread(bits.to(tl.float32, bitcast=True), words.shape)
        pairs = tl.reshape(words.to(tl.uint32, bitcast=True), [words.shape[0], words.shape[1] // 2, 2])
        low_halves, high_halves = tl.split(pairs)
        values = ()
        for i in tl.static_range(8):
            bits = _value_bits(low_halves if i < 4 else high_halves, i % 4)
            columns = tl.join(_fp32(bits & 0xFFFF), _fp32(bits >> 16))
            values = values + ((tl.reshape(columns, words.shape) * factors).to(DOT),)
    # A thread has its words' nibbles already: these are all names of registers.
    even = tl.join(tl.join(values[0], values[4]), tl.join(values[2], values[6]))
    odd = tl.join(tl.join(values[1], values[5]), tl.join(values[3], values[7]))
    return tl.reshape(tl.permute(tl.join(even, odd), (0, 2, 3, 4, 1)), [words.shape[0], 8 * words.shape[1]])


@triton.jit
def _spread(factors, shape: tl.constexpr):
    """``[N, G]`` to ``[N, W]``: each for its group of words."""
    N: tl.constexpr = shape[0]
    W: tl.constexpr = shape[1]
    return tl.reshape(tl.broadcast_to(factors[:, :, None], [N, W // GROUP_WORDS, GROUP_WORDS]), [N, W])


@triton.jit
def _value_bits(word, i: tl.constexpr):
    """The two values ``i`` that a word keeps, in either half as a bf16 has them: by the steps of ``DECODE_PTX``."""
    if i == 3:
        word = (word & PIECES) * MULTIPLIER
    elif ROTATIONS[i] > 0:
        word = (word << ROTATIONS[i]) | (word >> (32 - ROTATIONS[i]))
    return word & VALUE_BITS


@triton.jit
def _fp32(half):
    """The value whose bits in bf16, with an exponent that is 126 too low, are ``half``."""
    return (half << 16).to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126


@triton.jit
def _combine(
    outputs,
    topk_weights,
    topk_ids,
    places,
    out,
    num_experts,
    expert_offset,
    weights_strides,
    ids_stride,
    TOP_K: tl.constexpr,
    L: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(TOP_K):
        if places is None:  # a single token
            local = tl.load(topk_ids + choice * ids_stride).to(tl.int32) - expert_offset
            place = tl.where((local >= 0) & (local < num_experts), choice, -1).to(tl.int64)
        else:
            place = tl.load(places + token * TOP_K + choice).to(tl.int64)
        weight = tl.load(topk_weights + token * weights_strides[0] + choice * weights_strides[1])
        row = tl.load(outputs + place * L + columns, mask=(columns < L) & (place >= 0), other=0.0)
        total += tl.where(place >= 0, weight * row.to(tl.float32), 0.0)
    tl.store(out + token * L + columns, total.to(out.dtype.element_ty), mask=columns < L)
