"""The ledger: law I2, recounted from the things themselves.

free + tree + requests + in flight == total, for state slots and for KV pages, after every step. A slot that a forward
in flight will write belongs to the request of that forward, so that "in flight" needs no account of its own.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from sglang_k3.mem.checkpoints import TREE
from sglang_k3.mem.engine import CheckpointEngine
from sglang_k3.mem.state_slots import Owner, SlotId

if TYPE_CHECKING:
    from torch import Tensor


class Balance(NamedTuple):
    """One kind of thing, by where it is."""

    free: int
    tree: int
    requests: int


def check_slots(engine: CheckpointEngine) -> Balance:
    """Hold every state slot against the tree and the running requests; O(slots + nodes).

    Raises:
        AssertionError: names the first slot that is lost, shared or miscounted.
    """
    slots, tree = engine.cache.slots, engine.cache.tree
    slots.check_invariants()
    tree.check_invariants()
    expected: dict[SlotId, Owner] = {}
    num_protected = 0
    for node in tree.nodes():
        if node.checkpoint is not None:
            slot_id = node.checkpoint.slot_id
            assert slot_id not in expected, f"I3: {node} and another have state slot {slot_id}"
            assert slots.depth(slot_id) == node.depth, f"I1: {node} has a state of {slots.depth(slot_id)} tokens"
            expected[slot_id] = TREE
            num_protected += node.checkpoint.lock_ref > 0
    num_tree = len(expected)
    for lease in engine.leases:
        for slot_id in lease.slot_ids:
            assert slot_id not in expected, f"I3: {lease} and another have state slot {slot_id}"
            expected[slot_id] = lease
    owned = dict(slots.owned())
    assert owned == expected, f"I2: owned {owned}, found {expected}"
    counted, found = (engine.cache.num_states, engine.cache.num_protected_states), (num_tree, num_protected)
    assert counted == found, f"I2: {counted} states and protected ones, found {found}"
    balance = Balance(slots.num_free, num_tree, len(expected) - num_tree)
    assert sum(balance) == slots.size, f"I2: {balance} of {slots.size} state slots"
    return balance


def check_kv(engine: CheckpointEngine, *, num_pages: int, free_pages: Iterable[int], held: Iterable[Tensor]) -> Balance:
    """Hold every KV page against the tree and the requests; O(tokens).

    Args:
        free_pages: numbers of the pages that are free.
        held: KV locations of each running request behind the tree's part.
    Raises:
        AssertionError: gives the pages that are lost or shared.
    """
    page_size = engine.cache.tree.page_size
    free = [*free_pages]
    in_tree = [page for node in engine.cache.tree.nodes() for page in _pages(node.kv_locs, page_size)]
    in_requests = [page for kv_locs in held for page in _pages(kv_locs, page_size)]
    counts = collections.Counter([*free, *in_tree, *in_requests])
    shared = [page for page, count in counts.items() if count > 1]
    assert not shared, f"I3: KV pages {shared} have two owners"
    balance = Balance(len(free), len(in_tree), len(in_requests))
    assert sum(balance) == num_pages, f"I2: {balance} of {num_pages} KV pages"
    return balance


def _pages(kv_locs: Tensor, page_size: int) -> set[int]:
    return {loc // page_size for loc in kv_locs.tolist()}
