"""The traces have the statistics that they are named for (spec/algorithms.md 9 and 10)."""

from __future__ import annotations

import statistics

import pytest

from sglang_k3.mem.radix_tree import common_prefix
from sglang_k3.testing.cache_traces import TRACES, UNIT, Trace, Turn


@pytest.fixture(scope="module")
def traces() -> dict[str, Trace]:
    return {name: make() for name, make in TRACES.items()}


def tokens(ids) -> int:
    return len(ids) * UNIT


def turns_of(trace: Trace) -> list[Turn]:
    return [turn for session in trace.sessions for turn in session.turns]


def shared(one: Turn, other: Turn) -> int:
    return common_prefix(one.prompt, other.prompt, 0) * UNIT


def test_the_same_seed_gives_the_same_trace(traces: dict[str, Trace]):
    assert all(make() == traces[name] for name, make in TRACES.items())
    assert TRACES["T1"](99) != traces["T1"]


@pytest.mark.parametrize("name", TRACES)
def test_sessions_come_in_order_and_turns_continue_what_was_said(traces: dict[str, Trace], name: str):
    starts = [session.start_s for session in traces[name].sessions]
    assert starts == sorted(starts) and starts[0] >= 0
    assert len(traces[name].turns_in_order()) == len(turns_of(traces[name]))
    assert all(turn.prompt and turn.answer for turn in turns_of(traces[name]))


def test_chats_have_ten_turns_and_at_most_32k_tokens(traces: dict[str, Trace]):
    trace = traces["T1"]
    assert min(len(session.turns) for session in trace.sessions) >= 10
    assert max(tokens(turn.prompt) + tokens(turn.answer) for turn in turns_of(trace)) <= 32_000
    assert 200 <= statistics.median(tokens(turn.answer) for turn in turns_of(trace)) <= 250
    added = []
    for session in trace.sessions:
        for turn, following in zip(session.turns, session.turns[1:], strict=False):
            said = turn.prompt + turn.answer
            assert following.prompt[: len(said)] == said
            added.append(tokens(following.prompt) - tokens(said))
    assert 25 <= statistics.mean(added) <= 60  # the median is 30; a mean is what units of 16 tokens keep
    rate = len(trace.sessions) / trace.sessions[-1].start_s
    assert 0.25 <= rate <= 10
    # 90 words per minute: 30 tokens take 15 s.
    assert 12 <= statistics.median(turn.think_s for turn in turns_of(trace)) <= 18


def test_agents_share_their_system_prompt_rewrite_and_branch(traces: dict[str, Trace]):
    trace = traces["T2"]
    first = [session.turns[0] for session in trace.sessions]
    systems = sorted({shared(first[0], one) for one in first[1:] if shared(first[0], one)})
    assert len(systems) == 1 and 5_000 <= systems[0] <= 20_000
    assert all(1 <= len(session.turns) <= 100 for session in trace.sessions)
    assert statistics.median(len(session.turns) for session in trace.sessions) >= 50
    goes_on = rewrites = branches = 0
    for session in trace.sessions:
        for turn, following in zip(session.turns, session.turns[1:], strict=False):
            said = len(turn.prompt) + len(turn.answer)
            kept = common_prefix(turn.prompt + turn.answer, following.prompt, 0)
            goes_on += kept == said
            rewrites += kept * UNIT <= 20_000 and kept < said and len(following.prompt) * UNIT < kept * UNIT + 10_000
            branches += kept < said
    assert 0.05 <= branches / (goes_on + branches) <= 0.11  # 3 % and 5 %
    assert rewrites > 10
    assert max(tokens(turn.prompt) for turn in turns_of(trace)) <= 200_000
    assert 150 <= statistics.median(tokens(turn.answer) for turn in turns_of(trace)) <= 300


def test_single_turns_share_a_jittering_prefix(traces: dict[str, Trace]):
    turns = turns_of(traces["T3"])
    longest = max(turns, key=lambda turn: shared(turn, turns[0]) if turn is not turns[0] else 0)
    common = [max(shared(turn, longest), shared(turn, turns[0])) for turn in turns[1:] if turn is not longest]
    assert min(common) >= 4_850 and max(common) <= 5_216
    assert len(set(common)) > 10
    assert 5_500 <= statistics.mean(tokens(turn.prompt) for turn in turns) <= 6_500


def test_branches_leave_their_trunk_anywhere(traces: dict[str, Trace]):
    turns = turns_of(traces["T4"])
    trunks = [turn for turn in turns if tokens(turn.prompt) >= 39_984 and turns.index(turn) % 124 < 4]
    assert len(trunks) == 8
    depths = [max(shared(turn, trunk) for trunk in trunks) for turn in turns if turn not in trunks]
    assert len(depths) == 8 * 30
    quarters = statistics.quantiles(depths, n=4)
    assert quarters == pytest.approx([10_000, 20_000, 30_000], rel=0.15)


def test_groups_are_those_of_the_published_benchmark(traces: dict[str, Trace]):
    turns = turns_of(traces["T5"])
    groups: dict[int, list[Turn]] = {}
    for turn in turns:
        groups.setdefault(turn.prompt[0], []).append(turn)
    assert [len(group) for group in groups.values()] == [10] * 50
    assert all(shared(group[0], one) == 10_240 for group in groups.values() for one in group[1:])
    assert {tokens(turn.prompt) for turn in turns} <= {10_496, 10_512}
    assert {tokens(turn.answer) for turn in turns} <= {128, 144}


def test_random_requests_share_nothing(traces: dict[str, Trace]):
    turns = turns_of(traces["T6"])
    assert len({turn.prompt[0] for turn in turns}) == len(turns)
    assert {tokens(turn.prompt) for turn in turns} <= {8_192, 8_208}
    assert {tokens(turn.answer) for turn in turns} <= {1_024, 1_040}


def test_bursts_are_equal_prompts_at_one_moment(traces: dict[str, Trace]):
    moments: dict[float, list[Turn]] = {}
    for session in traces["T7"].sessions:
        moments.setdefault(session.start_s, []).extend(session.turns)
    assert all(
        2 <= len(burst) <= 8 and all(one.prompt == burst[0].prompt for one in burst) for burst in moments.values()
    )
    distinct = {tuple(burst[0].prompt) for burst in moments.values()}
    assert len(moments) == 60 and len(distinct) < 60


def test_the_mixture_aborts_and_retracts(traces: dict[str, Trace]):
    turns = turns_of(traces["T8"])
    assert 0.03 <= sum(turn.aborts_after_s is not None for turn in turns) / len(turns) <= 0.07
    assert 0.03 <= sum(turn.is_retracted for turn in turns) / len(turns) <= 0.07
    assert not any(turn.aborts_after_s is not None or turn.is_retracted for turn in turns_of(traces["T1"]))
