import random

import pytest
import torch

from sglang_k3.kernels.kda_decode import kda_decode
from sglang_k3.kernels.kda_prefill import kda_prefill
from sglang_k3.kernels.kda_prefill.cases import CASES, TOLERANCE, inner_dtype, make_inputs
from tests.kit.compare import assert_bitwise
from tests.kit.kda_oracle import Head, chunked, prepared, recurrence
from tests.kit.ops import call_on_copy, clone_pool, fp64, over_cases
from tests.kit.tolerance import assert_close


@over_cases(CASES)
def test_equals_the_recurrence_in_fp64(case, device):
    inputs = make_inputs(case, device)
    pool, slots = inputs.kwargs["ssm_states"], inputs.kwargs["cache_indices"].tolist()
    o, after = call_on_copy(kda_prefill, inputs, "ssm_states")
    expected = torch.zeros(o.shape, dtype=torch.float64)
    states = {}
    begin = 0
    for b, (length, slot) in enumerate(zip(case.lens, slots, strict=True)):
        rows = slice(begin, begin + length)
        begin += length
        if slot < 0:
            continue
        for h in range(case.heads):
            head = prepared(Head(*fp64(*(x[rows, h] for x in inputs.args))), inputs.kwargs["scale"])
            start = torch.zeros(case.key_dim, case.value_dim).double()
            if b not in case.fresh:
                (start,) = fp64(pool[slot, h].T)
            expected[rows, h], visited = recurrence(head, start)
            states[slot, h] = visited[-1].T
            if case.track and inputs.kwargs["track_lens"][b] >= 0:
                states[int(inputs.kwargs["track_indices"][b]), h] = visited[int(inputs.kwargs["track_lens"][b])].T
    assert_close(o, expected.to(case.dtype), TOLERANCE, "output")
    for (slot, h), state_vk in states.items():
        what = f"state in slot {slot}, head {h}"
        assert_close(after[slot, h], state_vk.to(case.state_dtype), TOLERANCE, what, inner=inner_dtype(case))
    others = [slot for slot in range(pool.shape[0]) if (slot, 0) not in states]
    assert_bitwise(after[others], pool[others], "slots that nobody named")


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 63, 64, 65, 200])
@pytest.mark.parametrize("chunk", [16, 64])
def test_the_chunk_form_gives_the_same(length, chunk):
    """The oracle against itself in another form, and the op against that form."""
    tokens, pool = one_sequence(length, key_dim=12, value_dim=7, has_initial_state=True)
    head = prepared(Head(*(x[:, 0].double() for x in tokens)), 12**-0.5)
    start = pool[1, 0].T.double()
    outputs, states = recurrence(head, start)
    chunk_outputs, last = chunked(head, start, chunk)
    torch.testing.assert_close(chunk_outputs, outputs, rtol=0, atol=1e-13)
    torch.testing.assert_close(last, states[-1], rtol=0, atol=1e-13)
    o = extend(tokens, pool, has_initial_state=True)
    assert_close(o[:, 0], chunk_outputs.float(), TOLERANCE)
    assert_close(pool[1, 0], last.T.float(), TOLERANCE)


def one_sequence(length, *, has_initial_state, heads=2, key_dim=8, value_dim=5, slots=3):
    """q, k, v, g, beta of one sequence, and a pool in which slot 1 is its own and the rest is NaN."""
    pool = torch.full((slots, heads, value_dim, key_dim), torch.nan)
    if has_initial_state:
        pool[1] = torch.randn(heads, value_dim, key_dim)
    q, k, g = (torch.randn(length, heads, key_dim) for _ in range(3))
    return (q, k, torch.randn(length, heads, value_dim), -5 * g.sigmoid(), torch.rand(length, heads)), pool


def extend(tokens, pool, *, has_initial_state, track=None):
    return kda_prefill(
        *tokens,
        ssm_states=pool,
        cu_seqlens=torch.tensor([0, tokens[0].shape[0]], dtype=torch.int32),
        cache_indices=torch.tensor([1]),
        has_initial_state=torch.tensor([has_initial_state]),
        scale=tokens[0].shape[2] ** -0.5,
        track_lens=None if track is None else torch.tensor([track]),
        track_indices=None if track is None else torch.tensor([2]),
    )


@pytest.mark.parametrize("has_initial_state", [False, True])
@pytest.mark.parametrize("length", [1, 2, 17])
def test_a_snapshot_at_every_depth_is_the_state_after_exactly_that_many_tokens(length, has_initial_state):
    tokens, pool = one_sequence(length, has_initial_state=has_initial_state)
    for depth in range(length + 1):
        tracked, stopped = clone_pool(pool), clone_pool(pool)
        extend(tokens, tracked, has_initial_state=has_initial_state, track=depth)
        extend([x[:depth] for x in tokens], stopped, has_initial_state=has_initial_state)
        assert_bitwise(tracked[2], stopped[1], f"state after {depth} tokens")


