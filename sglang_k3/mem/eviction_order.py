"""Nodes in order of what they are worth, where the worth of whole groups changes at once.

A node's worth is ``weight of its group x its key``. The weights come with each question; the keys are kept in a heap
per group whose outdated entries are skipped. A question costs one look at each group that is not empty.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

from sglang_k3.mem.radix_tree import TreeNode

Group = TypeVar("Group", bound=Hashable)


class Worth(NamedTuple):
    """Compares as a node is ordered: by its worth, among equals the node made first."""

    worth: float
    node_id: int
    node: TreeNode


class EvictionOrder(Generic[Group]):
    """Every call O(log n), amortised, and O(groups) for ``first``."""

    def __init__(self) -> None:
        self._current: dict[TreeNode, tuple[Group, float]] = {}
        self._heaps: dict[Group, list[tuple[float, int, TreeNode]]] = {}
        self._sizes: dict[Group, int] = {}  # live entries per heap

    def __contains__(self, node: TreeNode) -> bool:
        return node in self._current

    def entry(self, node: TreeNode) -> tuple[Group, float] | None:
        """Its group and key; None if it is not in."""
        return self._current.get(node)

    def offer(self, node: TreeNode, group: Group, key: float) -> None:
        """Put a node in, or move it to another group or key."""
        if self._current.get(node) == (group, key):
            return
        self.withdraw(node)
        self._current[node] = (group, key)
        self._sizes[group] = self._sizes.get(group, 0) + 1
        heap = self._heaps.setdefault(group, [])
        heapq.heappush(heap, (key, node.node_id, node))
        if len(heap) > 2 * self._sizes[group] + 64:
            heap[:] = {entry[1]: entry for entry in heap if self._is_current(group, entry)}.values()
            heapq.heapify(heap)

    def withdraw(self, node: TreeNode) -> None:
        """No effect if it is not in."""
        old = self._current.pop(node, None)
        if old is None:
            return
        group = old[0]
        self._sizes[group] -= 1
        if not self._sizes[group]:
            del self._sizes[group], self._heaps[group]

    def first(self, weight: Callable[[Group], float]) -> Worth | None:
        """The node that is worth the least; None if there is none."""
        best: Worth | None = None
        for group, heap in self._heaps.items():
            while not self._is_current(group, heap[0]):
                heapq.heappop(heap)
            key, node_id, node = heap[0]
            found = Worth(weight(group) * key, node_id, node)
            if best is None or found[:2] < best[:2]:
                best = found
        return best

    def _is_current(self, group: Group, entry: tuple[float, int, TreeNode]) -> bool:
        return self._current.get(entry[2]) == (group, entry[0])
