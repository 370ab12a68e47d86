"""The bits of packed experts are moved, none is lost, and the way back ends where it began."""

import itertools

import pytest
import torch

from sglang_k3.kernels.dispatch import PUBLISHED
from sglang_k3.kernels.latent_experts import IMPLS
from sglang_k3.kernels.latent_experts.layout import PAIRED_WORDS, PLACES
from tests.kit.compare import assert_bitwise


def moved(weight, way=PAIRED_WORDS.apply):
    copy = weight.clone()
    way(copy)
    return copy


def random_bytes(*shape):
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def test_every_bit_of_a_half_has_a_place_of_its_own():
    assert sorted(itertools.chain(*PLACES)) == list(range(16))


@pytest.mark.parametrize("shape", [(3, 5, 48), (1, 1, 16), (7, 32), (0, 4, 16), (2, 0, 16)], ids=str)
def test_the_way_back_ends_where_it_began(shape):
    weight = random_bytes(*shape)
    assert_bitwise(moved(moved(weight), PAIRED_WORDS.undo), weight)
    assert_bitwise(moved(moved(weight, PAIRED_WORDS.undo)), weight)


def test_every_bit_goes_to_one_place():
    """Each of the 64 bits of a pair of words alone comes out as one bit, where it should be."""
    bits = torch.eye(64, dtype=torch.uint8).unflatten(1, (8, 8))
    pairs = (bits << torch.arange(8, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)  # [bit, byte]
    after = moved(torch.cat([pairs, torch.zeros_like(pairs)], 1))
    assert not after[:, 8:].any()
    halves = after[:, :8].contiguous().view(torch.int16).int() & 0xFFFF  # [bit, half]
    for bit in range(64):
        word, half, value, place = bit // 32, bit // 16 % 2, bit // 4 % 4, bit % 4
        expected = torch.zeros(4, dtype=torch.int32)
        expected[2 * half + word] = 1 << PLACES[value][place]
        assert_bitwise(halves[bit], expected, f"bit {bit}")


def test_a_part_may_be_moved_by_itself():
    weight = random_bytes(3, 6, 64)
    parts = weight.clone()
    for expert, rows, columns in itertools.product(range(3), (slice(4), slice(4, 6)), (slice(16), slice(16, 64))):
        PAIRED_WORDS.apply(parts[expert, rows, columns])
    assert_bitwise(parts, moved(weight))


def test_what_surrounds_a_view_stays():
    surroundings = random_bytes(2, 5, 96)
    before = surroundings.clone()
    PAIRED_WORDS.apply(surroundings[:, 1:4, 32:64])
    assert_bitwise(surroundings[:, 1:4, 32:64], moved(before[:, 1:4, 32:64]))
    surroundings[:, 1:4, 32:64] = before[:, 1:4, 32:64]
    assert_bitwise(surroundings, before)


@pytest.mark.parametrize("weight", [torch.zeros(2, 3, 32, dtype=torch.uint8), torch.randn(2, 3, 32).bfloat16()])
def test_zeros_and_plain_weights_lie_alike_in_both_layouts(weight):
    assert_bitwise(moved(weight), weight)


def test_the_reference_reads_what_is_published():
    assert {impl.name: impl.layout for impl in IMPLS} == {"triton": PAIRED_WORDS, "reference": PUBLISHED}


def test_parts_of_one_memory_begin_where_triton_compiles_nothing_new() -> None:
    from sglang_k3.kernels.latent_experts.triton_impl import part_sizes

    sizes = (448, 37 * 16, 2 * 71, 2 * 1001)
    parts = part_sizes(*sizes)
    assert all(part % 4 == 0 and 0 <= part - size < 4 for part, size in zip(parts, sizes, strict=True))
