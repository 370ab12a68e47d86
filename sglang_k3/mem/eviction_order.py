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


_Entry = tuple[float, int, TreeNode, Group]  # key, node id, node, group; in a heap they compare by the first two


class EvictionOrder(Generic[Group]):
    """Every call O(log n), amortised, and O(groups) for ``first``."""

    def __init__(self) -> None:
        self._current: dict[TreeNode, _Entry[Group]] = {}
        self._heaps: dict[Group, list[_Entry[Group]]] = {}
        self._sizes: dict[Group, int] = {}  # live entries per heap: those that are the current ones of their nodes

    def __contains__(self, node: TreeNode) -> bool:
        return node in self._current

    def entry(self, node: TreeNode) -> tuple[Group, float] | None:
        """Its group and key; None if it is not in."""
        entry = self._current.get(node)
        return None if entry is None else (entry[3], entry[0])

    def offer(self, node: TreeNode, group: Group, key: float) -> None:
        """Put a node in, or move it to another group or key."""
        old = self._current.get(node)
        if old is not None:
            if old[0] == key and old[3] == group:
                return
            self._leave(old[3])
        self._current[node] = entry = (key, node.node_id, node, group)
        size = self._sizes[group] = self._sizes.get(group, 0) + 1
        heap = self._heaps.setdefault(group, [])
        heapq.heappush(heap, entry)
        if len(heap) > 2 * size + 64:
            heap[:] = [entry for entry in heap if self._current.get(entry[2]) is entry]
            heapq.heapify(heap)

    def withdraw(self, node: TreeNode) -> None:
        """No effect if it is not in."""
        old = self._current.pop(node, None)
        if old is not None:
            self._leave(old[3])

    def first(self, weight: Callable[[Group], float]) -> Worth | None:
        """The node that is worth the least; None if there is none."""
        best: _Entry[Group] | None = None
        least = 0.0
        current = self._current
        for group, heap in self._heaps.items():
            entry = heap[0]
            while current.get(entry[2]) is not entry:
                heapq.heappop(heap)
                entry = heap[0]
            worth = weight(group) * entry[0]
            if best is None or worth < least or (worth == least and entry[1] < best[1]):
                best, least = entry, worth
        return None if best is None else Worth(least, best[1], best[2])

    def _leave(self, group: Group) -> None:
        self._sizes[group] -= 1
        if not self._sizes[group]:
            del self._sizes[group], self._heaps[group]
