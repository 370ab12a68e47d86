"""Which state, and which leaf, goes first when room is needed.

The cache says what may go: it offers a node when nothing protects its state (or its leaf) any more, again whenever its
``used_at`` moves on, and withdraws it otherwise. The policy keeps the order. It sees token counts and logical time
only, so that every rank decides alike.
"""

from __future__ import annotations

import abc
import heapq
from collections.abc import Sequence
from typing import NamedTuple

from sglang_k3.mem.radix_tree import TreeNode


class Victim(NamedTuple):
    """What to give up: a leaf with its KV and its state, or a state alone."""

    node: TreeNode
    is_leaf: bool


class CheckpointPolicy(abc.ABC):
    """The order of eviction. Only nodes that are on offer may be returned; none of these calls evicts by itself."""

    @abc.abstractmethod
    def offer_state(self, node: TreeNode) -> None:
        """The state of ``node`` may be evicted, or its last use has changed."""

    @abc.abstractmethod
    def withdraw_state(self, node: TreeNode) -> None:
        """The state of ``node`` is protected, or gone. No effect if it is not on offer."""

    @abc.abstractmethod
    def offer_leaf(self, node: TreeNode) -> None:
        """``node`` may be removed with its KV and state, or its last use has changed."""

    @abc.abstractmethod
    def withdraw_leaf(self, node: TreeNode) -> None:
        """``node`` is protected, has children, or is gone. No effect if it is not on offer."""

    @abc.abstractmethod
    def state_victim(self) -> TreeNode | None:
        """Whose state to give up next."""

    @abc.abstractmethod
    def leaf_victim(self) -> TreeNode | None:
        """Which leaf to give up next."""

    @abc.abstractmethod
    def victim(self) -> Victim | None:
        """What to give up next where states and KV share their bytes."""

    @abc.abstractmethod
    def path_victim(self, path: Sequence[TreeNode]) -> TreeNode:
        """Whose state to give up so that a deeper one may be planted; ``path`` has at least one, all on offer."""


class LRUPolicy(CheckpointPolicy):
    """The least recently used first. A hit counts for the state that it restored, not for those above it."""

    def __init__(self) -> None:
        self._states = _LRUOrder()
        self._leaves = _LRUOrder()

    def offer_state(self, node: TreeNode) -> None:
        self._states.offer(node, _state_used_at(node))

    def withdraw_state(self, node: TreeNode) -> None:
        self._states.withdraw(node)

    def offer_leaf(self, node: TreeNode) -> None:
        self._leaves.offer(node, node.used_at)

    def withdraw_leaf(self, node: TreeNode) -> None:
        self._leaves.withdraw(node)

    def state_victim(self) -> TreeNode | None:
        return self._states.first()

    def leaf_victim(self) -> TreeNode | None:
        return self._leaves.first()

    def victim(self) -> Victim | None:
        state, leaf = self.state_victim(), self.leaf_victim()
        if leaf is not None and (state is None or leaf.used_at <= _state_used_at(state)):
            return Victim(leaf, is_leaf=True)
        return None if state is None else Victim(state, is_leaf=False)

    def path_victim(self, path: Sequence[TreeNode]) -> TreeNode:
        return min(path, key=lambda node: (_state_used_at(node), node.node_id))


def _state_used_at(node: TreeNode) -> int:
    assert node.checkpoint is not None, f"{node} has no state to order"
    return node.checkpoint.used_at


class _LRUOrder:
    """A heap whose outdated entries are skipped. Every call O(log n), amortised."""

    def __init__(self) -> None:
        self._current: dict[TreeNode, int] = {}
        self._heap: list[tuple[int, int, TreeNode]] = []

    def offer(self, node: TreeNode, used_at: int) -> None:
        if self._current.get(node) == used_at:
            return
        self._current[node] = used_at
        heapq.heappush(self._heap, (used_at, node.node_id, node))
        if len(self._heap) > 2 * len(self._current) + 64:
            self._heap = [(at, known.node_id, known) for known, at in self._current.items()]
            heapq.heapify(self._heap)

    def withdraw(self, node: TreeNode) -> None:
        self._current.pop(node, None)

    def first(self) -> TreeNode | None:
        while self._heap:
            used_at, _, node = self._heap[0]
            if self._current.get(node) == used_at:
                return node
            heapq.heappop(self._heap)
        return None
