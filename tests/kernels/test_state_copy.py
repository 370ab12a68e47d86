import pytest
import torch

from sglang_k3.kernels.state_copy import state_copy
from sglang_k3.kernels.state_copy.cases import CASES, TOLERANCE, make_inputs
from tests.kit.ops import clone_pool, over_cases
from tests.kit.tolerance import assert_close


@over_cases(CASES)
def test_copies_each_slot_in_all_layers_and_nothing_else(case, device):
    inputs = make_inputs(case, device)
    (states,) = inputs.args
    after, expected = clone_pool(states), states.clone()
    state_copy(after, **inputs.kwargs)
    pairs = zip(inputs.kwargs["src_indices"].tolist(), inputs.kwargs["dst_indices"].tolist(), strict=True)
    for src, dst in pairs:
        for layer in range(case.layers if src >= 0 and dst >= 0 else 0):
            expected[layer, dst] = states[layer, src]
    assert_close(after, expected, TOLERANCE)


def test_a_source_may_serve_many():
    states = torch.randn(2, 5, 3)
    expected = states[:, :1].expand(2, 4, 3).clone()
    state_copy(states, src_indices=torch.zeros(4, dtype=torch.int32), dst_indices=torch.tensor([4, 2, 1, 3]))
    assert_close(states[:, 1:], expected, TOLERANCE)


def test_nan_travels_with_its_payload():
    bits = torch.tensor([[[0x7FC01234, -0x123456], [0, 0]]], dtype=torch.int32)
    states = bits.view(torch.float32)
    state_copy(states, src_indices=torch.tensor([0]), dst_indices=torch.tensor([1]))
    assert bits[0, 1].tolist() == [0x7FC01234, -0x123456]


def test_a_pool_without_a_layer_dimension_is_refused():
    with pytest.raises(ValueError, match=r"states has shape \(3, 4\), .* Add a dimension of one layer"):
        state_copy(torch.zeros(3, 4), src_indices=torch.tensor([0]), dst_indices=torch.tensor([1]))


def test_lists_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match=r"dst_indices has shape \(2,\), but \[B\] is needed with B=1"):
        state_copy(torch.zeros(1, 3, 4), src_indices=torch.tensor([0]), dst_indices=torch.tensor([1, 2]))
