import math

import pytest
import torch

from sglang_k3.kernels.depth_mix import depth_mix
from sglang_k3.kernels.depth_mix.cases import CASES, TOLERANCE, make_inputs
from sglang_k3.kernels.rms_norm import rms_norm
from tests.kit.compare import assert_bitwise
from tests.kit.ops import over_cases
from tests.kit.tolerance import assert_close


@over_cases(CASES)
def test_equals_the_formula_token_by_token(case, device):
    (bank, prefix_sum, folded_weight), kwargs = make_inputs(case, device)
    actual, prefix_sum = depth_mix(bank, prefix_sum, folded_weight, **kwargs)
    expected = torch.zeros_like(prefix_sum, device="cpu", dtype=torch.float64)
    weight = folded_weight.cpu().double()
    for t in range(case.tokens):
        rows = [row.cpu().double() for row in (*bank[:, t], prefix_sum[t])]
        gains = [math.exp((row @ weight) / math.sqrt(row @ row / case.width + kwargs["eps"])) for row in rows]
        expected[t] = sum(gain / sum(gains) * row for gain, row in zip(gains, rows, strict=True))
        if case.normed:
            mixed = expected[t].to(case.dtype).double()
            normed = mixed / math.sqrt(mixed @ mixed / case.width + kwargs["eps"])
            expected[t] = normed.to(case.dtype).double() * kwargs["norm_weight"].cpu().double()
    assert_close(actual, expected.to(case.dtype), TOLERANCE)


def test_an_empty_bank_gives_the_prefix_itself_in_storage_of_its_own():
    prefix_sum = torch.randn(3, 8, dtype=torch.bfloat16)
    out, mixed = depth_mix(prefix_sum.new_zeros(0, 3, 8), prefix_sum, torch.randn(8), eps=1e-5)
    assert torch.equal(out, prefix_sum)
    assert out.data_ptr() != prefix_sum.data_ptr() and mixed is prefix_sum


@over_cases([case for case in CASES if case.added])
def test_what_is_added_to_the_prefix_is_mixed_as_their_rounded_sum(case, device):
    (bank, prefix_sum, weight), kwargs = make_inputs(case, device)
    before, delta = prefix_sum.clone(), kwargs.pop("delta")
    out, mixed = depth_mix(bank, prefix_sum, weight, delta=delta, **kwargs)
    assert_bitwise(mixed, before + delta)
    assert_bitwise(out, depth_mix(bank, before + delta, weight, **kwargs)[0])
    assert_bitwise(prefix_sum, before)


def test_a_normalised_mix_is_the_norm_of_the_mix():
    bank, prefix_sum, weight = torch.randn(2, 5, 16).bfloat16(), torch.randn(5, 16).bfloat16(), torch.randn(16)
    norm_weight = torch.randn(16).bfloat16()
    mixed, _ = depth_mix(bank, prefix_sum, weight, eps=1e-5)
    fused, _ = depth_mix(bank, prefix_sum, weight, eps=1e-5, norm_weight=norm_weight)
    assert_bitwise(fused, rms_norm(mixed, norm_weight, eps=1e-5))


@pytest.mark.parametrize("rows", [1, 2, 8])
def test_a_zero_projection_gives_the_plain_mean(rows):
    bank, prefix_sum = torch.randn(rows, 5, 16), torch.randn(5, 16)
    mean = torch.cat([bank, prefix_sum[None]]).double().mean(0).float()
    assert_close(depth_mix(bank, prefix_sum, torch.zeros(16), eps=1e-5)[0], mean, "ratio")


def test_rows_are_averaged_as_they_are_and_not_normalised():
    """Scores see the direction of a row only, so growing a row grows its share of the result in proportion."""
    bank, prefix_sum, weight = torch.randn(1, 4, 16).abs(), torch.zeros(4, 16), torch.randn(16)
    small, large = (depth_mix(bank * factor, prefix_sum, weight, eps=1e-12)[0] for factor in (1.0, 1024.0))
    assert_close(large, small * 1024.0, "ratio")


def test_large_scores_do_not_overflow():
    bank, prefix_sum = torch.randn(2, 3, 16), torch.randn(3, 16)
    out, _ = depth_mix(bank, prefix_sum, torch.full((16,), 1e4), eps=1e-5)
    assert out.isfinite().all()


def test_a_token_does_not_depend_on_its_batch():
    bank, prefix_sum, weight = torch.randn(5, 13, 7), torch.randn(13, 7), torch.randn(7)
    together, _ = depth_mix(bank, prefix_sum, weight, eps=1e-5)
    for t in range(13):
        alone, _ = depth_mix(bank[:, t : t + 1].clone(), prefix_sum[t : t + 1].clone(), weight, eps=1e-5)
        assert_bitwise(alone, together[t : t + 1])


def test_a_folded_weight_that_was_rounded_is_refused():
    with pytest.raises(ValueError, match="folded_weight is torch.bfloat16, but float32 is needed"):
        depth_mix(torch.randn(1, 2, 8), torch.randn(2, 8), torch.randn(8).bfloat16(), eps=1e-5)
