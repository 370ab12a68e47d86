"""Packed experts are moved, no bit is lost, and the way back ends where it began."""

import itertools
import operator

import pytest
import torch

from sglang_k3.kernels.dispatch import PUBLISHED
from sglang_k3.kernels.latent_experts import IMPLS
from sglang_k3.kernels.latent_experts.layout import PLACES, TILES, in_tiles
from sglang_k3.kernels.latent_experts.triton_impl import DECODE_PTX
from tests.kit.compare import assert_bitwise

NAMES = TILES.arguments
# Bytes: rows and columns of one tile, of several, and of smaller ones behind them.
SHAPES = [(3, 64, 48), (1, 192, 16), (2, 128, 64), (1, 320, 80), (0, 64, 16)]


def moved(name, weight, way=TILES.apply):
    copy = weight.clone()
    way(name, copy)
    return copy


def random_bytes(*shape):
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def tiles_of(rows, row_tile, columns, column_tile):
    """Element by element: rows and columns in the order in which they lie."""
    for first_row, first_column in itertools.product(range(0, rows, row_tile), range(0, columns, column_tile)):
        row_range = range(first_row, min(first_row + row_tile, rows))
        yield from itertools.product(row_range, range(first_column, min(first_column + column_tile, columns)))


def alternating(width):
    """Published rows of gate and up, eight and eight, in the order in which the next product takes its columns."""
    order = sorted(range(width), key=lambda column: int(in_tiles(torch.tensor(column), width)))
    for eight in zip(*[iter(order)] * 8, strict=True):
        yield from eight
        yield from (width + row for row in eight)


