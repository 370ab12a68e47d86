import math

import pytest
import torch

from sglang_k3.kernels.short_conv_decode import short_conv_decode
from sglang_k3.kernels.short_conv_decode.cases import CASES, TOLERANCE, make_inputs
from tests.kit.compare import assert_bitwise
from tests.kit.ops import call_on_copy, clone_pool, over_cases
from tests.kit.tolerance import assert_close


@over_cases(CASES)
def test_equals_the_formula_channel_by_channel(case, device):
    inputs = make_inputs(case, device)
    (x, weight), pool = inputs.args, inputs.kwargs["conv_states"]
    y, after = call_on_copy(short_conv_decode, inputs, "conv_states")
    expected, expected_pool = torch.zeros(x.shape, dtype=torch.float64), pool.clone()
    for b, slot in enumerate(inputs.kwargs["cache_indices"].tolist()):
        if slot >= 0:
            window = [*pool[slot].tolist(), x[b].tolist()]
            for c in range(case.channels):
                total = sum(weight[c, tau].item() * window[tau][c] for tau in range(case.taps))
                expected[b, c] = total / (1 + math.exp(-total))
            expected_pool[slot] = torch.tensor(window[1:])
    assert_close(y, expected.to(case.dtype), TOLERANCE)
    assert_bitwise(after, expected_pool, "conv_states")


def test_a_row_does_not_depend_on_its_batch():
    x, weight, pool = torch.randn(13, 7), torch.randn(7, 4), torch.randn(13, 3, 7)
    together = short_conv_decode(x, weight, conv_states=clone_pool(pool), cache_indices=torch.arange(13))
    for b in range(13):
        alone = short_conv_decode(x[b : b + 1], weight, conv_states=pool, cache_indices=torch.tensor([b]))
        assert_bitwise(alone, together[b : b + 1])


def test_a_rounded_weight_is_refused():
    with pytest.raises(ValueError, match=r"weight is torch.bfloat16, but float32 is needed"):
        short_conv_decode(
            torch.zeros(1, 2),
            torch.zeros(2, 4).bfloat16(),
            conv_states=torch.zeros(1, 3, 2),
            cache_indices=torch.tensor([0]),
        )
