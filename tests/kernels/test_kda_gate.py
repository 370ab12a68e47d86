import math

import pytest
import torch

from sglang_k3.kernels.kda_gate import kda_gate
from sglang_k3.kernels.kda_gate.cases import CASES, TOLERANCE, make_inputs
from tests.kit.compare import assert_bitwise
from tests.kit.ops import over_cases
from tests.kit.tolerance import assert_close


@over_cases(CASES)
def test_equals_the_formula_element_by_element(case, device):
    (a, b, A_log, dt_bias), kwargs = make_inputs(case, device)
    g, beta = kda_gate(a, b, A_log, dt_bias, **kwargs)
    expected = torch.zeros(a.shape, dtype=torch.float64)
    for t, heads in enumerate(a.tolist()):
        for h, channels in enumerate(heads):
            for c, value in enumerate(channels):
                z = math.exp(A_log[h].item()) * (value + dt_bias[h, c].item())
                expected[t, h, c] = kwargs["lower_bound"] / (1 + math.exp(-z))
    assert_close(g, expected.float(), TOLERANCE)
    written = torch.tensor([[1 / (1 + math.exp(-value)) for value in heads] for heads in b.tolist()])
    assert_close(beta, written.view(b.shape), TOLERANCE)


@pytest.mark.parametrize(
    ("a", "A_log", "dt_bias", "expected"),
    [(0, 0, 0, -2.5), (1, 0.5, -2, -0.806409242), (-3, 1, 0.25, -0.002833043)],
)
def test_published_check_values(a, A_log, dt_bias, expected):
    tensors = (
        torch.tensor([[[float(a)]]]),
        torch.zeros(1, 1),
        torch.tensor([float(A_log)]),
        torch.tensor([[float(dt_bias)]]),
    )
    g, _ = kda_gate(*tensors, lower_bound=-5.0)
    assert g.item() == pytest.approx(expected, rel=1e-6)


def test_stays_between_its_bounds_for_extreme_inputs():
    a, b = torch.tensor([[[-1e30], [1e30], [0.0]]]), torch.tensor([[-1e30, 1e30, 0.0]])
    g, beta = kda_gate(a, b, torch.zeros(3), torch.zeros(3, 1), lower_bound=-5.0)
    assert g.flatten().tolist() == [0.0, -5.0, -2.5]
    assert beta.flatten().tolist() == [0.0, 1.0, 0.5]


def test_a_token_does_not_depend_on_its_batch():
    a, b, weights = torch.randn(13, 3, 7), torch.randn(13, 3), (torch.randn(3), torch.randn(3, 7))
    together = kda_gate(a, b, *weights, lower_bound=-5.0)
    for t in range(13):
        alone = kda_gate(a[t : t + 1].clone(), b[t : t + 1].clone(), *weights, lower_bound=-5.0)
        for one, all_ in zip(alone, together, strict=True):
            assert_bitwise(one, all_[t : t + 1])


def test_a_bound_that_would_let_states_grow_is_refused():
    with pytest.raises(ValueError, match=r"lower_bound=5.0 must be negative"):
        kda_gate(torch.zeros(1, 1, 1), torch.zeros(1, 1), torch.zeros(1), torch.zeros(1, 1), lower_bound=5.0)


def test_a_rounded_bias_is_refused():
    with pytest.raises(ValueError, match="dt_bias is torch.bfloat16, but float32 is needed"):
        kda_gate(
            torch.zeros(1, 1, 1), torch.zeros(1, 1), torch.zeros(1), torch.zeros(1, 1).bfloat16(), lower_bound=-5.0
        )
