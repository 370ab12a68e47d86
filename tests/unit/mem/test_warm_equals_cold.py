"""Whatever is reused, the answer is that of a model without a cache, and as much is reused as there can be (I8).

The answers are checked where a request ends, in ``Scheduler``: the fake model's state is an exact function of the
tokens that it absorbed, so a state of another depth gives another answer, or none.
"""

from __future__ import annotations

import itertools
import random
from array import array

import pytest

from sglang_k3.mem.limits import CheckpointLimits
from tests.kit.mem_scheduler import NO_KV, Scheduler, small_server

GRIDS = [*itertools.product([1, 16], [16, 64])]  # page size, tokens of a chunk
WHOLE = 2048  # a chunk that takes each of these prompts whole


@pytest.fixture(params=GRIDS, ids=lambda grid: f"page-{grid[0]}-chunk-{grid[1]}")
def server(request: pytest.FixtureRequest) -> Scheduler:
    page, chunk = request.param
    return small_server(page=page, chunk=chunk)


@pytest.fixture(params=[1, 16], ids=["page-1", "page-16"])
def whole(request: pytest.FixtureRequest) -> Scheduler:
    """Prompts are prefilled in one chunk each, so that states are kept at their ends and forks alone."""
    return small_server(page=request.param, chunk=WHOLE)


def ids(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3) for _ in range(length)]


def cached(server: Scheduler, *prompts: list[int]) -> list[int]:
    """Tokens that each prompt found cached, one request after the other."""
    counts = [server.serve(prompt).cached[0] for prompt in prompts]
    server.check()
    return counts


def forget_states(server: Scheduler) -> None:
    while server.cache.evict_state():
        pass


