"""All laws hold under random events with the policy that weighs replay cost, on pools of fixed sizes."""

from __future__ import annotations

import pytest

from sglang_k3.mem.replay_cost import ReplayCost
from sglang_k3.mem.replay_cost_policy import ReplayCostPolicy
from tests.kit import mem_scheduler
from tests.kit.event_fuzz import Player, random_events
from tests.unit.mem.test_event_fuzz import server

COST = ReplayCost(linear_flops=1000, pair_flops=1, state_bytes=100, kv_bytes=10)


@pytest.fixture(autouse=True)
def replay_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mem_scheduler, "LRUPolicy", lambda: ReplayCostPolicy(COST))


@pytest.mark.parametrize("seed", range(6))
def test_every_law_holds_after_every_event(seed: int):
    player = Player(server(seed))
    player.play(random_events(seed, 1000))
    assert isinstance(player.scheduler.cache._policy, ReplayCostPolicy)
    assert player.finished > 20
    assert player.scheduler.cache.counts.evicted["for a slot"]


def test_ranks_that_see_the_same_events_decide_alike():
    seen = []
    for _ in range(2):
        player = Player(server(3))
        player.play(random_events(3, 1000))
        seen.append([repr(node) for node in player.scheduler.tree.nodes()] + [repr(player.scheduler.cache.counts)])
    assert seen[0] == seen[1]
