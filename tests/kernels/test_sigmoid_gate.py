import math

import pytest
import torch

from sglang_k3.kernels.sigmoid_gate import sigmoid_gate
from sglang_k3.kernels.sigmoid_gate.cases import CASES, make_inputs
from tests.kit.compare import assert_bitwise, assert_ulp
from tests.kit.ops import over_cases

# CUDA's exp of fp32 is good to 2 ulp; the sum, quotient and product add about half an ulp each.
MAX_ULP = {torch.float32: 4, torch.bfloat16: 1}


@over_cases(CASES)
def test_equals_the_formula_with_both_roundings(case, device):
    (o, gate), _ = make_inputs(case, device)
    rounded = torch.tensor([1 / (1 + math.exp(-value)) for value in gate.flatten().tolist()], dtype=torch.float64)
    rounded = rounded.view(case.tokens, case.width).to(case.dtype)
    expected = (o.cpu().double() * rounded.double()).to(case.dtype)
    assert_ulp(sigmoid_gate(o, gate), expected, max_ulp=MAX_ULP[case.dtype])


def test_the_sigmoid_is_rounded_before_the_product():
    """256 bf16 gates against an output whose product exposes the lost bits of the sigmoid."""
    gate = torch.linspace(-3, 3, 256, dtype=torch.bfloat16)
    o = torch.full_like(gate, 1.0078125)
    once = (o.double() * torch.sigmoid(gate.double())).bfloat16()
    twice = (o.double() * torch.sigmoid(gate.double()).bfloat16().double()).bfloat16()
    assert not torch.equal(once, twice)
    assert_bitwise(sigmoid_gate(o, gate), twice)


def test_an_element_does_not_depend_on_its_batch():
    o, gate = torch.randn(13, 7), torch.randn(13, 7)
    together = sigmoid_gate(o, gate)
    for t in range(13):
        assert_bitwise(sigmoid_gate(o[t : t + 1].clone(), gate[t : t + 1].clone()), together[t : t + 1])


def test_other_shapes_and_dtypes_are_refused():
    with pytest.raises(ValueError, match=r"gate has shape \(2, 4\), but \(2, 8\), that of o, is needed"):
        sigmoid_gate(torch.randn(2, 8), torch.randn(2, 4))
    with pytest.raises(ValueError, match=r"gate is torch.float32, but bfloat16 is needed"):
        sigmoid_gate(torch.randn(2, 8).bfloat16(), torch.randn(2, 8))
