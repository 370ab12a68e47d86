"""The tree with its states and slots against a twin that writes every prefix out; hypothesis shrinks what differs."""

from __future__ import annotations

import collections
from array import array
from collections.abc import Sequence

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sglang_k3.mem.checkpoint_policy import CheckpointPolicy, LRUPolicy
from sglang_k3.mem.checkpoints import CheckpointCache, Snapshot
from sglang_k3.mem.limits import CheckpointLimits
from sglang_k3.mem.radix_tree import RadixTree, TreeNode
from sglang_k3.mem.replay_cost_policy import ReplayCostPolicy
from sglang_k3.mem.state_slots import SlotState, StateSlots
from sglang_k3.testing.cache_contest import K3_COST
from tests.kit.cache_twin import CacheTwin, Prefix
from tests.kit.mem_scheduler import NO_KV

GRID = 4
NUM_SLOTS = 5
NAMESPACES = st.sampled_from([None, "salt"])
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=14).map(tuple)
ALIGNED = st.lists(st.integers(0, 1), min_size=GRID, max_size=12).map(lambda ids: tuple(ids[: len(ids) // GRID * GRID]))


class Freed:
    """The KV pool: notes what comes back."""

    def __init__(self) -> None:
        self.locs: list[int] = []

    def free(self, kv_locs: torch.Tensor) -> None:
        self.locs += kv_locs.tolist()


class Told(ReplayCostPolicy):
    """Notes whom it names. That it names the right one is held against a plain computation elsewhere."""

    def __init__(self) -> None:
        super().__init__(K3_COST)
        self.victims: collections.deque[Prefix] = collections.deque()

    def state_victim(self) -> TreeNode | None:
        return self._noted(super().state_victim())

    def leaf_victim(self) -> TreeNode | None:
        return self._noted(super().leaf_victim())

    def path_victim(self, path: Sequence[TreeNode]) -> TreeNode:
        node = super().path_victim(path)
        self._noted(node)
        return node

    def _noted(self, node: TreeNode | None) -> TreeNode | None:
        if node is not None:
            self.victims.append(_prefix_of(node))
        return node


class CacheAndTwin(RuleBasedStateMachine):
    def policy(self) -> CheckpointPolicy:
        return LRUPolicy()

    @initialize(page_size=st.sampled_from([1, 2, 4]), cap=st.sampled_from([1, 2, 8]))
    def start(self, page_size: int, cap: int) -> None:
        limits = CheckpointLimits(state_chunk=GRID, page_size=page_size, track_interval=GRID, checkpoints_per_path=cap)
        self.slots, self.kv_pool = StateSlots(NUM_SLOTS), Freed()
        tree = RadixTree(page_size, NO_KV)
        policy = self.policy()
        self.cache = CheckpointCache(tree, self.slots, self.kv_pool, policy=policy, limits=limits)
        self.twin = CacheTwin(page_size=page_size, grid=GRID, cap=cap, num_slots=NUM_SLOTS)
        if isinstance(policy, Told):
            self.twin.told = policy.victims
        self.next_loc = 0
        self.locks: list[tuple[TreeNode, Prefix, bool]] = []

    @rule(namespace=NAMESPACES, tokens=ALIGNED, has_state=st.booleans(), is_fork=st.booleans())
    def insert(self, namespace, tokens, has_state, is_fork) -> None:
        slot = self.slots.try_alloc("r") if has_state else None
        assert (slot is not None) == (has_state and bool(self.twin.free_slots))
        snapshot = None
        if slot is not None:
            self.twin.free_slots.remove(slot)
            self.slots.written(slot, "r", state=SlotState.SNAPSHOT, depth=len(tokens))
            snapshot = Snapshot(slot, len(tokens), is_fork)
        locs = [*range(self.next_loc, self.next_loc + len(tokens))]
        self.next_loc += len(tokens)
        kv_locs = torch.tensor(locs)
        node = self.cache.insert(namespace, array("q", tokens), kv_locs, owned_from=0, snapshot=snapshot, owner="r")
        self.twin.insert(namespace, tokens, locs, 0, slot, is_fork)
        assert node.depth == len(tokens)

    @rule(namespace=NAMESPACES, tokens=TOKENS)
    def match(self, namespace, tokens) -> None:
        before = repr([*self.cache.tree.nodes()])
        found = self.cache.match(namespace, array("q", tokens[:-1]))
        assert (found.kv_depth, found.state_depth, found.fork_depth) == self.twin.match(namespace, tokens)
        locs = self.twin.locs_of(namespace, tokens[: found.state_depth])
        assert self.cache.kv_locs(found.node, 0).tolist() == locs
        assert repr([*self.cache.tree.nodes()]) == before

    @rule(namespace=NAMESPACES, tokens=TOKENS)
    def touch_and_lock(self, namespace, tokens) -> None:
        found = self.cache.match(namespace, array("q", tokens[:-1]))
        if not found.state_depth:
            return
        prefix = (namespace, tokens[: found.state_depth])
        self.cache.lock(found.node)
        self.cache.lock_state(found.node)
        self.cache.touch(found.node)
        self.twin.locks.append(prefix)
        self.twin.ends[prefix].state_locks += 1
        self.twin.touch(prefix)
        self.locks.append((found.node, prefix, True))

    @precondition(lambda self: self.locks)
    @rule(data=st.data())
    def unlock(self, data) -> None:
        node, prefix, has_state = self.locks.pop(data.draw(st.integers(0, len(self.locks) - 1)))
        if has_state:
            self.cache.unlock_state(node)
            self.twin.ends[prefix].state_locks -= 1
        self.cache.unlock(node)
        self.twin.locks.remove(prefix)

    @rule(data=st.data())
    def lock_kv_alone(self, data) -> None:
        nodes = sorted(self.cache.tree.nodes(), key=lambda node: node.node_id)
        if nodes:
            node = data.draw(st.sampled_from(nodes))
            prefix = _prefix_of(node)
            self.cache.lock(node)
            self.twin.locks.append(prefix)
            self.locks.append((node, prefix, False))

    @rule()
    def evict_state(self) -> None:
        assert self.cache.evict_state() == self.twin.evict_state()

    @rule(num_tokens=st.integers(1, 9))
    def evict_kv(self, num_tokens: int) -> None:
        assert self.cache.evict_kv(num_tokens) == self.twin.evict_kv(num_tokens)

    @invariant()
    def are_equal(self) -> None:
        if not hasattr(self, "cache"):
            return
        nodes = {_prefix_of(node): node for node in self.cache.tree.nodes()}
        assert nodes.keys() == self.twin.ends.keys()
        for prefix, node in nodes.items():
            end = self.twin.ends[prefix]
            state = node.checkpoint and (node.checkpoint.slot_id, node.checkpoint.is_fork, node.checkpoint.lock_ref)
            assert state == (None if end.state is None else (end.state, end.is_fork, end.state_locks))
            assert bool(node.lock_ref) == self.twin._is_protected(prefix)
        assert sorted(self.kv_pool.locs) == sorted(self.twin.freed)
        assert self.slots.num_free == len(self.twin.free_slots)
        assert not self.twin.told, "more was evicted than the twin has given up"
        self.cache.tree.check_invariants()
        self.slots.check_invariants()


def _prefix_of(node: TreeNode) -> Prefix:
    edges = [on_path.tokens.tolist() for on_path in node.path()]
    return node.namespace, tuple(token for edge in reversed(edges) for token in edge)


class CacheByCostAndTwin(CacheAndTwin):
    def policy(self) -> CheckpointPolicy:
        return Told()


TestCacheAndTwin = CacheAndTwin.TestCase
TestCacheByCostAndTwin = CacheByCostAndTwin.TestCase
TestCacheAndTwin.settings = settings(max_examples=150, stateful_step_count=40, deadline=None, derandomize=True)
TestCacheByCostAndTwin.settings = settings(TestCacheAndTwin.settings, max_examples=300)
