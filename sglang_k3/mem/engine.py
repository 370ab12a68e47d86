"""One request's life with the prefix cache, as the scheduler sees it.

    admit           match, protect, reserve a working slot; or say why not. Nothing is held on refusal
    plan_extend     before each prefill chunk: which states to keep of it
    plan_decode     before each token: whether a state is due
    decode_quietly  instead of this and the next two, where nothing is: most tokens
    before_forward  enqueues the restores; the forward itself comes behind
    after_forward   enqueues the snapshots, and gives up protection that no copy needs any more
    donate          after each chunk, also the last: its states and its KV go to the tree
    finish          donates what is left; discard gives it up (retraction, broken rows)

A session keeps the end of its last turn, and what the next one starts from, until room is needed for who runs.

Everything but the two calls around the forward is bookkeeping on the host, and may run while forwards are in flight.
Laws: I3, reserve then commit; I4; I5, a checkpoint that finds no slot is skipped and counted.
"""

from __future__ import annotations

import collections
import enum
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from sglang_k3.mem.checkpoints import CheckpointCache, KVPool, Snapshot
from sglang_k3.mem.in_flight import InFlight
from sglang_k3.mem.lease import Lease, StepPlan
from sglang_k3.mem.radix_tree import Namespace, TreeNode, as_tokens
from sglang_k3.mem.state_moves import Copy, StateMoves
from sglang_k3.mem.state_slots import Owner, SlotId, SlotState

if TYPE_CHECKING:
    from torch import Tensor


class Refusal(enum.Enum):
    """Why a request is not admitted now; asking again later is always right."""

    NO_STATE_SLOT = "every state slot is in use by a running request"
    SHARED_PREFIX_IN_FLIGHT = "a running request computes the same prefix"


