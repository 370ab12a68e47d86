"""Attention Residuals: a bank row keeps its value, and the mix is the softmax over depth, normalised."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sglang_k3.models.text.attn_residual import DepthMix, ResidualBank
from sglang_k3.models.text.norm import RMSNorm
from sglang_k3.testing import equations
from tests.kit.compare import assert_bitwise
from tests.kit.tolerance import assert_close

pytestmark = pytest.mark.sglang

TOKENS, SIZE, EPS = 5, 24, 1e-5


def bank_of(rows: Tensor, max_rows: int) -> ResidualBank:
    bank = ResidualBank.empty(max_rows, rows[0])
    for row in rows:
        bank.append(row)
    return bank


def mix_of(norm: Tensor, proj: Tensor) -> DepthMix:
    mix = DepthMix(SIZE, eps=EPS)
    with torch.no_grad():
        mix.load_norm(norm)
        mix.load_proj(proj.unsqueeze(0))
    return mix


def random_norm(dtype: torch.dtype = torch.float32) -> RMSNorm:
    norm = RMSNorm(SIZE, eps=EPS).to(dtype)
    with torch.no_grad():
        norm.weight.normal_()
    return norm


def test_a_bank_row_keeps_its_value() -> None:
    """The running prefix is updated in place by whoever wants to; the row that was made of it stays."""
    prefix_sum = torch.randn(TOKENS, SIZE)
    kept = prefix_sum.clone()
    bank = ResidualBank.empty(2, prefix_sum)
    bank.append(prefix_sum)
    prefix_sum += 1
    bank.append(prefix_sum)
    prefix_sum.zero_()
    assert_bitwise(bank.rows, torch.stack([kept, kept + 1]))


def test_rows_come_oldest_first_in_one_buffer() -> None:
    """Nothing is moved when a row is added."""
    rows = torch.randn(3, TOKENS, SIZE)
    bank = bank_of(rows[:1], max_rows=4)
    first = bank.rows.data_ptr()
    for row in rows[1:]:
        bank.append(row)
    assert_bitwise(bank.rows, rows)
    assert bank.rows.data_ptr() == first and bank.rows.is_contiguous()


def test_a_bank_has_the_dtype_and_device_of_the_prefix() -> None:
    like = torch.empty(TOKENS, SIZE, dtype=torch.bfloat16)
    assert ResidualBank.empty(2, like).rows.dtype == torch.bfloat16


def test_a_full_bank_takes_no_more() -> None:
    bank = bank_of(torch.randn(2, TOKENS, SIZE), max_rows=2)
    with pytest.raises(IndexError):
        bank.append(torch.zeros(TOKENS, SIZE))


@pytest.mark.parametrize("num_rows", [1, 2, 8])
def test_with_a_zero_projection_the_mix_is_the_mean(num_rows: int) -> None:
    rows, prefix_sum = torch.randn(num_rows, TOKENS, SIZE), torch.randn(TOKENS, SIZE)
    mix, norm = mix_of(torch.rand(SIZE), torch.zeros(SIZE)), random_norm()
    mean = torch.cat([rows, prefix_sum.unsqueeze(0)]).double().mean(0)
    assert_close(mix(bank_of(rows, 8), prefix_sum, None, norm)[0], norm(mean.float()), "ratio")


def test_an_empty_bank_leaves_the_prefix_to_the_norm() -> None:
    """Layer 0, whose weights never act."""
    prefix_sum = torch.randn(TOKENS, SIZE)
    mix = mix_of(torch.full((SIZE,), torch.nan), torch.full((SIZE,), torch.nan))
    norm = random_norm()
    bank = ResidualBank.empty(2, prefix_sum)
    for delta in (None, torch.randn(TOKENS, SIZE)):
        out, mixed = mix(bank, prefix_sum, delta, norm)
        assert_bitwise(mixed, prefix_sum if delta is None else prefix_sum + delta)
        assert_bitwise(out, norm(mixed))


def test_rows_that_are_not_appended_yet_are_not_read() -> None:
    """The buffer behind the last row is uninitialised."""
    rows, prefix_sum = torch.randn(2, TOKENS, SIZE), torch.randn(TOKENS, SIZE)
    mix, norm = mix_of(torch.rand(SIZE), torch.randn(SIZE)), random_norm()
    delta = torch.randn(TOKENS, SIZE)
    many, few = (mix(bank_of(rows, size), prefix_sum, delta, norm) for size in (8, 2))
    assert_bitwise(many[0], few[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_mix_is_the_equation(dtype: torch.dtype) -> None:
    """Scores of normalised rows, average of the rows as they are; checked in fp64, token by token."""
    rows, prefix_sum = torch.randn(3, TOKENS, SIZE).to(dtype), torch.randn(TOKENS, SIZE).to(dtype)
    norm, proj = torch.rand(SIZE) + 0.5, torch.randn(SIZE)
    output_norm = random_norm(dtype)
    delta = torch.randn(TOKENS, SIZE).to(dtype)
    actual, prefix_sum = mix_of(norm, proj)(bank_of(rows, 3), prefix_sum, delta, output_norm)
    mixed = [
        equations.depth_mix(
            [*rows[:, t].double(), prefix_sum[t].double()],
            norm_weight=norm.double(),
            proj=proj.double(),
            eps=EPS,
        )
        for t in range(TOKENS)
    ]
    expected = equations.unit_rms(torch.stack(mixed), eps=EPS) * output_norm.weight.double()
    assert_close(actual, expected.to(dtype), "ratio")


def test_weights_are_folded_in_fp32() -> None:
    """Also in a bfloat16 run: the product would lose bits otherwise."""
    norm, proj = torch.rand(SIZE).bfloat16(), torch.randn(SIZE).bfloat16()
    mix = mix_of(norm, proj)
    assert_bitwise(mix.folded_weight, norm.float() * proj.float())
