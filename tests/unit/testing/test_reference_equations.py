"""The equations: check values of the fact sheet, and forms that must agree with the step-by-step one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sglang_k3.testing import equations


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(
    ("gate", "up", "value"), [(1, 1, 0.715817828), (-2, 3, -0.657873819), (10, 50, 95.108021534), (0, 5, 0.0)]
)
def test_situ_check_values(gate: float, up: float, value: float) -> None:
    got = equations.situ(*torch.tensor([gate, up], dtype=torch.float64), beta=4.0, linear_beta=25.0)
    assert float(got) == pytest.approx(value, abs=1e-9)


def test_situ_without_a_linear_cap_keeps_up() -> None:
    gate, up = torch.tensor([1.0]), torch.tensor([50.0])
    assert equations.situ(gate, up, beta=4.0, linear_beta=None) == 50 * equations.situ(
        gate, torch.ones(1), beta=4.0, linear_beta=None
    )


@pytest.mark.parametrize(
    ("a", "A_log", "dt", "value"), [(0, 0, 0, -2.5), (1, 0.5, -2, -0.806409242), (-3, 1, 0.25, -0.002833043)]
)
def test_decay_gate_check_values(a: float, A_log: float, dt: float, value: float) -> None:
    a_, A_, dt_ = (torch.tensor([x], dtype=torch.float64) for x in (a, A_log, dt))
    got = equations.log_decay(a_[None], A_, dt_[None], lower_bound=-5.0)
    assert float(got) == pytest.approx(value, abs=1e-9)


def test_a_log_is_per_head_and_dt_bias_per_channel() -> None:
    a, A_log, dt_bias = draw(2, 3), draw(2, seed=1), draw(2, 3, seed=2)
    whole = equations.log_decay(a, A_log, dt_bias, lower_bound=-5.0)
    for h in range(2):
        for c in range(3):
            one = equations.log_decay(a[h, c].view(1, 1), A_log[h : h + 1], dt_bias[h, c].view(1, 1), lower_bound=-5.0)
            assert torch.equal(one[0, 0], whole[h, c])


@pytest.mark.parametrize("length", [1, 2, 7, 16])
def test_recurrence_equals_the_chunk_form(length: int) -> None:
    """Fact sheet 3.3.5: one triangular solve gives what the steps give; K and V differ to catch a transposition."""
    K, V = 5, 3
    q, k = (equations.l2norm(draw(length, K, seed=s)) for s in (1, 2))
    v, g, beta = (
        draw(length, V, seed=3),
        -5 * torch.sigmoid(draw(length, K, seed=4)),
        torch.sigmoid(draw(length, seed=5)),
    )
    start = draw(K, V, seed=6)

    state, outputs = start[None], []
    for t in range(length):
        state, o = equations.delta_rule(state, q[t, None], k[t, None], v[t, None], g[t, None], beta[t, None])
        outputs.append(o[0])

    total = g.cumsum(0)
    decay = torch.exp(total[:, None] - total[None])
    A = torch.einsum("ic,jc,ijc->ij", k, k, decay).tril(-1) * beta[:, None]
    right = beta[:, None] * (v - (k * total.exp()) @ start)
    U = torch.linalg.solve_triangular(torch.eye(length, dtype=A.dtype) + A, right, upper=False, unitriangular=True)
    chunk_out = (q * total.exp()) @ start + torch.einsum("ic,jc,ijc->ij", q, k, decay).tril() @ U
    chunk_state = total[-1].exp()[:, None] * start + (k * torch.exp(total[-1] - total)).T @ U
    torch.testing.assert_close(torch.stack(outputs), chunk_out, rtol=0, atol=1e-12)
    torch.testing.assert_close(state[0], chunk_state, rtol=0, atol=1e-12)


def test_delta_rule_recalls_what_it_stored() -> None:
    k = equations.l2norm(draw(1, 4))
    v = draw(1, 3, seed=1)
    no_decay, full = torch.zeros(1, 4, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    state, out = equations.delta_rule(torch.zeros(1, 4, 3, dtype=torch.float64), k, k, v, no_decay, full)
    torch.testing.assert_close(out, v, rtol=1e-5, atol=0)
    rewritten, _ = equations.delta_rule(state, k, k, v, no_decay, full)
    torch.testing.assert_close(rewritten, state, rtol=1e-5, atol=1e-7)  # nothing left to correct


def test_short_conv_ends_at_the_current_token() -> None:
    window = torch.zeros(4, 2)
    window[3] = torch.tensor([2.0, -1.0])
    weight = torch.tensor([[9.0, 9.0, 9.0, 0.5], [9.0, 9.0, 9.0, 3.0]])
    torch.testing.assert_close(
        equations.short_conv(window, weight), torch.nn.functional.silu(torch.tensor([1.0, -3.0]))
    )


def test_depth_mix_with_zero_projection_is_the_mean_of_the_rows() -> None:
    rows = [draw(6, seed=s) for s in range(3)]
    mixed = equations.depth_mix(rows, norm_weight=draw(6, seed=9), proj=torch.zeros(6, dtype=torch.float64), eps=1e-5)
    torch.testing.assert_close(mixed, sum(rows) / 3)


def test_depth_mix_scores_normalised_rows_and_averages_raw_ones() -> None:
    small, large = draw(6), 100 * draw(6)
    mixed = equations.depth_mix(
        [small, large], norm_weight=torch.ones(6, dtype=torch.float64), proj=draw(6, seed=3), eps=0.0
    )
    torch.testing.assert_close(mixed, (small + large) / 2)  # equal directions score the same whatever their size


def test_attention_ignores_the_order_of_the_past() -> None:
    q, keys, values = draw(2, 5), draw(7, 2, 5, seed=1), draw(7, 2, 3, seed=2)
    order = torch.randperm(7, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        equations.softmax_attention(q, keys, values, scale=0.4),
        equations.softmax_attention(q, keys[order], values[order], scale=0.4),
    )


def test_explicit_attention_equals_the_absorbed_form() -> None:
    """Fact sheet 3.4: heads 2, nope 4, rope 3, value 5, latent 6."""
    w_uk, w_uv = draw(2, 4, 6, seed=1), draw(2, 5, 6, seed=2)
    latent, shared_key = draw(9, 6, seed=3), draw(9, 3, seed=4)
    q = draw(2, 7, seed=5)
    keys = torch.cat([torch.einsum("hdl,nl->nhd", w_uk, latent), shared_key[:, None].expand(9, 2, 3)], dim=-1)
    explicit = equations.softmax_attention(q, keys, torch.einsum("hvl,nl->nhv", w_uv, latent), scale=7**-0.5)
    q_latent = torch.einsum("hdl,hd->hl", w_uk, q[:, :4])
    probs = torch.softmax(7**-0.5 * (q_latent @ latent.T + q[:, 4:] @ shared_key.T), dim=-1)
    torch.testing.assert_close(torch.einsum("hvl,hl->hv", w_uv, probs @ latent), explicit)


def route(logits: list[float], bias: list[float], **changes: object) -> tuple[list[int], list[float]]:
    options = {"top_k": 2, "num_expert_group": 1, "topk_group": 1, "renormalize": True, "scaling_factor": 1.0}
    chosen, weights = equations.route(torch.tensor(logits), torch.tensor(bias), **(options | changes))
    return chosen, weights.tolist()


def test_bias_changes_the_choice_and_not_the_weights() -> None:
    logits = [2.0, 1.0, 0.0, -1.0]
    assert route(logits, [0.0] * 4, renormalize=False)[0] == [0, 1]
    chosen, weights = route(logits, [0.0, 0.0, 0.0, 5.0], renormalize=False)
    assert chosen == [3, 0]
    assert weights == torch.sigmoid(torch.tensor([-1.0, 2.0])).tolist()


def test_weights_sum_to_the_scaling_factor() -> None:
    _, weights = route([2.0, 1.0, 0.0], [0.0] * 3, scaling_factor=2.5)
    assert sum(weights) == pytest.approx(2.5)
    assert weights[0] > weights[1]


def test_ties_go_to_the_lower_expert() -> None:
    assert route([0.0] * 5, [0.0] * 5, top_k=3)[0] == [0, 1, 2]
    assert route([0.0, 1.0, 0.0, 1.0], [0.0] * 4, top_k=3)[0] == [1, 3, 0]


def test_only_experts_of_the_best_groups_are_chosen() -> None:
    """Group 0 holds the best expert, group 1 the best pair: the pair decides."""
    logits = [3.0, -9.0, -9.0, 1.0, 1.5, -9.0]
    assert route(logits, [0.0] * 6, num_expert_group=2, topk_group=1)[0] == [4, 3]
    assert route(logits, [0.0] * 6, num_expert_group=2, topk_group=2)[0] == [0, 4]
