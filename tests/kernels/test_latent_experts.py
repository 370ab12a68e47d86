import math

import pytest
import torch

from sglang_k3.kernels.latent_experts import latent_experts
from sglang_k3.kernels.latent_experts.cases import CASES, TOLERANCE, Case, make_inputs
from sglang_k3.kernels.mxfp4_dequant import mxfp4_dequant
from tests.kit.compare import assert_bitwise
from tests.kit.ops import fp64, over_cases
from tests.kit.tolerance import assert_close


def situ(g, u, beta, linear_beta):
    up = u if linear_beta is None else linear_beta * math.tanh(u / linear_beta)
    return beta * math.tanh(g / beta) / (1 + math.exp(-g)) * up


@over_cases(CASES)
def test_equals_the_sum_choice_by_choice(case, device):
    """Each expert as three linears and an activation that round to the run dtype; the sum rounds once."""
    inputs = make_inputs(case, device)
    actual = latent_experts(*inputs.args, **inputs.kwargs)
    z, topk_weights, _, w13, w2 = inputs.args
    if case.packed:
        w13 = mxfp4_dequant(w13, inputs.kwargs["w13_scale"], dtype=case.dtype)
        w2 = mxfp4_dequant(w2, inputs.kwargs["w2_scale"], dtype=case.dtype)
    z, topk_weights, w13, w2 = fp64(z, topk_weights, w13, w2)
    begin, end = case.local or (0, case.experts)
    expected = torch.zeros(case.tokens, case.latent, dtype=torch.float64)
    for t, ids in enumerate(inputs.args[2].tolist()):
        for choice, expert in enumerate(ids):
            if begin <= expert < end:
                gate, up = (w13[expert - begin] @ z[t]).to(case.dtype).double().chunk(2)
                pairs = zip(gate.tolist(), up.tolist(), strict=True)
                hidden = torch.tensor([situ(g, u, 4.0, case.linear_beta) for g, u in pairs], dtype=torch.float64)
                output = (w2[expert - begin] @ hidden.to(case.dtype).double()).to(case.dtype).double()
                expected[t] += topk_weights[t, choice] * output
    assert_close(actual, expected.to(case.dtype), TOLERANCE)


def whole(experts=8, top_k=3, tokens=7):
    ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)]).int()
    args = (
        torch.randn(tokens, 16),
        torch.rand(tokens, top_k),
        ids,
        torch.randn(experts, 24, 16),
        torch.randn(experts, 16, 12),
    )
    return args, {"beta": 4.0, "linear_beta": 25.0}


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_ranks_add_up_to_the_whole(ranks):
    (z, topk_weights, topk_ids, w13, w2), kwargs = whole()
    per_rank = 8 // ranks
    parts = [
        latent_experts(z, topk_weights, topk_ids, w13[begin : begin + per_rank], w2[begin : begin + per_rank],
                       expert_offset=begin, **kwargs)
        for begin in range(0, 8, per_rank)
    ]  # fmt: skip
    assert_close(sum(parts), latent_experts(z, topk_weights, topk_ids, w13, w2, **kwargs), TOLERANCE)


def test_experts_that_no_token_chose_are_not_looked_at():
    (z, topk_weights, topk_ids, w13, w2), kwargs = whole()
    topk_ids = topk_ids.clamp(max=5)
    clean = latent_experts(z, topk_weights, topk_ids, w13, w2, **kwargs)
    w13[6:], w2[6:] = torch.nan, torch.nan
    assert_bitwise(latent_experts(z, topk_weights, topk_ids, w13, w2, **kwargs), clean)


def test_a_token_without_local_experts_gives_zero():
    (z, topk_weights, topk_ids, w13, w2), kwargs = whole()
    topk_ids[2] = -1
    z[2] = torch.nan
    out = latent_experts(z, topk_weights, topk_ids, w13, w2, **kwargs)
    assert (out[2] == 0).all()
    assert out.isfinite().all()


def test_the_weight_is_applied_to_the_finished_expert():
    """SiTU saturates, so a weight anywhere before it would not scale the output."""
    (z, topk_weights, topk_ids, w13, w2), kwargs = whole(top_k=1)
    out = latent_experts(100 * z, topk_weights, topk_ids, w13, w2, **kwargs)
    unit = latent_experts(100 * z, torch.ones_like(topk_weights), topk_ids, w13, w2, **kwargs)
    assert_bitwise(out, topk_weights * unit)


@pytest.mark.parametrize(
    ("device", "experts"), [("cpu", 2), *(pytest.param("cuda", n, marks=pytest.mark.gpu) for n in (2, 16, 64))]
)
def test_the_bits_of_a_row_depend_on_no_other_row(device, experts):
    """Blocks of several sizes and a row's place in them leave no trace.

    The 168 rows of one expert make a block of 128 and one of 40 in 64; one of 128, one of 32 and 8 in 32; five of 32
    and one of 8: by how many choices an expert has on average.
    """
    case = Case(tokens=172, latent=512, width=512, experts=experts, top_k=1, packed=True, dtype=torch.bfloat16)
    inputs = make_inputs(case, device)
    z, topk_weights, topk_ids, *weights = inputs.args
    z[:], topk_weights[:], topk_ids[:] = z[:1].clone(), topk_weights[:1].clone(), 1
    topk_ids[5:9] = 0
    out = latent_experts(z, topk_weights, topk_ids, *weights, **inputs.kwargs)
    same = torch.cat([out[:5], out[9:]])
    assert_bitwise(same, same[:1].expand_as(same))


def test_packed_weights_need_their_scales():
    inputs = make_inputs(next(case for case in CASES if case.packed), "cpu")
    with pytest.raises(ValueError, match="w13_scale and w2_scale belong together, but w2_scale is missing"):
        latent_experts(*inputs.args, **{**inputs.kwargs, "w2_scale": None})
    with pytest.raises(ValueError, match=r"w13 has shape .* but \[E, 2I, L\] is needed"):
        latent_experts(*inputs.args, **{**inputs.kwargs, "w2_scale": None, "w13_scale": None})


def test_weights_of_another_dtype_are_refused():
    (z, topk_weights, topk_ids, w13, w2), kwargs = whole()
    with pytest.raises(ValueError, match="w13 is torch.bfloat16, but float32 is needed"):
        latent_experts(z, topk_weights, topk_ids, w13.bfloat16(), w2, **kwargs)
