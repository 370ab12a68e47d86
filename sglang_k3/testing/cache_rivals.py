"""The others: every_chunk_lru, sglang, marconi, oracle. Same engine, slots, grid and bytes; each with its own rules.

What all get from the engine, although their originals have less: requests that come together compute a shared prefix
once, states and KV share one budget, and a leaf whose state is gone goes first, since nothing can start from it.

    every_chunk_lru   a state at the end of each prefill chunk and at the last interval of the answer; the least
                      recently used state or leaf goes
    sglang            the same, and at the fork where KV is cached deeper than a state (SGLang 0.5.16: one per chunk,
                      the fork before the chunk's end); a hit touches all states of its path
    marconi           arXiv 2411.19379: a state at the fork and one at the end of the answer; candidates are nodes with
                      at most one child; the least of  norm(1 / age) + alpha x norm(FLOPs saved / bytes freed)
    oracle            knows the trace: plants what will be restored, gives up what will be restored furthest ahead
"""

from __future__ import annotations

import abc
import bisect
import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from sglang_k3.mem.checkpoint_policy import CheckpointPolicy, LRUPolicy, Victim
from sglang_k3.mem.checkpoints import CheckpointCache, KVPool, Snapshot
from sglang_k3.mem.engine import CheckpointEngine
from sglang_k3.mem.lease import Lease, StepPlan
from sglang_k3.mem.radix_tree import TreeNode
from sglang_k3.mem.replay_cost import ReplayCost
from sglang_k3.mem.state_moves import StateMoves
from sglang_k3.testing.cache_future import NEVER, Future, chain
from sglang_k3.testing.cache_simulator import GRID, UnifiedCache

if TYPE_CHECKING:
    from torch import Tensor

BELOW: Final = 64  # nodes looked at below one that changes


class GarbageFirstLRU(LRUPolicy):
    """The least recently used state or leaf; before all, leaves without a state."""

    def offer_leaf(self, node: TreeNode) -> None:
        self._leaves.offer(node, 0 if node.checkpoint is None else node.checkpoint.used_at)

    def withdraw_state(self, node: TreeNode) -> None:
        super().withdraw_state(node)
        if node.checkpoint is None and node.is_evictable_leaf:
            self.offer_leaf(node)

    def offer_state(self, node: TreeNode) -> None:
        super().offer_state(node)
        if node.is_evictable_leaf:
            self.offer_leaf(node)

    def victim(self) -> Victim | None:
        state, leaf = self.state_victim(), self.leaf_victim()
        if leaf is not None and (state is None or _used_at(leaf) <= _used_at(state)):
            return Victim(leaf, is_leaf=True)
        return None if state is None else Victim(state, is_leaf=False)


def _used_at(node: TreeNode) -> int:
    return 0 if node.checkpoint is None else node.checkpoint.used_at


class OneSnapshotEngine(CheckpointEngine, abc.ABC):
    """At most one state per chunk: where others wait for one, else at ``_depth``."""

    def plan_extend(self, lease: Lease, end: int) -> StepPlan:
        inside = range(lease.computed + 1, end + 1)
        awaited = [depth for depth in lease.wanted if depth in inside]
        depth = max(awaited) if awaited else self._depth(lease, end)
        self._note(lease, depth, is_awaited=bool(awaited))
        if depth not in inside:
            return StepPlan(lease, lease.computed, end)
        snapshot = self._plan_snapshot(lease, depth)
        where = "at_end" if depth == end else "inner"
        return StepPlan(lease, lease.computed, end, **{where: snapshot})

    @abc.abstractmethod
    def _depth(self, lease: Lease, end: int) -> int:
        """Where in the chunk that ends at ``end`` a state is kept that nobody waits for; outside of it for none."""

    def _note(self, lease: Lease, depth: int, *, is_awaited: bool) -> None:
        """For those who treat such states apart."""


class ChunkEndEngine(OneSnapshotEngine):
    def _depth(self, lease: Lease, end: int) -> int:
        return self._limits.floor(end)