@pytest.mark.parametrize("num_columns", [32, 128, 160, 384])
def test_products_take_one_value_of_each_word_of_a_tile_at_a_time(num_columns):
    taken = [
        8 * word + value
        for first in range(0, num_columns // 8, 16)
        for value in range(8)
        for word in range(first, min(first + 16, num_columns // 8))
    ]
    places = in_tiles(torch.arange(num_columns), num_columns)
    assert places[taken].tolist() == list(range(num_columns))


@pytest.mark.parametrize("shape", [(128, 16), (192, 20), (320, 12)], ids=str)
def test_scales_lie_tile_by_tile(shape):
    rows, columns = shape
    published = random_bytes(1, rows, columns)
    for name, order in (("w13_scale", list(alternating(rows // 2))), ("w2_scale", list(range(rows)))):
        expected = [published[0, order[r], c] for r, c in tiles_of(rows, 128, columns, 4)]
        assert_bitwise(moved(name, published).flatten(), torch.stack(expected), name)


@pytest.mark.parametrize("shape", [(128, 32), (192, 20), (320, 12)], ids=str)
def test_words_lie_tile_by_tile(shape):
    """Words of one bit pattern, which is the same in any order of bits, tell where their rows and pairs went."""
    rows, words = shape
    numbers = torch.arange(rows * words // 2).view(rows, words // 2)
    halves = (numbers[..., None].expand(-1, -1, 4) * 40503 & 0xFFFF).to(torch.int32).short()
    published = halves.contiguous().view(torch.uint8).view(1, rows, 4 * words)
    one_row = moved("w2", published.view(-1, 1, 4 * words)).view(rows, words, 4)  # bits only: a row of a tile alone
    for name, order in (("w13", list(alternating(rows // 2))), ("w2", list(range(rows)))):
        expected = [one_row[order[r], c] for r, c in tiles_of(rows, 128, words, 16)]
        assert_bitwise(moved(name, published).view(-1, 4), torch.stack(expected), name)


def test_every_bit_of_a_word_has_a_place_of_its_own():
    first = list(itertools.chain(*PLACES))
    assert sorted(first + [(place + 16) % 32 for place in first]) == list(range(32))


def test_every_bit_goes_to_one_place():
    """Each of the 64 bits of a pair of words alone comes out as one bit, where it should be."""
    bits = torch.eye(64, dtype=torch.uint8).unflatten(1, (8, 8))
    pairs = (bits << torch.arange(8, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)  # [bit, byte]
    after = moved("w2", torch.cat([pairs, torch.zeros_like(pairs)], 1)[:, None])[:, 0]
    assert not after[:, 8:].any()
    words = after[:, :8].contiguous().view(torch.int32).long() & 0xFFFFFFFF  # [bit, word]
    for bit in range(64):
        word, half, value, place = bit // 32, bit // 16 % 2, bit // 4 % 4, bit % 4
        expected = torch.zeros(2, dtype=torch.int64)
        expected[half] = 1 << (PLACES[value][place] + 16 * word) % 32
        assert_bitwise(words[bit], expected, f"bit {bit}")


def run_ptx(program, registers):
    """What the instructions of ``DECODE_PTX`` hand to each product: int64 of 32 bits, by the output it is for."""
    registers, multiplied = dict(registers), {}
    for line in program.strip("{} ").split(";"):
        operation, _, rest = line.strip().partition(" ")
        names = [name.strip() for name in rest.split(",")]
        if operation in ("", ".reg", "mov.b32"):
            continue
        values = [registers[name] if name in registers else int(name, 0) for name in names[1:] if name != "nil"]
        if operation == "fma.rn.bf16x2":
            assert names[2:] == ["$10", "nil"]
            multiplied[int(names[0][1:])] = values[0]
        elif operation == "shf.l.wrap.b32":
            low, high, by = values
            assert low is high
            registers[names[0]] = (low << by | low >> (32 - by)) & 0xFFFFFFFF
        else:
            registers[names[0]] = {"and.b32": operator.and_, "mul.lo.u32": operator.mul}[operation](
                *values
            ) & 0xFFFFFFFF
    return multiplied


def test_the_instructions_of_the_kernel_find_every_value():
    """All halves, as those of either word of a pair: each column comes out with sign and magnitude where a bf16 has
    them, for the output that the kernel takes it from."""
    halves = torch.arange(2**16, dtype=torch.int64)
    words = torch.stack([halves | halves.flip(0) << 16, halves.roll(777) | halves.roll(40503) << 16], dim=1)
    published = (words & 0xFFFFFFFF).to(torch.uint32).view(torch.uint8)[:, None]  # a row of two words each
    pairs = moved("w2", published)[:, 0].contiguous().view(torch.int32).long() & 0xFFFFFFFF
    found = run_ptx(DECODE_PTX.value, {"$8": pairs[:, 0], "$9": pairs[:, 1], "$10": None})
    assert sorted(found) == list(range(8))
    for column, bits in found.items():
        codes = words >> (4 * column) & 0xF  # of either word
        expected = (codes >> 3) << 15 | (codes & 7) << 6
        assert_bitwise(bits, expected[:, 0] | expected[:, 1] << 16, f"column {column}")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_way_back_ends_where_it_began(name, shape):
    weight = random_bytes(*shape)
    assert_bitwise(moved(name, moved(name, weight), TILES.undo), weight)
    assert_bitwise(moved(name, moved(name, weight, TILES.undo)), weight)
    for matrix, before in zip(moved(name, weight), weight, strict=True):
        assert_bitwise(TILES.read(name, matrix), before)


@pytest.mark.parametrize("name", NAMES)
def test_rows_may_come_one_after_the_other(name):
    weight = random_bytes(2, 320, 80)
    written = torch.zeros_like(weight)
    for matrix, rows in zip(written, weight, strict=True):
        for first, last in ((160, 320), (0, 7), (7, 160)):
            TILES.write(name, matrix, rows[first:last], first)
    assert_bitwise(written, moved(name, weight))


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_a_larger_tensor_may_come(name):
    """As the part of a rank."""
    whole = random_bytes(1, 320, 112)
    matrix = torch.zeros(320, 80, dtype=torch.uint8)
    TILES.write(name, matrix, whole[0, :, 16:96], 0)
    assert_bitwise(matrix, moved(name, whole[:, :, 16:96].contiguous())[0])


def test_a_matrix_that_is_not_contiguous_is_refused():
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        TILES.write("w2_scale", random_bytes(128, 32)[:, :16], random_bytes(128, 16), 0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("weight", [torch.zeros(2, 64, 32, dtype=torch.uint8), torch.randn(2, 64, 32).bfloat16()])
def test_zeros_and_plain_weights_lie_alike_in_both_layouts(name, weight):
    assert_bitwise(moved(name, weight), weight)


def test_the_reference_reads_what_is_published():
    assert {impl.name: impl.layout for impl in IMPLS} == {"triton": TILES, "reference": PUBLISHED}


def test_parts_of_one_memory_begin_where_triton_compiles_nothing_new() -> None:
    from sglang_k3.kernels.latent_experts.triton_impl import part_sizes

    sizes = (448, 37 * 16, 2 * 71, 2 * 1001)
    parts = part_sizes(*sizes)
    assert all(part % 4 == 0 and 0 <= part - size < 4 for part, size in zip(parts, sizes, strict=True))
