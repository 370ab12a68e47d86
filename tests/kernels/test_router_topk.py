import math

import pytest
import torch

from sglang_k3.kernels.router_topk import router_topk
from sglang_k3.kernels.router_topk.cases import CASES, TOLERANCE, make_inputs
from tests.kit.compare import assert_bitwise
from tests.kit.ops import over_cases
from tests.kit.tolerance import assert_close

PLAIN = {"renormalize": True, "scaling_factor": 1.0}


def route(x, weight, bias, *, top_k, renormalize, scaling_factor, num_expert_group, topk_group):
    """One token, in python floats: weights and ids, best first."""
    scores = [1 / (1 + math.exp(-sum(a * b for a, b in zip(x, row, strict=True)))) for row in weight]
    biased = [score + b for score, b in zip(scores, bias, strict=True)]
    size = len(scores) // num_expert_group
    groups = [range(i * size, (i + 1) * size) for i in range(num_expert_group)]
    groups.sort(key=lambda group: -sum(sorted((biased[e] for e in group), reverse=True)[:2]))
    eligible = [e for group in groups[:topk_group] for e in group]
    ids = sorted(eligible, key=lambda e: (-biased[e], e))[:top_k]
    chosen = [scores[e] for e in ids]
    total = sum(chosen) + 1e-20 if renormalize else 1.0
    return [score / total * scaling_factor for score in chosen], ids


@over_cases(CASES)
def test_equals_the_rule_token_by_token(case, device):
    (x, weight, bias), kwargs = make_inputs(case, device)
    topk_weights, topk_ids = router_topk(x, weight, bias, **kwargs)
    assert topk_weights.dtype == torch.float32
    assert topk_ids.dtype == torch.int32
    routed = [route(row, weight.tolist(), bias.tolist(), **kwargs) for row in x.tolist()]
    assert topk_ids.tolist() == [ids for _, ids in routed]
    expected = torch.tensor([weights for weights, _ in routed]).view(case.tokens, case.top_k)
    assert_close(topk_weights, expected, TOLERANCE)


def test_the_bias_changes_the_choice_but_not_the_weights():
    x, weight = torch.randn(6, 16), torch.randn(8, 16)
    bias = torch.zeros(8)
    bias[5] = 10.0
    all_weights, all_ids = router_topk(x, weight, torch.zeros(8), top_k=8, renormalize=False, scaling_factor=1.0)
    topk_weights, topk_ids = router_topk(x, weight, bias, top_k=2, renormalize=False, scaling_factor=1.0)
    assert (topk_ids[:, 0] == 5).all()
    assert_bitwise(topk_weights[:, 0], all_weights.gather(1, (all_ids == 5).int().argmax(1, keepdim=True))[:, 0])


def test_renormalised_weights_sum_to_the_scaling_factor():
    topk_weights, _ = router_topk(
        torch.randn(6, 16), torch.randn(8, 16), torch.zeros(8), top_k=3, renormalize=True, scaling_factor=2.5
    )
    torch.testing.assert_close(topk_weights.sum(1), torch.full((6,), 2.5))


@pytest.mark.parametrize("groups", [(1, 1), (4, 2)])
def test_ties_go_to_the_lower_expert(groups):
    _, topk_ids = router_topk(
        torch.zeros(3, 4),
        torch.randn(12, 4),
        torch.zeros(12),
        top_k=4,
        num_expert_group=groups[0],
        topk_group=groups[1],
        **PLAIN,
    )
    assert topk_ids.tolist() == [[0, 1, 2, 3]] * 3


def test_a_group_is_scored_by_its_two_best_experts_and_the_others_are_shut_out():
    """Group 0 has the single best expert, group 1 the best pair."""
    bias = torch.tensor([0.9, 0.0, 0.0, 0.6, 0.6, 0.0])
    _, topk_ids = router_topk(
        torch.zeros(1, 4), torch.zeros(6, 4), bias, top_k=3, num_expert_group=2, topk_group=1, **PLAIN
    )
    assert topk_ids.tolist() == [[3, 4, 5]]


def test_logits_are_not_rounded_to_the_run_dtype():
    """Two experts whose logits differ by less than bf16 can tell; the second is better."""
    x = torch.ones(1, 1, dtype=torch.bfloat16)
    _, topk_ids = router_topk(x, torch.tensor([[1.0], [1.0001]]), torch.zeros(2), top_k=1, **PLAIN)
    assert topk_ids.item() == 1


@pytest.mark.parametrize("groups", [(1, 1), (4, 2)])
def test_a_nan_row_gives_valid_ids_and_leaves_the_others_alone(groups):
    x, weight, bias = torch.randn(4, 16), torch.randn(12, 16), torch.randn(12)
    kwargs = {"top_k": 3, "num_expert_group": groups[0], "topk_group": groups[1], **PLAIN}
    clean_weights, clean_ids = router_topk(x, weight, bias, **kwargs)
    x[2] = torch.nan
    topk_weights, topk_ids = router_topk(x, weight, bias, **kwargs)
    others = [0, 1, 3]
    assert_bitwise(topk_ids[others], clean_ids[others])
    assert_bitwise(topk_weights[others], clean_weights[others])
    assert topk_weights[2].isnan().all()
    assert len(set(topk_ids[2].tolist()) & set(range(12))) == 3


def test_an_impossible_choice_is_refused():
    x, weight, bias = torch.randn(1, 4), torch.randn(8, 4), torch.zeros(8)
    with pytest.raises(ValueError, match="num_expert_group=3 must divide the 8 experts"):
        router_topk(x, weight, bias, top_k=1, num_expert_group=3, topk_group=1, **PLAIN)
    with pytest.raises(ValueError, match="top_k=5 must be 1 to 4, the experts of the kept groups"):
        router_topk(x, weight, bias, top_k=5, num_expert_group=4, topk_group=2, **PLAIN)
    with pytest.raises(ValueError, match="bias is torch.bfloat16, but float32 is needed"):
        router_topk(x, weight, bias.bfloat16(), top_k=1, **PLAIN)


def test_scores_that_all_vanish_give_weights_of_zero_and_not_nan():
    topk_weights, _ = router_topk(torch.ones(1, 1), torch.full((4, 1), -200.0), torch.zeros(4), top_k=2, **PLAIN)
    assert topk_weights.tolist() == [[0.0, 0.0]]


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 17, 300, 2047])
def test_tokens_of_k3_have_the_same_bits_in_batches_of_any_size(tokens, device):
    """Few tokens and many, 2048 and more, take different ways through the kernel."""
    x = torch.randn(2100, 7168, dtype=torch.bfloat16, device=device)
    weight = torch.randn(896, 7168, dtype=torch.bfloat16, device=device) * 7168**-0.5
    bias = torch.randn(896, device=device) * 0.1
    many = router_topk(x, weight, bias, top_k=16, **PLAIN)
    few = router_topk(x[:tokens], weight, bias, top_k=16, **PLAIN)
    for actual, expected in zip(few, many, strict=True):
        assert_bitwise(actual, expected[:tokens])
