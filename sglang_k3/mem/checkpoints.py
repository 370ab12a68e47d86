"""States in the radix tree: where a request may start, what is planted, and what goes.

A match gives two numbers, how deep the KV is cached and how deep a state is; only the second can be started from,
since a KDA layer without its state can use none of the KV. Checkpoints lie at nodes on the grid. A node whose state was
given up is a tombstone: its KV stays and tells the next request where a state is worth planting.

Laws: I1, a state is planted only at the node whose depth it encodes. I2, a slot or location that is not planted is
freed at once. I5, planting and keeping are optional: nothing here fails for want of room.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from array import array
from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor

from sglang_k3.mem.checkpoint_policy import CheckpointPolicy
from sglang_k3.mem.limits import CheckpointLimits
from sglang_k3.mem.radix_tree import Checkpoint, Namespace, RadixTree, TreeNode
from sglang_k3.mem.state_slots import Owner, SlotId, StateSlots

TREE: Final = "the tree"  # owner of every checkpoint's slot

# Every reason that is counted, from the start at nought, so that whoever plots them sees the first one happen.
SKIPPED: Final = ("no slot", "path is full")
EVICTED: Final = (
    "for a slot", "for its path", "with its KV", "for bytes", "for bytes, with its KV", "by a flush", "as broken",
)  # fmt: skip


class KVPool(Protocol):
    """Where KV locations go back to."""

    def free(self, kv_locs: Tensor) -> None:
        """Take back whole pages: every page that a location of ``kv_locs [n]`` lies in."""
        ...


class Match(NamedTuple):
    """What of a prompt is cached.

    Attributes:
        kv_depth: tokens whose KV is cached, whole pages.
        state_depth: tokens that the deepest usable state encodes; what the request starts from.
        node: the node of that state; the root if there is none.
        fork_depth: the grid point where a state is missing: KV is cached to it and beyond; else None.
        diverges: whether the prompt leaves what is cached, rather than reaching the end of it.
    """

    kv_depth: int
    state_depth: int
    node: TreeNode
    fork_depth: int | None
    diverges: bool


class Snapshot(NamedTuple):
    """A state on its way to the tree: its slot, the tokens that it is to encode, and whether it marks a fork."""

    slot_id: SlotId
    depth: int
    is_fork: bool


@dataclasses.dataclass
class CacheCounts:
    """What happened since the start.

    Attributes:
        starts: requests whose computing began, once more after each retraction.
        state_hits: of these, from a cached state.
        state_hit_tokens: that those states encode.
        kv_only_hits: starts of prompts whose KV was cached deeper than any state.
        kv_only_tokens: of that KV, which nothing could start from.
        replayed_tokens: of these, computed again so far: fewer where a request ended before.
        planted: states that came into the tree; ``planted_forks`` of them where prompts part.
        duplicates: snapshots of a depth at which the tree had a state by then.
        skipped: states that were due and are not kept, by reason.
        evicted: states that left the tree, by reason.
    """

    starts: int = 0
    state_hits: int = 0
    state_hit_tokens: int = 0
    kv_only_hits: int = 0
    kv_only_tokens: int = 0
    replayed_tokens: int = 0
    planted: int = 0
    planted_forks: int = 0
    duplicates: int = 0
    skipped: collections.Counter[str] = dataclasses.field(default_factory=lambda: _from_nought(SKIPPED))
    evicted: collections.Counter[str] = dataclasses.field(default_factory=lambda: _from_nought(EVICTED))

    def extended(self, match: Match, start: int, end: int) -> None:
        """A request that was admitted with ``match`` computes the tokens ``start .. end`` of its prompt."""
        if start == match.state_depth:
            self.starts += 1
            self.state_hits += match.state_depth > 0
            self.state_hit_tokens += match.state_depth
            self.kv_only_hits += match.kv_depth > match.state_depth
            self.kv_only_tokens += match.kv_depth - match.state_depth
        self.replayed_tokens += max(0, min(end, match.kv_depth) - start)


def _from_nought(reasons: tuple[str, ...]) -> collections.Counter[str]:
    return collections.Counter(dict.fromkeys(reasons, 0))


class CheckpointCache:
    """The tree of one rank with its states.

    Args:
        tree: empty.
        slots: the rank's state slots.
        kv_pool: takes back the KV locations that the tree gives up.
        policy: the order of eviction.
        limits: the grid and the cap per path.
    """

    def __init__(
        self,
        tree: RadixTree,
        slots: StateSlots,
        kv_pool: KVPool,
        *,
        policy: CheckpointPolicy,
        limits: CheckpointLimits,
    ) -> None:
        assert tree.page_size == limits.page_size, f"pages of {tree.page_size} and of {limits.page_size} tokens"
        self.tree, self.slots, self.limits = tree, slots, limits
        self.counts = CacheCounts()
        self.num_states = self.num_protected_states = 0
        self._kv_pool, self._policy = kv_pool, policy
        self._clock = itertools.count(1)

    def match(self, namespace: Namespace, usable: array[int]) -> Match:
        """Where a prompt may start. Changes nothing, not even the order of eviction.

        Args:
            usable: what of it may come from the cache: never all, since its last token must be computed for its logits.
        """
        nodes, kv_depth = self.tree.walk(namespace, usable)
        node = next((node for node in reversed(nodes) if node.checkpoint), self.tree.root)
        fork_depth = self.limits.floor(kv_depth)
        last = nodes[-1] if nodes else self.tree.root
        diverges = kv_depth > last.depth or bool(last.children)
        return Match(kv_depth, node.depth, node, fork_depth if fork_depth > node.depth else None, diverges)

    def kv_locs(self, node: TreeNode, start: int) -> Tensor:
        """KV locations of the tokens ``start ..`` to the end of ``node``; ``start`` is where a node ends.

        Returns:
            ``[node.depth - start]``, int64.
        """
        edges = [on_path.kv_locs for on_path in itertools.takewhile(lambda n: n.depth > start, node.path())]
        return torch.cat([self.tree.root.kv_locs, *reversed(edges)])

    def insert(
        self,
        namespace: Namespace,
        tokens: array[int],
        kv_locs: Tensor,
        *,
        owned_from: int,
        snapshot: Snapshot | None = None,
        owner: Owner = None,
    ) -> TreeNode:
        """Cache the KV of ``tokens``, and the state after them if there is one.

        The tree takes ``kv_locs[owned_from:]`` from the caller, keeps those it had none for and frees the others. It
        takes the slot of ``snapshot``, too, and frees it where it has a state already or the path is full.

        Args:
            tokens: from the root, up to a grid point.
            kv_locs: one per token ``[len(tokens)]``, int64.
            owned_from: tokens that the tree owns already, since ``owner`` has locked them.
            owner: who owns the snapshot's slot.
        Returns:
            The node at ``len(tokens)``, not locked.
        """
        assert len(tokens) % self.limits.grid == 0, f"{len(tokens)} tokens are off the grid of {self.limits.grid}"
        node, cached = self.tree.insert(namespace, tokens, kv_locs)
        if cached > owned_from:
            self._kv_pool.free(kv_locs[owned_from:cached])
        node.used_at = next(self._clock)
        self._refresh_leaf(node)
        for above in itertools.islice(node.path(), 1, 2):
            self._refresh_leaf(above)
        if snapshot is not None:
            self._plant(node, snapshot, owner)
        return node

    def touch(self, node: TreeNode) -> None:
        """A request has started from the state of ``node``: this state, and no other on its path, is used."""
        node.used_at = next(self._clock)
        self._refresh_leaf(node)
        if node.checkpoint is not None:
            node.checkpoint.used_at = node.used_at
            node.checkpoint.uses += 1
            self._refresh_state(node)

    def lock(self, node: TreeNode, *, by_session: bool = False) -> None:
        """Protect the KV from the root to ``node``."""
        self.tree.inc_lock_ref(node, by_session=by_session)
        self._refresh_leaf(node)

    def unlock(self, node: TreeNode, *, by_session: bool = False) -> None:
        self.tree.dec_lock_ref(node, by_session=by_session)
        self._refresh_leaf(node)

    def lock_state(self, node: TreeNode) -> None:
        """Protect the state of ``node``, which has one; its KV is protected apart."""
        assert node.checkpoint is not None, f"{node} has no state to protect"
        self.num_protected_states += node.checkpoint.lock_ref == 0
        node.checkpoint.lock_ref += 1
        self._refresh_state(node)

    def unlock_state(self, node: TreeNode) -> None:
        assert node.checkpoint is not None and node.checkpoint.lock_ref > 0, f"{node} has no protected state"
        node.checkpoint.lock_ref -= 1
        self.num_protected_states -= node.checkpoint.lock_ref == 0
        self._refresh_state(node)

    def evict_state(self) -> bool:
        """Give up one state and keep its KV; False if every state is protected."""
        node = self._policy.state_victim()
        if node is None:
            return False
        self._drop_state(node, "for a slot")
        return True

    def evict_kv(self, num_tokens: int) -> int:
        """Give up leaves with their states, until ``num_tokens`` are free or all is protected; tokens freed."""
        freed = 0
        while freed < num_tokens and (node := self._policy.leaf_victim()) is not None:
            freed += self._drop_leaf(node, "with its KV")
        return freed

    def evict(self) -> bool:
        """Give up what the policy would miss least, a state or a leaf with its KV; False if all is protected."""
        victim = self._policy.victim()
        if victim is None:
            return False
        if victim.is_leaf:
            self._drop_leaf(victim.node, "for bytes, with its KV")
        else:
            self._drop_state(victim.node, "for bytes")
        return True

    def forget(self, node: TreeNode) -> None:
        """Give up ``node`` and what is above it, as far as nothing else needs it: what is there is not to be used."""
        while node.is_evictable_leaf:
            parent = node.parent
            assert parent is not None
            self._drop_leaf(node, "as broken")
            node = parent

    def flush(self) -> None:
        """Give up whatever is not protected."""
        while (node := self._policy.leaf_victim()) is not None:
            self._drop_leaf(node, "by a flush")
        while (node := self._policy.state_victim()) is not None:
            self._drop_state(node, "by a flush")

    def _plant(self, node: TreeNode, snapshot: Snapshot, owner: Owner) -> None:
        if node.checkpoint is not None:
            node.checkpoint.is_fork |= snapshot.is_fork
            self.slots.free(snapshot.slot_id, owner)
            self.counts.duplicates += 1
        elif not self._make_way_on_path(node, snapshot):
            self.slots.free(snapshot.slot_id, owner)
            self.counts.skipped["path is full"] += 1
        else:
            self.slots.donate(snapshot.slot_id, owner, to=TREE, depth=node.depth)
            node.checkpoint = Checkpoint(snapshot.slot_id, snapshot.is_fork, used_at=node.used_at)
            self._refresh_state(node)
            self.num_states += 1
            self.counts.planted += 1
            self.counts.planted_forks += snapshot.is_fork

    def _make_way_on_path(self, node: TreeNode, snapshot: Snapshot) -> bool:
        """Whether one more state fits above or at ``node``, perhaps in place of another; forks always do."""
        plain = [above for above in node.path() if above.checkpoint and not above.checkpoint.is_fork]
        if snapshot.is_fork or len(plain) < self.limits.checkpoints_per_path:
            return True
        unprotected = [above for above in plain if above.checkpoint and not above.checkpoint.lock_ref]
        if not unprotected:
            return False
        self._drop_state(self._policy.path_victim(unprotected), "for its path")
        return True

    def _drop_state(self, node: TreeNode, reason: str) -> None:
        assert node.checkpoint is not None and not node.checkpoint.lock_ref, f"{node} has no state to give up"
        self.slots.free(node.checkpoint.slot_id, TREE)
        node.checkpoint = None
        self.num_states -= 1
        self._policy.withdraw_state(node)
        self.counts.evicted[reason] += 1

    def _drop_leaf(self, node: TreeNode, reason: str) -> int:
        if node.checkpoint is not None:
            self._drop_state(node, reason)
        self._policy.withdraw_leaf(node)
        parent = self.tree.remove_leaf(node)
        self._kv_pool.free(node.kv_locs)
        self._refresh_leaf(parent)
        return len(node.tokens)

    def _refresh_leaf(self, node: TreeNode) -> None:
        if node.is_evictable_leaf:
            self._policy.offer_leaf(node)
        else:
            self._policy.withdraw_leaf(node)

    def _refresh_state(self, node: TreeNode) -> None:
        if node.checkpoint is not None and not node.checkpoint.lock_ref:
            self._policy.offer_state(node)
        else:
            self._policy.withdraw_state(node)