@pytest.fixture
def by_the_reference(monkeypatch):
    """Triton works by chunks, so where a prefill begins changes its bits."""
    monkeypatch.setenv("K3PLUGIN_KERNELS", "reference")


@pytest.mark.usefixtures("by_the_reference")
@pytest.mark.parametrize("seed", range(5))
def test_a_prefill_split_anywhere_equals_one_prefill(seed):
    tokens, pool = one_sequence(29, has_initial_state=False)
    whole_pool, split_pool = clone_pool(pool), clone_pool(pool)
    whole = extend(tokens, whole_pool, has_initial_state=False)
    cuts = sorted(random.Random(seed).sample(range(30), 4))
    parts = [
        extend([x[begin:end] for x in tokens], split_pool, has_initial_state=begin > 0)
        for begin, end in zip([0, *cuts], [*cuts, 29], strict=True)
    ]
    assert_bitwise(torch.cat(parts), whole)
    assert_bitwise(split_pool, whole_pool, "ssm_states")


@pytest.mark.usefixtures("by_the_reference")
@pytest.mark.parametrize(("key_dim", "value_dim"), [(1, 1), (8, 5), (16, 16), (17, 33), (128, 128)])
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_decoding_token_by_token_gives_the_same_bits(batch, key_dim, value_dim):
    """I6, for any batch: every row of the batch is the same sequence."""
    tokens, pool = one_sequence(7, has_initial_state=True, key_dim=key_dim, value_dim=value_dim)
    decode_pool = pool[1].expand(batch, *pool[1].shape).clone()
    whole = extend(tokens, pool, has_initial_state=True)
    for t in range(7):
        rows = [x[t].expand(batch, *x[t].shape) for x in tokens]
        slots = torch.randperm(batch)
        o = kda_decode(*rows, ssm_states=decode_pool, cache_indices=slots, scale=key_dim**-0.5)
        assert_bitwise(o, whole[t].expand_as(o), f"output {t}")
    assert_bitwise(decode_pool, pool[1].expand_as(decode_pool), "ssm_states")


def test_a_fresh_sequence_of_no_tokens_starts_from_zero_and_not_from_what_the_slot_held():
    tokens, pool = one_sequence(0, has_initial_state=False)
    extend(tokens, pool, has_initial_state=False, track=0)
    assert torch.equal(pool[1:], torch.zeros_like(pool[1:]))
    assert pool[0].isnan().all()


def test_a_sequence_does_not_see_its_neighbours():
    inputs = make_inputs(CASES[4], "cpu")
    alone, _ = call_on_copy(kda_prefill, inputs, "ssm_states")
    inputs.args[2][: CASES[4].lens[0]] = torch.nan  # v of the first sequence
    beside_nan, _ = call_on_copy(kda_prefill, inputs, "ssm_states")
    assert_bitwise(beside_nan[CASES[4].lens[0] :], alone[CASES[4].lens[0] :])


def test_a_bf16_pool_is_rounded_once_per_extend():
    tokens, pool = one_sequence(9, has_initial_state=False)
    rounded_pool = pool.bfloat16()
    extend(tokens, pool, has_initial_state=False)
    extend(tokens, rounded_pool, has_initial_state=False)
    assert_bitwise(rounded_pool[1], pool[1].bfloat16())


def test_a_key_major_pool_is_refused():
    tokens, pool = one_sequence(2, has_initial_state=True, key_dim=8, value_dim=5)
    message = r"ssm_states has shape \(3, 2, 8, 5\), but \[S, H, V, K\] is needed with T=2, H=2, K=8, V=5"
    with pytest.raises(ValueError, match=message):
        extend(tokens, pool.transpose(2, 3), has_initial_state=True)


def test_one_track_argument_without_the_other_is_refused():
    inputs = make_inputs(CASES[1], "cpu")
    with pytest.raises(ValueError, match="track_lens and track_indices belong together, but track_lens is missing"):
        call_on_copy(kda_prefill, inputs, "ssm_states", track_lens=None)


@pytest.mark.parametrize("size", [0.0, 1e-4, 1e-3])
def test_vanishing_queries_and_keys_meet_the_epsilon_inside_the_root(size):
    tokens, pool = one_sequence(5, has_initial_state=True)
    tokens = (tokens[0] * size, tokens[1] * size, *tokens[2:])
    head = prepared(Head(*(x[:, 0].double() for x in tokens)), 8**-0.5)
    outputs, states = recurrence(head, pool[1, 0].T.double())
    o = extend(tokens, pool, has_initial_state=True)
    assert_close(o[:, 0], outputs.float(), TOLERANCE)
    assert_close(pool[1, 0], states[-1].T.float(), TOLERANCE)