class SGLangEngine(OneSnapshotEngine):
    def _depth(self, lease: Lease, end: int) -> int:
        fork = lease.match.fork_depth
        return fork if fork is not None and lease.computed < fork <= end else self._limits.floor(end)


class PathTouchCache(UnifiedCache):
    """A hit counts for every state above it, too."""

    def touch(self, node: TreeNode) -> None:
        for above in reversed([*node.path()]):
            uses = above.checkpoint.uses if above.checkpoint else 0
            super().touch(above)
            if above is not node and above.checkpoint is not None:
                above.checkpoint.uses = uses


class MarconiEngine(OneSnapshotEngine):
    """A state at the fork, and the deepest of the rest when the request ends."""

    def __init__(self, cache: CheckpointCache, moves: StateMoves, kv_pool: KVPool) -> None:
        super().__init__(cache, moves, kv_pool)
        self._awaited: set[tuple[Lease, int]] = set()

    def _note(self, lease: Lease, depth: int, *, is_awaited: bool) -> None:
        if is_awaited:
            self._awaited.add((lease, depth))

    def discard(self, lease: Lease, kv_locs: Tensor) -> None:
        super().discard(lease, kv_locs)
        self._awaited = {awaited for awaited in self._awaited if awaited[0] is not lease}

    def _depth(self, lease: Lease, end: int) -> int:
        fork = lease.match.fork_depth
        if fork is not None and lease.match.diverges and lease.computed < fork <= end:
            return fork
        return self._limits.floor(end) if end == lease.prefill_end else 0

    def donate(self, lease: Lease, kv_locs: Tensor) -> Tensor:
        held = [snapshot for snapshot in lease.snapshots if not self._is_due(lease, snapshot)]
        lease.snapshots = [snapshot for snapshot in lease.snapshots if snapshot not in held]
        moved = super().donate(lease, kv_locs)
        lease.snapshots = held
        return moved

    def finish(self, lease: Lease, kv_locs: Tensor, *, session: str | None = None) -> None:
        certain = min(len(kv_locs), len(lease.tokens), lease.computed)
        leaves = [one for one in lease.snapshots if not self._is_due(lease, one) and one.depth <= certain]
        for shallower in leaves[:-1]:
            self._drop_snapshot(lease, shallower)
        super().finish(lease, kv_locs, session=session)

    def _is_due(self, lease: Lease, snapshot: Snapshot) -> bool:
        """Whether it is not the leaf's: a fork's, or one that others wait for."""
        is_fork = snapshot.is_fork or snapshot.depth == lease.match.fork_depth
        return is_fork or (lease, snapshot.depth) in self._awaited


