import math

import pytest
import torch

from sglang_k3.kernels.rms_norm import rms_norm
from sglang_k3.kernels.rms_norm.cases import CASES, make_inputs
from tests.kit.compare import assert_bitwise, assert_ulp
from tests.kit.ops import over_cases

# The mean, root, quotient and product of fp32, about half an ulp each; rounded to bf16, the last product alone is left.
MAX_ULP = {torch.float32: 3, torch.bfloat16: 1}


@over_cases(CASES)
def test_equals_the_formula_element_by_element(case, device):
    (x, weight), kwargs = make_inputs(case, device)
    actual = rms_norm(x, weight, **kwargs)
    expected = torch.zeros_like(x, device="cpu")
    for t, row in enumerate(x.tolist()):
        inverse_rms = 1 / math.sqrt(sum(value * value for value in row) / len(row) + kwargs["eps"])
        normed = torch.tensor([value * inverse_rms for value in row], dtype=torch.float64).to(case.dtype)
        expected[t] = normed * weight.cpu()  # the product is rounded again, in the run dtype
    assert_ulp(actual, expected, max_ulp=MAX_ULP[case.dtype])


def test_a_row_does_not_depend_on_its_batch():
    x, weight = torch.randn(13, 7), torch.randn(7)
    together = rms_norm(x, weight, eps=1e-5)
    for t in range(13):
        assert_bitwise(rms_norm(x[t : t + 1].clone(), weight, eps=1e-5), together[t : t + 1])


def test_leading_dimensions_and_strides_are_free():
    x, weight = torch.randn(2, 3, 5, 8), torch.randn(8)
    expected = torch.stack([rms_norm(part, weight, eps=1e-5) for part in x.flatten(0, 1)]).view(2, 3, 5, 8)
    assert_bitwise(rms_norm(x, weight, eps=1e-5), expected)
    wide = torch.full((5, 20), torch.nan)
    wide[:, 3:11] = x[0, 0]
    assert_bitwise(rms_norm(wide[:, 3:11], weight, eps=1e-5), expected[0, 0])


def test_epsilon_bounds_the_gain_of_a_vanishing_row():
    out = rms_norm(torch.full((1, 4), 1e-30), torch.ones(4), eps=1e-5)
    torch.testing.assert_close(out, torch.full((1, 4), 1e-30 / math.sqrt(1e-5)), rtol=1e-5, atol=0)


def test_an_fp32_weight_does_not_widen_the_result():
    assert rms_norm(torch.randn(2, 8, dtype=torch.bfloat16), torch.randn(8), eps=1e-5).dtype == torch.bfloat16


def test_a_weight_of_another_width_is_refused():
    with pytest.raises(ValueError, match=r"weight has shape \(7,\), but \[D\] is needed with D=8"):
        rms_norm(torch.randn(2, 8), torch.randn(7), eps=1e-5)
