import math

import pytest
import torch

from sglang_k3.kernels import OpContext
from sglang_k3.kernels.attn_merge import attn_merge
from sglang_k3.kernels.mla_prefill import IMPLS, cases, mla_prefill
from sglang_k3.kernels.mla_prefill.cases import CASES, TOLERANCE, make_inputs
from tests.kit.compare import assert_bitwise
from tests.kit.ops import fp64, numerics_of, over_cases
from tests.kit.tolerance import assert_close


def attend(query, keys, values, scale):
    """One query of one head over the keys that it sees: output and log-sum-exp."""
    scores = [scale * float(query @ key) for key in keys]
    if not scores:
        return torch.zeros(values.shape[1], dtype=torch.float64), -math.inf
    largest = max(scores)
    gains = [math.exp(score - largest) for score in scores]
    return sum(g / sum(gains) * v for g, v in zip(gains, values, strict=True)), largest + math.log(sum(gains))


@over_cases(CASES)
def test_equals_softmax_query_by_query(case, device):
    inputs = make_inputs(case, device)
    out, lse = mla_prefill(*inputs.args, **inputs.kwargs)
    q, k, v = fp64(*inputs.args)
    if "k_shared" in inputs.kwargs:
        (shared,) = fp64(inputs.kwargs["k_shared"])
        k = torch.cat([k, shared.unsqueeze(1).expand(-1, case.heads, -1)], dim=-1)
    expected, expected_lse = torch.zeros(out.shape).double(), torch.zeros(lse.shape).double()
    begin_q = begin_k = 0
    for num_q, num_k in zip(case.lens_q, case.lens_k, strict=True):
        for i in range(num_q):
            seen = range(max(num_k - num_q + i + 1, 0)) if case.causal else range(num_k)
            keys = [begin_k + j for j in seen]
            for h in range(case.heads):
                row = begin_q + i, h
                expected[row], expected_lse[row] = attend(q[row], k[keys, h], v[keys, h], inputs.kwargs["scale"])
        begin_q, begin_k = begin_q + num_q, begin_k + num_k
    assert_close(out, expected.float(), numerics_of(cases, case), "output")
    assert_close(lse, expected_lse.float(), TOLERANCE, "lse")


def one_sequence(num_q, num_k, heads=2, key_dim=24, value_dim=16):
    return torch.randn(num_q, heads, key_dim), torch.randn(num_k, heads, key_dim), torch.randn(num_k, heads, value_dim)


def attention(q, k, v, *, causal, k_shared=None, scale=24**-0.5):
    lens = [torch.tensor([0, x.shape[0]], dtype=torch.int32) for x in (q, k)]
    lens = {"cu_seqlens_q": lens[0], "cu_seqlens_k": lens[1]}
    return mla_prefill(q, k, v, k_shared=k_shared, **lens, scale=scale, causal=causal)


def test_there_are_no_positions():
    """Permuting what lies before all queries changes nothing."""
    q, k, v = one_sequence(4, 20)
    order = torch.cat([torch.randperm(16), torch.arange(16, 20)])
    for a, b in zip(attention(q, k, v, causal=True), attention(q, k[order], v[order], causal=True), strict=True):
        assert_close(a, b, TOLERANCE)


@pytest.mark.parametrize("cut", [0, 1, 9, 16])
def test_prefix_and_extend_merge_to_the_whole(cut):
    q, k, v = one_sequence(4, 20)
    prefix = attention(q, k[:cut], v[:cut], causal=False)
    extend = attention(q, k[cut:], v[cut:], causal=True)
    for merged, whole in zip(attn_merge(*prefix, *extend), attention(q, k, v, causal=True), strict=True):
        assert_close(merged, whole, TOLERANCE)


def test_what_a_query_may_not_see_does_not_count():
    q, k, v = one_sequence(5, 5)
    before, _ = attention(q, k, v, causal=True)
    k[3:] = 1e4
    after, _ = attention(q, k, v, causal=True)
    assert_bitwise(after[:3], before[:3])


def test_queries_without_keys_give_zero_and_minus_infinity():
    q, k, v = one_sequence(5, 3)
    out, lse = attention(q, k, v, causal=True)
    assert (out[:2] == 0).all()
    assert (lse[:2] == -math.inf).all()
    assert lse[2:].isfinite().all()


def test_huge_scores_do_not_overflow():
    q, k, v = one_sequence(3, 3)
    out, lse = attention(q * 1e3, k * 1e3, v, causal=True)
    assert out.isfinite().all()
    assert lse.isfinite().all()


def test_channels_of_all_heads_come_apart_or_with_each():
    q, k, v = one_sequence(4, 20)
    k[:, :, 16:] = k[:, :1, 16:]
    whole = attention(q, k, v, causal=True)
    for apart, expected in zip(attention(q, k[:, :, :16], v, causal=True, k_shared=k[:, 0, 16:]), whole, strict=True):
        assert_close(apart, expected, TOLERANCE)


def test_shared_channels_of_another_count_are_refused():
    q, k, v = one_sequence(2, 4)
    with pytest.raises(ValueError, match=r"k_shared has shape \(3, 8\), but \[N, R\] is needed"):
        attention(q, k[:, :, :16], v, causal=True, k_shared=k[:3, 0, 16:])


def test_what_a_tile_cannot_hold_is_not_supported(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    triton_supports = IMPLS[0].supports
    for sizes in ({"K": 192, "V": 128}, {"K": 192, "R": 0}, {"K": 128, "R": 64, "V": 128}):
        assert triton_supports(OpContext(torch.device("cuda"), torch.bfloat16, sizes)) is None
    for sizes, says in (({"K": 193}, "K up to 192"), ({"K": 129, "R": 1}, "K up to 128"), ({"R": 65}, "R up to 64")):
        assert says in triton_supports(OpContext(torch.device("cuda"), torch.bfloat16, sizes))


def test_keys_without_heads_are_refused():
    q, k, v = one_sequence(2, 4)
    with pytest.raises(ValueError, match=r"k has shape \(4,\), but \[N, H, K\] is needed"):
        attention(q, k[:, 0, 0], v, causal=True)


def test_queries_of_other_channels_are_refused():
    q, k, v = one_sequence(2, 4)
    with pytest.raises(ValueError, match=r"q has 24 channels, but K=16 of k and R=0 of k_shared make 16"):
        attention(q, k[:, :, :16], v, causal=True)


def test_keys_and_values_of_different_counts_are_refused():
    q, k, v = one_sequence(2, 4)
    with pytest.raises(
        ValueError, match=r"v has shape \(3, 2, 16\), but \[N, H, V\] is needed with T=2, H=2, Q=24, N=4, K=24, R=0"
    ):
        attention(q, k, v[:3], causal=True)