@pytest.mark.parametrize("length", [1, 2, 63, 65, 127, 129, 200, 300])
def test_an_exact_repeat(server: Scheduler, length: int):
    prompt = ids(length, seed=length)
    assert cached(server, prompt, prompt) == [0, (length - 1) // 64 * 64]


@pytest.mark.parametrize("grids", [1, 2, 4])
def test_an_aligned_repeat_hits_at_the_boundary_before(server: Scheduler, grids: int):
    """One token must stay to be computed, and there is no state one token before the end."""
    prompt = ids(64 * grids, seed=grids)
    assert cached(server, prompt, prompt) == [0, 64 * (grids - 1)]


@pytest.mark.parametrize("grids", [1, 2, 4])
def test_an_aligned_prompt_is_continued_from_its_end(server: Scheduler, grids: int):
    prompt = ids(64 * grids, seed=grids)
    assert cached(server, prompt, prompt + [1]) == [0, 64 * grids]


@pytest.mark.parametrize("grids", [1, 2, 4])
def test_an_aligned_prompt_of_one_chunk_leaves_both_states(whole: Scheduler, grids: int):
    prompt = ids(64 * grids, seed=grids)
    assert cached(whole, prompt, prompt, prompt + [1]) == [0, 64 * (grids - 1), 64 * grids]


def test_a_tail_of_one_token(server: Scheduler):
    prompt = ids(64 * 8 + 1, seed=3)
    lengths = [64 * k + 1 for k in range(1, 9)]
    cached(server, prompt)
    assert cached(server, *(prompt[:length] for length in lengths)) == [length - 1 for length in lengths]


def test_a_branch_replays_then_plants_then_hits(whole: Scheduler):
    trunk = ids(200, seed=1)
    branches = [trunk + ids(60, seed=seed) for seed in (2, 3, 4)]
    replayed_by_the_second = whole.num_prefilled
    assert cached(whole, *branches) == [0, 0, 192]
    assert whole.num_prefilled - replayed_by_the_second == 260 + 260 + 68
    assert whole.cache.counts.planted_forks == 1


def test_a_branch_between_chunks_finds_their_states(server: Scheduler):
    trunk = ids(200, seed=1)
    assert cached(server, *(trunk + ids(60, seed=seed) for seed in (2, 3, 4))) == [0, 192, 192]


def test_a_prompt_that_ends_inside_another_is_a_branch(whole: Scheduler):
    """What was cached as one long edge, cut by a match: the part above the cut has no state."""
    long = ids(300, seed=5)
    assert cached(whole, long, long[:150], long[:150], long[:140] + ids(9, seed=6)) == [0, 0, 128, 128]


def test_the_branch_s_own_end_is_kept_when_it_comes_again(whole: Scheduler):
    """A chunk leaves one inner state; where that was the fork, a repeat replays to the end and leaves that one."""
    trunk = ids(100, seed=1)
    branches = [trunk + ids(200, seed=seed) for seed in (2, 3)]
    assert cached(whole, *branches, branches[1], branches[1]) == [0, 0, 64, 256]


def test_an_answer_is_continued(server: Scheduler):
    prompt = ids(100, seed=5)
    first = server.serve(prompt, 200)
    turn = prompt + first.answer + ids(33, seed=6)
    # The answer went past 256 tokens, where a state is kept while decoding.
    assert cached(server, turn, turn) == [256, 320]


def test_the_last_state_of_a_long_answer_replaces_the_one_before(server: Scheduler):
    prompt = ids(10, seed=5)
    first = server.serve(prompt, 600)
    states = sorted(node.depth for node in server.tree.nodes() if node.checkpoint)
    assert states == [512]
    assert cached(server, prompt + first.answer) == [512]


@pytest.mark.parametrize("after", range(250, 262))
def test_an_answer_that_ends_around_a_boundary(server: Scheduler, after: int):
    """A step that was launched beyond the end leaves a state that nobody may have."""
    prompt = ids(240, seed=7)
    first = server.serve(prompt, after - len(prompt))
    history = prompt + first.answer
    assert len(history) == after
    depth = 256 if after >= 256 else 192
    assert cached(server, history + [1, 2, 3]) == [depth]


@pytest.mark.parametrize("after", range(185, 200))
@pytest.mark.parametrize("lag", [0, 1, 2])
def test_an_answer_that_ends_around_its_second_boundary(after: int, lag: int):
    """The state of the first is kept until that of the second is certain."""
    limits = CheckpointLimits(state_chunk=64, page_size=1, track_interval=64)
    server = Scheduler(limits, num_slots=8, num_pages=999, chunk=64, lag=lag)
    first = server.serve(ids(100, seed=7), after - 100)
    # Without an overlap the last token of an answer is never computed.
    depth = 192 if after > 192 or (after == 192 and lag) else 128
    assert sorted(node.depth for node in server.tree.nodes() if node.checkpoint) == [64, depth]
    assert cached(server, first.prompt + first.answer + [1]) == [depth]


def test_only_what_may_be_cached_is_matched(server: Scheduler):
    """A request that asks for the log-probs of its prompt computes it from where these begin."""
    prompt = ids(300, seed=15)
    cached(server, prompt)
    for num_usable, expected in ((0, 0), (63, 0), (64, 64), (200, 192), (299, 256), (300, 256)):
        lease = server.engine.admit("probe", None, prompt, num_usable=num_usable)
        assert lease.computed == expected
        server.engine.discard(lease, server.cache.kv_locs(lease.node, 0))
    server.check()


def test_kv_that_was_allocated_for_a_step_that_never_ran_is_not_cached(server: Scheduler):
    """And the length that was computed counts, not the length that there is room for."""
    prompt = ids(64, seed=16)
    lease = server.engine.admit("probe", None, prompt)
    kv_locs = server.kv.try_extend(NO_KV, 64)
    server.engine.finish(lease, kv_locs)
    assert server.tree.num_tokens == 0
    server.check()


def test_what_is_broken_is_forgotten(server: Scheduler):
    """Up to where another path needs it."""
    prompt = ids(300, seed=17)
    cached(server, prompt, prompt[:130] + ids(70, seed=18))
    deepest = max(server.tree.nodes(), key=lambda node: node.depth)
    server.cache.forget(deepest)
    server.check()
    assert cached(server, prompt) == [128]


def test_after_eviction_of_the_state_alone(server: Scheduler):
    prompt = ids(200, seed=8)
    cached(server, prompt)
    forget_states(server)
    match = server.cache.match(None, array("q", prompt[:-1]))
    assert (match.kv_depth, match.state_depth, match.fork_depth) == (192, 0, 192)


def test_after_eviction_of_the_state_the_gap_is_replayed_and_the_state_comes_back(server: Scheduler):
    prompt = ids(200, seed=8)
    cached(server, prompt)
    forget_states(server)
    before = server.num_prefilled
    assert cached(server, prompt, prompt) == [0, 192]
    assert server.num_prefilled - before == 200 + 8
    assert not any(node.checkpoint.is_fork for node in server.tree.nodes() if node.checkpoint)


def test_the_gap_below_a_surviving_state_is_replayed(server: Scheduler):
    prompt = ids(300, seed=9)
    cached(server, prompt[:130], prompt)
    for node in [*server.tree.nodes()]:
        if node.checkpoint and node.depth > 128:
            server.cache._drop_state(node, "by the test")
    before = server.num_prefilled
    assert cached(server, prompt) == [128]
    assert server.num_prefilled - before == 300 - 128


def test_after_eviction_of_all(server: Scheduler):
    prompt = ids(200, seed=10)
    cached(server, prompt)
    server.engine.evict_kv(10_000)
    assert server.tree.num_tokens == 0
    assert cached(server, prompt, prompt) == [0, 192]


def test_after_retraction_while_decoding(server: Scheduler):
    request = server.arrive("r", ids(150, seed=11), 60)
    while len(request.answer) < 30:
        server.step()
    server.retract(request)
    server.run()
    assert request.cached == [0, 128]
    assert cached(server, request.prompt + request.answer + [1]) == [128 + 64 * (150 + 30 >= 192)]


def test_after_retraction_while_prefilling(server: Scheduler):
    chunk = server.chunk
    request = server.arrive("r", ids(300, seed=12), 4)
    for _ in range(128 // chunk + 1):
        server.step()
    server.retract(request)
    server.run()
    assert request.cached == [0, 128]


@pytest.mark.covers("k3", "overlap", "chunks", "salt", "lora")
def test_salted_and_adapted_prompts_share_nothing(server: Scheduler):
    prompt = ids(200, seed=13)
    counts = [server.serve(prompt, namespace=namespace).cached for namespace in (None, "salt", "adapter", "salt")]
    assert counts == [[0], [0], [0], [192]]


def test_after_a_flush_with_requests_running(server: Scheduler):
    prompt = ids(200, seed=14)
    running = server.arrive("r", prompt, 30)
    while not running.answer:
        server.step()
    server.engine.flush()
    assert not any(node.checkpoint for node in server.tree.nodes())
    server.run()
    server.engine.flush()
    assert server.tree.num_tokens == 0
    assert cached(server, prompt, prompt) == [0, 192]


def test_prompts_prefilled_in_mixed_batches_of_random_budgets():
    """Chunks end anywhere, beside decoding requests: a state is kept at the depth that it has, or not at all."""
    for seed in range(6):
        rng = random.Random(seed)
        server = small_server(chunk=rng.choice([7, 33, 50, 100]), lag=rng.choice([0, 1, 2]))
        trunk = ids(150, seed=seed)
        for n in range(12):
            server.arrive(f"r{n}", trunk[: rng.randrange(150)] + ids(rng.randint(1, 120), seed=n), rng.randint(1, 30))
            for _ in range(rng.randrange(4)):
                server.chunk = rng.randint(1, 100)
                server.step()
                server.check()
        server.run()
        server.check()
