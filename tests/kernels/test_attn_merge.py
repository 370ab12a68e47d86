import math

import pytest
import torch

from sglang_k3.kernels.attn_merge import attn_merge
from sglang_k3.kernels.attn_merge.cases import CASES, TOLERANCE, make_inputs
from tests.kit.compare import assert_bitwise
from tests.kit.ops import fp64, over_cases
from tests.kit.tolerance import assert_close


@over_cases(CASES)
def test_equals_the_formula_head_by_head(case, device):
    inputs = make_inputs(case, device)
    out, lse = attn_merge(*inputs.args)
    out_a, lse_a, out_b, lse_b = fp64(*inputs.args)
    expected, expected_lse = torch.zeros_like(out_a), torch.full_like(lse_a, -math.inf)
    for t in range(case.tokens):
        for h in range(case.heads):
            parts = [(math.exp(s[t, h]), o[t, h]) for s, o in ((lse_a, out_a), (lse_b, out_b)) if s[t, h] > -math.inf]
            total = sum(gain for gain, _ in parts)
            if parts:
                expected[t, h] = sum(gain / total * o for gain, o in parts)
                expected_lse[t, h] = math.log(total)
    assert_close(out, expected.float(), TOLERANCE, "output")
    assert_close(lse, expected_lse.float(), TOLERANCE, "lse")


def part(tokens=4, heads=2, value_dim=8):
    return torch.randn(tokens, heads, value_dim), torch.randn(tokens, heads)


def empty(tokens=4, heads=2, value_dim=8):
    return torch.full((tokens, heads, value_dim), torch.nan), torch.full((tokens, heads), -torch.inf)


def test_an_empty_part_changes_no_bit_and_its_output_is_not_looked_at():
    a = part()
    for merged in (attn_merge(*a, *empty()), attn_merge(*empty(), *a)):
        for actual, expected in zip(merged, a, strict=True):
            assert_bitwise(actual, expected)


def test_two_empty_parts_give_zero_and_minus_infinity():
    out, lse = attn_merge(*empty(), *empty())
    assert (out == 0).all()
    assert (lse == -math.inf).all()


def test_merging_is_associative_and_commutative():
    a, b, c = part(), part(), part()
    left = attn_merge(*attn_merge(*a, *b), *c)
    right = attn_merge(*attn_merge(*c, *b), *a)
    for x, y in zip(left, right, strict=True):
        assert_close(x, y, TOLERANCE)


@pytest.mark.parametrize("shift", [-1e4, 1e4])
def test_far_apart_parts_do_not_overflow(shift):
    (out_a, lse_a), (out_b, lse_b) = part(), part()
    out, lse = attn_merge(out_a, lse_a, out_b, lse_b + shift)
    assert_bitwise(out, out_a if shift < 0 else out_b)
    assert lse.isfinite().all()


def test_partial_outputs_of_a_narrower_dtype_are_refused():
    a, b = part(), part()
    with pytest.raises(ValueError, match="out_b is torch.bfloat16, but float32 is needed"):
        attn_merge(*a, b[0].bfloat16(), b[1])
