import math

import pytest
import torch

from sglang_k3.kernels.situ_and_mul import situ_and_mul
from sglang_k3.kernels.situ_and_mul.cases import CASES, make_inputs
from tests.kit.compare import assert_bitwise, assert_ulp
from tests.kit.ops import over_cases

# tanh and exp of fp32 are good to 2 ulp on CUDA, six products and quotients to half an ulp; after the downcast to bf16
# one is left.
MAX_ULP = {torch.float32: 8, torch.bfloat16: 1}


def situ(g, u, beta, linear_beta):
    up = u if linear_beta is None else linear_beta * math.tanh(u / linear_beta)
    return beta * math.tanh(g / beta) / (1 + math.exp(-g)) * up


@over_cases(CASES)
def test_equals_the_formula_element_by_element(case, device):
    (gate_up,), kwargs = make_inputs(case, device)
    expected = torch.tensor(
        [
            [situ(g, u, **kwargs) for g, u in zip(r[: case.width], r[case.width :], strict=True)]
            for r in gate_up.tolist()
        ]
    )
    actual = situ_and_mul(gate_up, **kwargs)
    expected = expected.double().view(case.tokens, case.width).to(case.dtype)
    assert_ulp(actual, expected, max_ulp=MAX_ULP[case.dtype])


@pytest.mark.parametrize(
    ("gate", "up", "expected"),
    [(1, 1, 0.715817828), (-2, 3, -0.657873819), (10, 50, 95.108021534), (0, 5, 0.0)],
)
def test_published_check_values(gate, up, expected):
    out = situ_and_mul(torch.tensor([[float(gate), float(up)]]), beta=4.0, linear_beta=25.0)
    assert out.item() == pytest.approx(expected, rel=1e-6)


def test_the_result_is_capped_at_100_and_never_nan():
    gate_up = torch.tensor([[1e30, 1e30], [1e30, -1e30], [-1e30, 1e30], [-200.0, 1.0]])
    out = situ_and_mul(gate_up, beta=4.0, linear_beta=25.0)
    assert out.flatten().tolist() == [100.0, -100.0, 0.0, 0.0]


def test_a_row_does_not_depend_on_its_batch():
    gate_up = torch.randn(13, 14) * 5
    together = situ_and_mul(gate_up, beta=4.0, linear_beta=25.0)
    for t in range(13):
        assert_bitwise(situ_and_mul(gate_up[t : t + 1].clone(), beta=4.0, linear_beta=25.0), together[t : t + 1])


def test_an_odd_width_is_refused():
    with pytest.raises(ValueError, match=r"gate_up has shape \(2, 7\), but \[T, 2I\] is needed"):
        situ_and_mul(torch.randn(2, 7), beta=4.0, linear_beta=25.0)