class MarconiPolicy(CheckpointPolicy):
    """Utility over arrays of the candidates, normalised anew for each victim.

    Args:
        alpha: weight of the FLOPs saved per byte; set anew by the tuning.
    """

    def __init__(self, cost: ReplayCost, *, alpha: float = 0.0) -> None:
        self.alpha = alpha
        self._cost = cost
        self._rows: dict[TreeNode, int] = {}
        self._nodes: list[TreeNode | None] = []
        self._free: list[int] = []
        self._used_at = np.zeros(0)
        self._efficiency = np.zeros(0)
        self._states: dict[TreeNode, None] = {}
        self._leaves: dict[TreeNode, None] = {}
        self._garbage: list[tuple[int, int, TreeNode]] = []
        self._now = 0

    def offer_state(self, node: TreeNode) -> None:
        self._states[node] = None
        self._refresh(node)

    def withdraw_state(self, node: TreeNode) -> None:
        self._states.pop(node, None)
        self._refresh(node)
        self._refresh_below(node)

    def offer_leaf(self, node: TreeNode) -> None:
        self._leaves[node] = None
        self._refresh(node)

    def withdraw_leaf(self, node: TreeNode) -> None:
        self._leaves.pop(node, None)
        self._refresh(node)
        self._refresh_below(node)

    def victim(self) -> Victim | None:
        while self._garbage:
            node = self._garbage[0][2]
            if node in self._leaves and node.checkpoint is None:
                return Victim(node, is_leaf=True)
            heapq.heappop(self._garbage)
        if self._rows:
            recency = 1 / (self._now + 1 - self._used_at)
            utility = _normalised(recency) + self.alpha * _normalised(self._efficiency)
            least = self._nodes[int(np.nanargmin(utility))]
            assert least is not None
            return Victim(least, is_leaf=least in self._leaves)
        # Only forks are left: the published rule has no answer, and so the oldest goes.
        fork = min(self._states, key=lambda node: (_used_at(node), node.node_id), default=None)
        return None if fork is None else Victim(fork, is_leaf=fork in self._leaves)

    def state_victim(self) -> TreeNode | None:
        return min(self._states, key=lambda node: (_used_at(node), node.node_id), default=None)

    def leaf_victim(self) -> TreeNode | None:
        return min(self._leaves, key=lambda node: (node.used_at, node.node_id), default=None)

    def path_victim(self, path: Sequence[TreeNode]) -> TreeNode:
        return min(path, key=lambda node: (_used_at(node), node.node_id))

    def _refresh(self, node: TreeNode) -> None:
        self._now = max(self._now, node.used_at)
        if node in self._leaves and node.checkpoint is None:
            heapq.heappush(self._garbage, (node.used_at, node.node_id, node))
        is_candidate = node.checkpoint is not None and (
            node in self._leaves or (node in self._states and len(node.children) == 1)
        )
        if is_candidate:
            row = self._rows.get(node)
            if row is None:
                row = self._rows[node] = self._new_row()
                self._nodes[row] = node
            self._used_at[row], self._efficiency[row] = _used_at(node), self._flops_per_byte(node)
        elif node in self._rows:
            row = self._rows.pop(node)
            self._nodes[row] = None
            self._used_at[row] = self._efficiency[row] = np.nan
            self._free.append(row)

    def _new_row(self) -> int:
        if not self._free:
            size = len(self._nodes)
            self._free = [*range(2 * size + 63, size - 1, -1)]
            self._nodes += [None] * len(self._free)
            more = np.full(len(self._free), np.nan)
            self._used_at, self._efficiency = (np.concatenate([old, more]) for old in (self._used_at, self._efficiency))
        return self._free.pop()

    def _refresh_below(self, node: TreeNode) -> None:
        stack, budget = [*node.children.values()], BELOW
        while stack and budget:
            below = stack.pop()
            budget -= 1
            if below in self._rows:
                self._refresh(below)
            elif below.checkpoint is None and len(below.children) == 1:
                stack.extend(below.children.values())

    def _flops_per_byte(self, node: TreeNode) -> float:
        """Against the parent in Marconi's tree, where a node without a state and with one child does not exist."""
        above = node.parent
        assert above is not None
        while above.parent is not None and above.checkpoint is None and len(above.children) == 1:
            above = above.parent
        freed = self._cost.state_bytes
        if node in self._leaves:
            freed += self._cost.kv_bytes * (node.depth - above.depth)
        return self._cost.replay_flops(above.depth, node.depth) / freed


def _normalised(values: np.ndarray) -> np.ndarray:
    low, high = np.nanmin(values), np.nanmax(values)
    return np.where(np.isnan(values), np.nan, 0.0) if low == high else (values - low) / (high - low)


