"""The checkpoint cache once more, slow and obvious: every cached prefix is written out, nothing is shared or counted.

An *end* is a prefix at which a node ends, as ``(namespace, tokens)``. What is a parent, a leaf or protected is found by
comparing prefixes.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Hashable

Prefix = tuple[Hashable, tuple[int, ...]]


@dataclasses.dataclass
class End:
    used_at: int
    state: int | None = None  # its slot
    state_used_at: int = 0
    is_fork: bool = False
    state_locks: int = 0


class CacheTwin:
    def __init__(self, *, page_size: int, grid: int, cap: int, num_slots: int) -> None:
        self.page_size, self.grid, self.cap = page_size, grid, cap
        self.free_slots = set(range(num_slots))
        self.locs: dict[Prefix, list[int]] = {}  # of the last page of each cached prefix, itself whole pages
        self.ends: dict[Prefix, End] = {}
        self.locks: list[Prefix] = []
        self.freed: list[int] = []
        self.told: collections.deque[Prefix] | None = None  # what goes next, where the order is not LRU
        self._now = 0

    def match(self, namespace: Hashable, tokens: tuple[int, ...]) -> tuple[int, int, int | None]:
        usable = tokens[:-1]
        kv_depth = self.cached(namespace, usable)
        with_state = [
            len(end[1])
            for end, found in self.ends.items()
            if found.state is not None and self._begins((namespace, usable), end)
        ]
        state_depth = max(with_state, default=0)
        fork_depth = kv_depth // self.grid * self.grid
        return kv_depth, state_depth, fork_depth if fork_depth > state_depth else None

    def cached(self, namespace: Hashable, tokens: tuple[int, ...]) -> int:
        whole = range(0, len(tokens) + 1, self.page_size)
        return max(d for d in whole if d == 0 or (namespace, tokens[:d]) in self.locs)

    def insert(
        self, namespace: Hashable, tokens: tuple[int, ...], locs: list[int], owned_from: int,
        slot: int | None, is_fork: bool,
    ) -> None:  # fmt: skip
        cached = self.cached(namespace, tokens)
        self.freed += locs[owned_from:cached]
        for depth in range(cached, len(tokens), self.page_size):
            end = depth + self.page_size
            self.locs[namespace, tokens[:end]] = locs[depth:end]
        for depth in (cached, len(tokens)):
            if depth and (namespace, tokens[:depth]) not in self.ends:
                below = self._nearest_below((namespace, tokens[:depth]))
                self.ends[namespace, tokens[:depth]] = End(self.ends[below].used_at if below else 0)
        end = self.ends[namespace, tokens]
        self._now += 1
        end.used_at = self._now
        if slot is not None:
            self._plant((namespace, tokens), slot, is_fork)

    def touch(self, prefix: Prefix) -> None:
        self._now += 1
        end = self.ends[prefix]
        end.used_at = self._now
        if end.state is not None:
            end.state_used_at = self._now

    def evict_state(self) -> bool:
        unlocked = [p for p, end in self.ends.items() if end.state is not None and not end.state_locks]
        if not unlocked:
            return False
        self._drop_state(self._first(unlocked, lambda p: self.ends[p].state_used_at))
        return True

    def evict_kv(self, num_tokens: int) -> int:
        freed = 0
        while freed < num_tokens:
            leaves = [p for p in self.ends if not self._is_protected(p) and not self._has_longer(p)]
            if not leaves:
                break
            freed += self._drop_leaf(self._first(leaves, lambda p: self.ends[p].used_at))
        return freed

    def locs_of(self, namespace: Hashable, tokens: tuple[int, ...]) -> list[int]:
        ends = range(self.page_size, len(tokens) + 1, self.page_size)
        return [loc for end in ends for loc in self.locs[namespace, tokens[:end]]]

    def _first(self, candidates: list[Prefix], used_at: Callable[[Prefix], int]) -> Prefix:
        """Who goes: by LRU, or as told, if that one may go."""
        if self.told is None:
            return min(candidates, key=used_at)
        victim = self.told.popleft()
        assert victim in candidates, f"{victim} may not go, only {candidates}"
        return victim

    def _plant(self, prefix: Prefix, slot: int, is_fork: bool) -> None:
        end = self.ends[prefix]
        plain = [p for p in self._above(prefix) if self.ends[p].state is not None and not self.ends[p].is_fork]
        unlocked = [p for p in plain if not self.ends[p].state_locks]
        if end.state is not None:
            end.is_fork |= is_fork
            self.free_slots.add(slot)
        elif not is_fork and len(plain) >= self.cap and not unlocked:
            self.free_slots.add(slot)
        else:
            if not is_fork and len(plain) >= self.cap:
                self._drop_state(self._first(unlocked, lambda p: self.ends[p].state_used_at))
            end.state, end.is_fork, end.state_used_at = slot, is_fork, end.used_at

    def _drop_state(self, prefix: Prefix) -> None:
        end = self.ends[prefix]
        self.free_slots.add(end.state)
        end.state, end.is_fork = None, False

    def _drop_leaf(self, prefix: Prefix) -> int:
        if self.ends[prefix].state is not None:
            self._drop_state(prefix)
        namespace, tokens = prefix
        del self.ends[prefix]
        above = self._above(prefix)
        start = len(above[-1][1]) if above else 0
        for depth in range(start, len(tokens), self.page_size):
            self.freed += self.locs.pop((namespace, tokens[: depth + self.page_size]))
        return len(tokens) - start

    def _above(self, prefix: Prefix) -> list[Prefix]:
        """Proper ancestors, from the root down."""
        namespace, tokens = prefix
        return [(namespace, tokens[:d]) for d in range(1, len(tokens)) if (namespace, tokens[:d]) in self.ends]

    def _nearest_below(self, prefix: Prefix) -> Prefix | None:
        longer = [p for p in self.ends if p != prefix and self._begins(p, prefix)]
        return min(longer, key=lambda p: len(p[1]), default=None)

    def _has_longer(self, prefix: Prefix) -> bool:
        return any(p != prefix and self._begins(p, prefix) for p in self.ends)

    def _is_protected(self, prefix: Prefix) -> bool:
        return any(self._begins(lock, prefix) for lock in self.locks)

    @staticmethod
    def _begins(longer: Prefix, prefix: Prefix) -> bool:
        return longer[0] == prefix[0] and longer[1][: len(prefix[1])] == prefix[1]
