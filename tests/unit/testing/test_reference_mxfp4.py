"""MXFP4: decode vectors of the fact sheet (2.7), and an encoder that decoding undoes."""

from __future__ import annotations

import pytest
import torch

from sglang_k3.testing import mxfp4


def decode_one(byte: int, scale: int) -> list[float]:
    packed = torch.full((1, 16), byte, dtype=torch.uint8)
    return mxfp4.decode(packed, torch.full((1, 1), scale, dtype=torch.uint8))[0, :2].tolist()


@pytest.mark.parametrize(
    ("byte", "scale", "values"),
    [
        (0x21, 127, [0.5, 1.0]),
        (0xF7, 127, [6.0, -6.0]),
        (0x9A, 120, [-0.0078125, -0.00390625]),
        (0x5E, 130, [-32.0, 24.0]),
        (0x21, 1, [2.0**-127, 2.0**-126]),
        (0x21, 0, [2.0**-128, 2.0**-127]),
        (0x21, 254, [2.0**126, 2.0**127]),
    ],
)
def test_decode_vectors(byte: int, scale: int, values: list[float]) -> None:
    assert decode_one(byte, scale) == values


def test_code_8_is_minus_zero_and_scale_255_is_nan() -> None:
    assert str(decode_one(0x08, 127)) == "[-0.0, 0.0]"
    assert all(value != value for value in decode_one(0x21, 255))


def test_each_group_has_its_own_scale() -> None:
    packed = torch.full((1, 32), 0x22, dtype=torch.uint8)
    decoded = mxfp4.decode(packed, torch.tensor([[127, 128]], dtype=torch.uint8))
    assert decoded[0].tolist() == [1.0] * 32 + [2.0] * 32


def test_grid_values_survive_a_round_trip() -> None:
    grid = torch.tensor([sign * m for m in mxfp4.MAGNITUDES for sign in (1.0, -1.0)])
    rows = torch.stack([grid.repeat(2) * 2.0**e for e in (-127, -20, 0, 5, 124)])  # [5, 32]; each row reaches 6
    assert torch.equal(mxfp4.decode(*mxfp4.encode(rows)), rows)


def test_encoding_rounds_to_the_nearest_and_ties_to_the_even_code() -> None:
    values = [0.24, 0.25, 0.26, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.01, -0.75, -5.0]
    nearest = [0.0, 0.0, 0.5, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, -1.0, -4.0]
    row = torch.zeros(1, 32)
    row[0, : len(values)] = torch.tensor(values)
    row[0, -1] = 6.0  # fixes the scale at 1
    assert mxfp4.decode(*mxfp4.encode(row))[0, : len(values)].tolist() == nearest


def test_scale_follows_the_ocp_rule_and_saturates() -> None:
    amax = torch.tensor([1.0, 3.9, 4.0, 6.0, 7.9, 8.0])
    packed, scale = mxfp4.encode(amax[:, None].repeat(1, 32))
    assert (scale[:, 0] - 127.0).tolist() == [-2, -1, 0, 0, 0, 1]
    assert mxfp4.decode(packed, scale)[4, 0] == 6.0


def test_error_is_within_a_quarter_of_the_largest_value() -> None:
    weight = torch.rand(64, 96, generator=torch.Generator().manual_seed(0)) - 0.5
    amax = weight.view(64, 3, 32).abs().amax(-1, keepdim=True)
    error = (mxfp4.decode(*mxfp4.encode(weight)) - weight).view(64, 3, 32).abs()
    assert bool((error <= amax / 4).all())
    assert float(error.square().mean().sqrt() / weight.square().mean().sqrt()) < 0.15


def test_zeros_encode_to_zeros() -> None:
    packed, scale = mxfp4.encode(torch.zeros(2, 32))
    assert mxfp4.decode(packed, scale).tolist() == [[0.0] * 32] * 2


def test_what_cannot_be_packed_is_refused() -> None:
    with pytest.raises(ValueError, match="pad the input dimension to 64"):
        mxfp4.encode(torch.zeros(2, 48))
    with pytest.raises(ValueError, match="clean the weight"):
        mxfp4.encode(torch.full((1, 32), torch.nan))
    with pytest.raises(ValueError, match="do not belong together"):
        mxfp4.decode(torch.zeros(2, 16, dtype=torch.uint8), torch.zeros(2, 2, dtype=torch.uint8))
