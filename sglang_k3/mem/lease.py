"""What one running request has of the pools, and what it is about to do with it."""

from __future__ import annotations

import dataclasses
from array import array

from sglang_k3.mem.checkpoints import Match, Snapshot
from sglang_k3.mem.radix_tree import Namespace, TreeNode
from sglang_k3.mem.state_slots import SlotId


@dataclasses.dataclass(eq=False)
class Lease:
    """From admission to the end of a request, or to its retraction.

    Attributes:
        name: the request, for messages.
        tokens: prompt and, so far as they are known, answer.
        prefill_end: how many of them there were at admission; what follows is decoded one by one.
        match: what was cached at admission.
        node: to where the KV of this request is the tree's, locked.
        source: whose state is protected until its copy is enqueued.
        working: the slot that every forward overwrites.
        computed: tokens that the forwards enqueued so far have absorbed; the depth of ``working``.
        snapshots: written by enqueued forwards and not yet donated, by depth.
        wanted: depths at which others wait for a state, and whether they diverge there.
    """

    name: str
    namespace: Namespace
    tokens: array[int]
    prefill_end: int
    match: Match
    node: TreeNode
    source: TreeNode | None
    working: SlotId
    computed: int
    snapshots: list[Snapshot] = dataclasses.field(default_factory=list)
    wanted: dict[int, bool] = dataclasses.field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Lease({self.name}: {self.computed} of {len(self.tokens)} tokens, slot {self.working})"

    @property
    def is_prefilling(self) -> bool:
        return self.computed < self.prefill_end

    @property
    def slot_ids(self) -> list[SlotId]:
        """Every slot that the request owns."""
        return [self.working, *(snapshot.slot_id for snapshot in self.snapshots)]


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """What one forward does for one request: it absorbs the tokens ``start .. end``.

    Attributes:
        inner: a snapshot that the forward itself writes, ``start < depth < end``.
        at_end: a snapshot that is copied from the working slot behind the forward, ``depth == end``.
    """

    lease: Lease
    start: int
    end: int
    inner: Snapshot | None = None
    at_end: Snapshot | None = None
