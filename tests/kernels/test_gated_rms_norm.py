import math

import pytest
import torch

from sglang_k3.kernels.gated_rms_norm import gated_rms_norm
from sglang_k3.kernels.gated_rms_norm.cases import CASES, make_inputs
from tests.kit.compare import assert_bitwise, assert_ulp
from tests.kit.ops import over_cases

# The mean, root, sigmoid and three products of fp32, about half an ulp each; after the downcast to bf16 one is left.
MAX_ULP = {torch.float32: 4, torch.bfloat16: 1}


@over_cases(CASES)
def test_equals_the_formula_element_by_element(case, device):
    (o, gate, weight), kwargs = make_inputs(case, device)
    actual = gated_rms_norm(o, gate, weight, **kwargs)
    expected = torch.zeros(o.shape, dtype=torch.float64)
    for t in range(case.tokens):
        for h in range(case.heads):
            row, gates = o[t, h].tolist(), gate[t, h].tolist()
            rms = math.sqrt(sum(value * value for value in row) / len(row) + kwargs["eps"])
            for c, value in enumerate(row):
                expected[t, h, c] = value / rms * weight[c].item() / (1 + math.exp(-gates[c]))
    assert_ulp(actual, expected.to(case.dtype), max_ulp=MAX_ULP[case.dtype])


def test_heads_are_normalised_apart():
    o, gate, weight = torch.randn(2, 3, 8), torch.randn(2, 3, 8), torch.randn(8)
    before = gated_rms_norm(o, gate, weight, eps=1e-5)
    o[:, 1] *= 100.0
    after = gated_rms_norm(o, gate, weight, eps=1e-5)
    assert_bitwise(after[:, [0, 2]], before[:, [0, 2]])


def test_a_token_does_not_depend_on_its_batch():
    o, gate, weight = torch.randn(13, 3, 7), torch.randn(13, 3, 7), torch.randn(7)
    together = gated_rms_norm(o, gate, weight, eps=1e-5)
    for t in range(13):
        alone = gated_rms_norm(o[t : t + 1].clone(), gate[t : t + 1].clone(), weight, eps=1e-5)
        assert_bitwise(alone, together[t : t + 1])


def test_a_gate_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"gate has shape \(2, 3, 4\), but \[T, H, V\] is needed with T=2, H=3, V=8"):
        gated_rms_norm(torch.randn(2, 3, 8), torch.randn(2, 3, 4), torch.randn(8), eps=1e-5)