class CheckpointEngine:
    """Requests, sessions and the cache of one rank.

    Args:
        cache: the tree with its states.
        moves: the copies.
        kv_pool: where the KV of ended requests goes back to.
    """

    def __init__(self, cache: CheckpointCache, moves: StateMoves, kv_pool: KVPool) -> None:
        self.cache, self.moves = cache, moves
        self._slots, self._limits, self._kv_pool = cache.slots, cache.limits, kv_pool
        self._leases: dict[Lease, None] = {}
        self._in_flight = InFlight(cache.limits)
        self._sessions: collections.OrderedDict[str, tuple[TreeNode, TreeNode | None]] = collections.OrderedDict()

    @property
    def leases(self) -> Iterator[Lease]:
        yield from self._leases

    @property
    def slots_by_owner(self) -> dict[str, int]:
        """Where the state slots are; O(1).

        ``cached`` states may be evicted; ``protected`` ones are in the tree as well, and a request is about to start
        from them or a session keeps them.
        """
        protected = self.cache.num_protected_states
        owned = {"working": len(self._leases), "cached": self.cache.num_states - protected, "protected": protected}
        snapshots = self._slots.size - self._slots.num_free - sum(owned.values())
        return {"free": self._slots.num_free, "snapshot": snapshots, **owned}

    def admit(
        self, name: str, namespace: Namespace, ids: Sequence[int], *, num_usable: int | None = None
    ) -> Lease | Refusal:
        """Take in a request, to be computed from ``lease.computed`` on.

        Args:
            ids: prompt, and answer so far for a request that was retracted; at least one token.
            num_usable: how many of them may come from the cache; all but the last unless it is fewer.
        """
        tokens = as_tokens(ids)
        usable = tokens[: len(tokens) - 1 if num_usable is None else min(num_usable, len(tokens) - 1)]
        match = self.cache.match(namespace, usable)
        if self._in_flight.is_awaited(namespace, usable, match.state_depth):
            return Refusal.SHARED_PREFIX_IN_FLIGHT
        source = match.node if match.state_depth else None
        # Protected first: the slot may have to come from another state.
        self.cache.lock(match.node)
        if source is not None:
            self.cache.lock_state(source)
        lease = Lease(name, namespace, tokens[:], len(tokens), match, match.node, source, SlotId(-1), match.state_depth)
        working = self._take_slot(lease)
        while working is None and self._end_a_session():
            working = self._take_slot(lease)
        if working is None:
            self._release_source(lease)
            self.cache.unlock(match.node)
            return Refusal.NO_STATE_SLOT
        lease.working = working
        self._leases[lease] = None
        self._in_flight.add(lease)
        return lease

    def plan_extend(self, lease: Lease, end: int) -> StepPlan:
        """Before the forward that absorbs the prompt up to ``end``: the states to keep of it."""
        assert lease.computed < end <= lease.prefill_end, f"{lease} extends to {end} of {lease.prefill_end}"
        inner = self._inner_depth(lease, end)
        at_end = end if end % self._limits.grid == 0 else None
        snapshots = {"inner": self._plan_snapshot(lease, inner), "at_end": self._plan_snapshot(lease, at_end)}
        return StepPlan(lease, lease.computed, end, **snapshots)

    def plan_decode(self, lease: Lease) -> StepPlan:
        """Before the forward that absorbs one token of the answer."""
        end = lease.computed + 1
        at_end = end if end % self._limits.track_interval == 0 else None
        return StepPlan(lease, lease.computed, end, at_end=self._plan_snapshot(lease, at_end))

    def decode_quietly(self, lease: Lease) -> bool:
        """Before the forward that absorbs one token of the answer: True, and all is done, if no state moves for it.

        Its tokens may be appended later, but before anything else is asked of the lease.
        """
        end = lease.computed + 1
        # Of two snapshots the older goes when the next token is known.
        if lease.source is not None or len(lease.snapshots) > 1 or end % self._limits.track_interval == 0:
            return False
        self._slots.advance(lease.working, lease)
        lease.computed = end
        return True

    def before_forward(self, plans: Sequence[StepPlan]) -> None:
        """Enqueue what the forward of ``plans`` starts from."""
        starts = [plan.lease for plan in plans if plan.lease.source is not None]
        self.moves.restore([Copy(_slot_of(lease.source), lease.working, lease) for lease in starts])

    def after_forward(self, plans: Sequence[StepPlan]) -> None:
        """The forward of ``plans`` is enqueued: note what it writes, and enqueue the snapshots behind it."""
        copies = []
        for plan in plans:
            lease = plan.lease
            if lease.source is not None:
                self.cache.touch(lease.source)
                self._release_source(lease)
            self.moves.forwarded(lease.working, lease, depth=plan.end)
            if lease.is_prefilling:
                self.cache.counts.extended(lease.match, plan.start, plan.end)
            lease.computed = plan.end
            if plan.inner is not None:
                self.moves.forwarded(plan.inner.slot_id, lease, depth=plan.inner.depth, state=SlotState.SNAPSHOT)
            if plan.at_end is not None:
                copies.append(Copy(lease.working, plan.at_end.slot_id, lease))
        self.moves.snapshot(copies)

    def append(self, lease: Lease, token: int) -> None:
        """The next token of the answer is known. Of the answer's states that are certain now, the deepest is kept."""
        lease.tokens.append(token)
        certain = [snapshot for snapshot in lease.snapshots if lease.prefill_end < snapshot.depth <= len(lease.tokens)]
        for older in certain[:-1]:
            self._drop_snapshot(lease, older)

    def donate(self, lease: Lease, kv_locs: Tensor) -> Tensor:
        """Hand over what the prefill has left so far.

        Args:
            kv_locs: of the tokens computed so far ``[lease.computed]``, int64.
        Returns:
            Where the KV that was handed over is now, ``[n]``: it replaces the caller's locations of the ``n`` tokens
            before ``lease.node.depth``, which are the tree's or free.
        """
        if not lease.is_prefilling:
            self._in_flight.discard(lease)
        start = lease.node.depth
        self._donate_up_to(lease, kv_locs)
        return self.cache.kv_locs(lease.node, start)

    def finish(self, lease: Lease, kv_locs: Tensor, *, session: str | None = None) -> None:
        """The request has ended well: cache what can be, and give back the rest.

        Args:
            kv_locs: all that it has, from the first token on, int64; the tree's part included.
            session: keeps its KV and last state protected until the session's next request ends or it is closed.
        """
        self._donate_up_to(lease, kv_locs)
        if session is not None:
            self._hold(session, lease.node)
        self.discard(lease, kv_locs)

    def discard(self, lease: Lease, kv_locs: Tensor) -> None:
        """Give back everything, at any moment; what was donated before stays cached."""
        self._kv_pool.free(kv_locs[lease.node.depth :])
        self._release_source(lease)
        for slot_id in lease.slot_ids:
            self._slots.free(slot_id, lease)
        self.cache.unlock(lease.node)
        self._in_flight.discard(lease)
        del self._leases[lease]

    def close_session(self, session: str) -> None:
        """No effect if it has nothing."""
        node, source = self._sessions.pop(session, (None, None))
        if node is not None:
            if source is not None:
                self.cache.unlock_state(source)
            self.cache.unlock(node, by_session=True)

    def evict_kv(self, num_tokens: int) -> int:
        """Free the KV of ``num_tokens`` or more, if running requests leave that much; tokens freed."""
        freed = self.cache.evict_kv(num_tokens)
        while freed < num_tokens and self._end_a_session():
            freed += self.cache.evict_kv(num_tokens - freed)
        return freed

    def flush(self) -> None:
        """Empty the cache, but for what running requests use."""
        while self._end_a_session():
            pass
        self.cache.flush()

    def _inner_depth(self, lease: Lease, end: int) -> int | None:
        """The one depth inside a chunk at which the forward leaves a state, the most useful first."""
        inside = range(lease.computed + 1, end)
        if wanted := [depth for depth in lease.wanted if depth in inside]:
            return max(wanted)
        if lease.match.fork_depth in inside:
            return lease.match.fork_depth
        # The end of a prompt is no place to start its repeat from: one token must stay to be computed.
        tail = self._limits.floor(end - 1)
        is_needed = end % self._limits.grid or end == lease.prefill_end
        return tail if is_needed and tail in inside else None

    def _plan_snapshot(self, lease: Lease, depth: int | None) -> Snapshot | None:
        if depth is None:
            return None
        slot_id = self._take_slot(lease)
        if slot_id is None:
            self.cache.counts.skipped["no slot"] += 1
            return None
        is_fork = lease.wanted.get(depth, False) or (depth == lease.match.fork_depth and lease.match.diverges)
        snapshot = Snapshot(slot_id, depth, is_fork)
        lease.snapshots.append(snapshot)
        return snapshot

    def _donate_up_to(self, lease: Lease, kv_locs: Tensor) -> None:
        """Move the lease down the tree: each certain snapshot, then KV alone to the last grid point."""
        certain = min(len(kv_locs), len(lease.tokens), lease.computed)
        for snapshot in [snapshot for snapshot in lease.snapshots if snapshot.depth <= certain]:
            lease.snapshots.remove(snapshot)
            self._descend(lease, kv_locs, snapshot.depth, snapshot)
        if self._limits.floor(certain) > lease.node.depth:
            self._descend(lease, kv_locs, self._limits.floor(certain), None)

    def _descend(self, lease: Lease, kv_locs: Tensor, depth: int, snapshot: Snapshot | None) -> None:
        node = self.cache.insert(
            lease.namespace,
            lease.tokens[:depth],
            kv_locs[:depth],
            owned_from=lease.node.depth,
            snapshot=snapshot,
            owner=lease,
        )
        self.cache.lock(node)
        self.cache.unlock(lease.node)
        lease.node = node

    def _hold(self, session: str, node: TreeNode) -> None:
        source = next((above for above in node.path() if above.checkpoint is not None), None)
        self.cache.lock(node, by_session=True)
        if source is not None:
            self.cache.lock_state(source)
        self.close_session(session)
        self._sessions[session] = (node, source)

    def _end_a_session(self) -> bool:
        """Take back what the session that ended its last turn longest ago holds; False if none holds anything."""
        if not self._sessions:
            return False
        self.close_session(next(iter(self._sessions)))
        return True

    def _take_slot(self, owner: Owner) -> SlotId | None:
        slot_id = self._slots.try_alloc(owner)
        if slot_id is None and self.cache.evict_state():
            slot_id = self._slots.try_alloc(owner)
        return slot_id

    def _drop_snapshot(self, lease: Lease, snapshot: Snapshot) -> None:
        lease.snapshots.remove(snapshot)
        self._slots.free(snapshot.slot_id, lease)

    def _release_source(self, lease: Lease) -> None:
        if lease.source is not None:
            self.cache.unlock_state(lease.source)
            lease.source = None


def _slot_of(node: TreeNode | None) -> SlotId:
    assert node is not None and node.checkpoint is not None, f"{node} has no state to restore"
    return node.checkpoint.slot_id
