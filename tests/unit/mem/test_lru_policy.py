"""The least recently used goes first, of what is on offer."""

from __future__ import annotations

import random

import pytest

from sglang_k3.mem.checkpoint_policy import LRUPolicy
from sglang_k3.mem.radix_tree import Checkpoint, TreeNode, as_tokens
from sglang_k3.mem.state_slots import SlotId
from tests.kit.mem_scheduler import NO_KV


def node(node_id: int, used_at: int) -> TreeNode:
    checkpoint = Checkpoint(SlotId(node_id), is_fork=False, used_at=used_at)
    return TreeNode(node_id, None, as_tokens((1,)), NO_KV, 1, None, checkpoint=checkpoint, used_at=used_at)


@pytest.mark.parametrize("kind", ["state", "leaf"])
def test_victims_come_in_the_order_of_their_last_use(kind: str):
    """Against a sorted list, with offers renewed and withdrawn at random."""
    rng = random.Random(0)
    policy = LRUPolicy()
    offer, withdraw, victim = (
        getattr(policy, name) for name in (f"offer_{kind}", f"withdraw_{kind}", f"{kind}_victim")
    )
    nodes = [node(n, 0) for n in range(20)]
    on_offer: set[TreeNode] = set()
    for now in range(1, 3000):
        chosen = rng.choice(nodes)
        if rng.random() < 0.3:
            withdraw(chosen)
            on_offer.discard(chosen)
        else:
            chosen.used_at = chosen.checkpoint.used_at = now
            offer(chosen)
            on_offer.add(chosen)
        assert victim() is min(on_offer, key=lambda known: known.used_at, default=None)


def test_nothing_on_offer_is_no_victim():
    policy = LRUPolicy()
    assert (policy.state_victim(), policy.leaf_victim()) == (None, None)


def test_of_a_path_the_least_recently_used_makes_way():
    path = [node(0, 5), node(1, 3), node(2, 9)]
    assert LRUPolicy().path_victim(path) is path[1]


def test_renewed_offers_do_not_pile_up():
    policy = LRUPolicy()
    known = node(0, 0)
    for now in range(10_000):
        known.used_at = now
        policy.offer_leaf(known)
    assert len(policy._leaves._heap) < 100
