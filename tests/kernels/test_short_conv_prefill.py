import math
import random

import pytest
import torch

from sglang_k3.kernels.short_conv_decode import short_conv_decode
from sglang_k3.kernels.short_conv_prefill import short_conv_prefill
from sglang_k3.kernels.short_conv_prefill.cases import CASES, TOLERANCE, make_inputs
from tests.kit.compare import assert_bitwise
from tests.kit.ops import call_on_copy, clone_pool, over_cases
from tests.kit.tolerance import assert_close


def convolve(history, inputs, weight):
    """One channel: the outputs, in python floats."""
    line = [*history, *inputs]
    taps = len(weight)
    sums = [sum(weight[tau] * line[t + tau] for tau in range(taps)) for t in range(len(inputs))]
    return [y / (1 + math.exp(-y)) for y in sums]


@over_cases(CASES)
def test_equals_the_formula_channel_by_channel(case, device):
    inputs = make_inputs(case, device)
    (x, weight), pool, slots = inputs.args, inputs.kwargs["conv_states"], inputs.kwargs["cache_indices"].tolist()
    y, after = call_on_copy(short_conv_prefill, inputs, "conv_states")
    expected, expected_pool = torch.zeros(x.shape, dtype=torch.float64), pool.clone()
    begin = 0
    for b, (length, slot) in enumerate(zip(case.lens, slots, strict=True)):
        if slot >= 0:
            window = [[0.0] * case.channels] * (case.taps - 1) if b in case.fresh else pool[slot].tolist()
            line = window + x[begin : begin + length].tolist()
            for c in range(case.channels):
                column, history = [row[c] for row in line], case.taps - 1
                outputs = convolve(column[:history], column[history:], weight[c].tolist())
                expected[begin : begin + length, c] = torch.tensor(outputs, dtype=torch.float64)
            expected_pool[slot] = torch.tensor(line[length:])
            depth = int(inputs.kwargs["track_lens"][b]) if case.track else -1
            if depth >= 0:
                target = int(inputs.kwargs["track_indices"][b])
                expected_pool[target] = torch.tensor(line[depth : depth + case.taps - 1])
        begin += length
    assert_close(y, expected.to(case.dtype), TOLERANCE)
    assert_bitwise(after, expected_pool, "conv_states")


def one_sequence(length, *, has_initial_state, channels=6, taps=4, slots=3):
    """Inputs of one sequence in slot 1 of a pool whose other slots are NaN."""
    pool = torch.full((slots, taps - 1, channels), torch.nan)
    if has_initial_state:
        pool[1] = torch.randn(taps - 1, channels)
    return torch.randn(length, channels), torch.randn(channels, taps), pool


def extend(x, weight, pool, *, has_initial_state, track=None):
    return short_conv_prefill(
        x,
        weight,
        conv_states=pool,
        cu_seqlens=torch.tensor([0, x.shape[0]], dtype=torch.int32),
        cache_indices=torch.tensor([1]),
        has_initial_state=torch.tensor([has_initial_state]),
        track_lens=None if track is None else torch.tensor([track]),
        track_indices=None if track is None else torch.tensor([2]),
    )


@pytest.mark.parametrize("has_initial_state", [False, True])
@pytest.mark.parametrize("length", [1, 2, 3, 5, 17])
def test_a_snapshot_at_every_depth_is_the_state_after_exactly_that_many_tokens(length, has_initial_state):
    x, weight, pool = one_sequence(length, has_initial_state=has_initial_state)
    for depth in range(length + 1):
        tracked, stopped = clone_pool(pool), clone_pool(pool)
        extend(x, weight, tracked, has_initial_state=has_initial_state, track=depth)
        extend(x[:depth], weight, stopped, has_initial_state=has_initial_state)
        assert_bitwise(tracked[2], stopped[1], f"window after {depth} tokens")


@pytest.mark.parametrize("seed", range(5))
def test_a_prefill_split_anywhere_equals_one_prefill(seed):
    x, weight, pool = one_sequence(23, has_initial_state=False)
    whole_pool, split_pool = clone_pool(pool), clone_pool(pool)
    whole = extend(x, weight, whole_pool, has_initial_state=False)
    cuts = sorted(random.Random(seed).sample(range(24), 4))
    parts = [
        extend(x[begin:end], weight, split_pool, has_initial_state=begin > 0)
        for begin, end in zip([0, *cuts], [*cuts, 23], strict=True)
    ]
    assert_bitwise(torch.cat(parts), whole)
    assert_bitwise(split_pool, whole_pool, "conv_states")


def test_decode_continues_a_prefill_bit_for_bit():
    x, weight, pool = one_sequence(9, has_initial_state=True)
    decode_pool = clone_pool(pool)
    whole = extend(x, weight, pool, has_initial_state=True)
    for t in range(9):
        y = short_conv_decode(x[t : t + 1], weight, conv_states=decode_pool, cache_indices=torch.tensor([1]))
        assert_bitwise(y, whole[t : t + 1])
    assert_bitwise(decode_pool, pool, "conv_states")


def test_a_fresh_sequence_of_no_tokens_starts_from_zero_and_not_from_what_the_slot_held():
    x, weight, pool = one_sequence(0, has_initial_state=False)
    extend(x, weight, pool, has_initial_state=False, track=0)
    assert torch.equal(pool[1:], torch.zeros_like(pool[1:]))
    assert pool[0].isnan().all()


def test_one_track_argument_without_the_other_is_refused():
    inputs = make_inputs(CASES[1], "cpu")
    with pytest.raises(ValueError, match="track_lens and track_indices belong together, but track_indices is missing"):
        call_on_copy(short_conv_prefill, inputs, "conv_states", track_indices=None)


def test_a_pool_of_another_window_is_refused():
    inputs = make_inputs(CASES[1], "cpu")
    with pytest.raises(ValueError, match=r"conv_states has shape \(8, 2, 6\), but \[S, W-1, C\] is needed"):
        call_on_copy(short_conv_prefill, inputs, "conv_states", conv_states=torch.zeros(8, 2, 6))