def oracle(future: Future) -> tuple[type[CheckpointEngine], type[CheckpointPolicy]]:
    """Its planting and its evicting, bound to what will come."""

    class Engine(CheckpointEngine):
        def plan_extend(self, lease: Lease, end: int) -> StepPlan:
            inside = range(lease.computed + 1, end)
            due = {depth: _next_restore(lease, depth) for depth in inside if depth % self._limits.grid == 0}
            awaited = [depth for depth in lease.wanted if depth in inside]
            inner = max(awaited) if awaited else min(due, key=lambda depth: due[depth], default=None)
            if not awaited and inner is not None and due[inner] == NEVER:
                inner = None
            at_end = end if end % self._limits.grid == 0 and _next_restore(lease, end) < NEVER else None
            plans = {"inner": self._plan_snapshot(lease, inner), "at_end": self._plan_snapshot(lease, at_end)}
            return StepPlan(lease, lease.computed, end, **plans)

        def plan_decode(self, lease: Lease) -> StepPlan:
            end = lease.computed + 1
            is_due = end % self._limits.track_interval == 0 and _next_restore(lease, end) < NEVER
            return StepPlan(lease, lease.computed, end, at_end=self._plan_snapshot(lease, end if is_due else None))

    chains: dict[Lease, list[int]] = {}

    def _next_restore(lease: Lease, depth: int) -> int:
        known = chains.get(lease)
        if known is None or len(known) * GRID < depth:
            if known is None and len(chains) > 256:
                chains.clear()
            known = chains[lease] = chain(lease.tokens)
        return future.next_restore(known[depth // GRID - 1])

    class Policy(OraclePolicy):
        def __init__(self, cost: ReplayCost) -> None:
            super().__init__(future)

    return Engine, Policy


class OraclePolicy(CheckpointPolicy):
    """Furthest ahead first. Who would have restored what goes restores from the state above, which inherits that."""

    def __init__(self, future: Future) -> None:
        self._future = future
        self._prefixes: dict[TreeNode, int] = {}
        self._uses: dict[TreeNode, list[int]] = {}
        self._states: dict[TreeNode, None] = {}
        self._leaves: dict[TreeNode, None] = {}

    def offer_state(self, node: TreeNode) -> None:
        self._states[node] = None

    def withdraw_state(self, node: TreeNode) -> None:
        self._states.pop(node, None)
        if node.checkpoint is None and (uses := self._coming(node)):
            above = next((one for one in node.path() if one.checkpoint is not None), None)
            del self._uses[node]
            if above is not None:
                self._uses[above] = sorted({*self._coming(above), *uses})

    def offer_leaf(self, node: TreeNode) -> None:
        self._leaves[node] = None

    def withdraw_leaf(self, node: TreeNode) -> None:
        self._leaves.pop(node, None)

    def victim(self) -> Victim | None:
        best: tuple[int, int, int, TreeNode] | None = None
        for node in (*self._leaves, *(node for node in self._states if node not in self._leaves)):
            entry = (self._next_use(node), node in self._leaves, -node.node_id, node)
            if best is None or entry[:3] > best[:3]:
                best = entry
        return None if best is None else Victim(best[3], is_leaf=best[3] in self._leaves)

    def state_victim(self) -> TreeNode | None:
        return max(self._states, key=lambda node: (self._next_use(node), -node.node_id), default=None)

    def leaf_victim(self) -> TreeNode | None:
        return max(self._leaves, key=lambda node: (self._next_use(node), -node.node_id), default=None)

    def path_victim(self, path: Sequence[TreeNode]) -> TreeNode:
        return max(path, key=lambda node: (self._next_use(node), -node.node_id))

    def _next_use(self, node: TreeNode) -> int:
        if node.checkpoint is None:
            return NEVER + 1
        uses = self._coming(node)
        return uses[0] if uses else NEVER

    def _coming(self, node: TreeNode) -> list[int]:
        """Numbers of the requests to come that will start from its state."""
        known = self._uses.get(node)
        if known is None:
            known = self._future.restores.get(self._prefix(node), [])
        start = bisect.bisect_right(known, self._future.now)
        self._uses[node] = known = known[start:] if start else known
        return known

    def _prefix(self, node: TreeNode) -> int:
        if node.parent is None:
            return 0
        if node not in self._prefixes:
            self._prefixes[node] = chain(node.tokens, self._prefix(node.parent))[-1]
        return self._prefixes[node]
