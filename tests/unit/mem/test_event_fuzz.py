"""A hundred thousand random events: the laws hold after each, every answer is right, and a failure shrinks.

Prompts share beginnings, pools are small, what is free is NaN, results come up to two steps late. After every event
slots and pages are recounted (I2), every cached state's own count of its tokens is held against its node (I1); the
forward pass holds it against the depth that it starts from, the donation against the depth that it is planted at.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import pytest

from sglang_k3.mem.checkpoint_policy import LRUPolicy
from sglang_k3.mem.checkpoints import EVICTED, SKIPPED, CheckpointCache
from sglang_k3.mem.engine import CheckpointEngine
from sglang_k3.mem.limits import CheckpointLimits
from sglang_k3.mem.policy_names import DEFAULT_POLICY, PolicyName
from tests.kit.event_fuzz import Event, Player, random_events, shortest_failing
from tests.kit.mem_scheduler import Scheduler

SEEDS, SEEDS_IN_CI, EVENTS = 50, 20, 2000


def server(seed: int, policy: PolicyName = DEFAULT_POLICY) -> Scheduler:
    """A server whose sizes are drawn, too; the grid is 4 tokens, so that little is computed."""
    rng = random.Random(seed)
    page = rng.choice([1, 2, 4])
    limits = CheckpointLimits(
        state_chunk=4, page_size=page, track_interval=8, checkpoints_per_path=rng.choice([1, 2, 8])
    )
    return Scheduler(
        limits,
        num_slots=rng.choice([4, 8, 13, 16]),
        num_pages=rng.choice([96, 112, 128]) // page,
        chunk=rng.choice([3, 4, 9, 16]),
        lag=rng.choice([0, 1, 2]),
        policy=policy,
    )


@pytest.mark.covers("k3", "overlap", "chunks", "pages", "retract", "abort", "flush", "salt", "session")
@pytest.mark.parametrize(
    "seed", [*range(SEEDS_IN_CI), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(SEEDS_IN_CI, SEEDS))]
)
def test_every_law_holds_after_every_event(seed: int):
    player = Player(server(seed))
    events = random_events(seed, EVENTS)
    try:
        player.play(events)
    except AssertionError as error:
        shortest = shortest_failing(events, lambda some: fails(seed, some))
        raise AssertionError(f"seed {seed}: {len(shortest)} events fail: {shortest}") from error
    assert player.finished > EVENTS // 50
    counts = player.scheduler.cache.counts
    assert counts.planted > EVENTS // 20 and counts.planted_forks and counts.evicted["for a slot"]
    assert {*counts.skipped} == {*SKIPPED} and {*counts.evicted} == {*EVICTED}
    assert counts.starts >= player.finished and counts.state_hits and counts.replayed_tokens
    assert counts.replayed_tokens <= counts.kv_only_tokens


@pytest.mark.parametrize("seed", range(6))
def test_every_law_holds_with_plain_lru(seed: int):
    player = Player(server(seed, "lru"))
    player.play(random_events(seed, EVENTS // 2))
    assert isinstance(player.scheduler.cache._policy, LRUPolicy)
    assert player.finished > EVENTS // 100 and player.scheduler.cache.counts.evicted["for a slot"]


def test_ranks_that_see_the_same_events_decide_alike():
    players = [Player(server(3)) for _ in range(2)]
    for player in players:
        player.play(random_events(3, 1000))
    first, second = (
        [repr(node) for node in player.scheduler.tree.nodes()] + [repr(player.scheduler.cache.counts)]
        for player in players
    )
    assert first == second and len(first) > 5


def fails(seed: int, events: Sequence[Event]) -> bool:
    try:
        Player(server(seed)).play(events)
    except Exception:  # whatever a mistake leads to
        return True
    return False


def a_leaked_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    """A superseded snapshot is forgotten, its slot with it."""
    monkeypatch.setattr(CheckpointEngine, "_drop_snapshot", lambda self, lease, old: lease.snapshots.remove(old))


def an_unprotected_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state that a request starts from may be evicted before it was copied."""
    monkeypatch.setattr(CheckpointCache, "lock_state", lambda self, node: None)
    monkeypatch.setattr(CheckpointCache, "unlock_state", lambda self, node: None)


def a_match_to_the_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left to compute."""
    match = CheckpointCache.match
    whole = array("q", [0])
    monkeypatch.setattr(CheckpointCache, "match", lambda self, namespace, ids: match(self, namespace, ids + whole))


def a_state_reused_at_the_kv_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    """One number for both: the KV hit is taken for a state hit."""
    match = CheckpointCache.match

    def confused(self, namespace, ids):
        found = match(self, namespace, ids)
        return found._replace(state_depth=self.limits.floor(found.kv_depth)) if found.state_depth else found

    monkeypatch.setattr(CheckpointCache, "match", confused)


MISTAKES = [a_leaked_snapshot, an_unprotected_source, a_match_to_the_last_token, a_state_reused_at_the_kv_depth]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_mistake_is_found_and_shrunk(mistake, monkeypatch: pytest.MonkeyPatch):
    mistake(monkeypatch)
    seed = next(seed for seed in range(20) if fails(seed, random_events(seed, 300)))
    shortest = shortest_failing(random_events(seed, 300), lambda some: fails(seed, some))
    assert len(shortest) <= 30, shortest
    monkeypatch.undo()
    assert not fails(seed, shortest)
