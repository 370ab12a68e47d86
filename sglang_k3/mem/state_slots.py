"""State slots: who owns each, how far its life has come, and how many tokens its state encodes.

Pure bookkeeping on slot numbers; the bytes are in pools that ``state_moves`` and the forward pass write. Slot numbers
are opaque: nothing outside this file computes with them, so that they may become virtual.

    FREE --alloc--> RESERVED --first written--> LIVE        a working slot: each forward overwrites it
                       |                          |
                       +------written------> SNAPSHOT --donate--> CHECKPOINT     read-only from here on
                                                  |                   |
    every owned state --------------------------free-----------------+--> FREE

Laws: I1, the depth of a slot is what was last enqueued to be written there. I3, one owner and one life cycle; a
negative id, a second free and a free by anybody but the owner are refused, always.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Hashable, Iterator
from typing import NewType

SlotId = NewType("SlotId", int)
Owner = Hashable


class SlotState(enum.Enum):
    """How far the life of a slot has come."""

    FREE = "free"
    RESERVED = "reserved"  # owned; what its bytes hold is undefined
    LIVE = "live"
    SNAPSHOT = "snapshot"
    CHECKPOINT = "checkpoint"


_S = SlotState
LEGAL_MOVES = frozenset(
    {
        (_S.FREE, _S.RESERVED),
        (_S.RESERVED, _S.LIVE),
        (_S.LIVE, _S.LIVE),
        (_S.RESERVED, _S.SNAPSHOT),
        (_S.SNAPSHOT, _S.CHECKPOINT),
        (_S.RESERVED, _S.FREE),
        (_S.LIVE, _S.FREE),
        (_S.SNAPSHOT, _S.FREE),
        (_S.CHECKPOINT, _S.FREE),
    }
)


class SlotError(RuntimeError):
    """A slot was used against its life cycle: a mistake of this package, never of a request."""


@dataclasses.dataclass
class _Slot:
    state: SlotState = SlotState.FREE
    owner: Owner | None = None
    depth: int | None = None


class StateSlots:
    """The slots ``first .. first + size - 1`` of the state pools.

    Args:
        size: how many slots there are.
        first: the lowest number; those below it belong to nobody (a host may keep one for padding).
    """

    def __init__(self, size: int, *, first: int = 0) -> None:
        if size < 1 or first < 0:
            raise ValueError(f"A pool of {size} state slots from {first} holds no state. Give at least 1, from 0.")
        self.size = size
        self._slots = {SlotId(first + i): _Slot() for i in range(size)}
        self._free = [*reversed(self._slots)]

    def __repr__(self) -> str:
        counts = {state.value: sum(slot.state is state for slot in self._slots.values()) for state in SlotState}
        return f"StateSlots({self.size}: {', '.join(f'{n} {name}' for name, n in counts.items() if n)})"

    @property
    def num_free(self) -> int:
        return len(self._free)

    def try_alloc(self, owner: Owner) -> SlotId | None:
        """A slot for ``owner``, ``RESERVED``; None when all are owned. Its bytes are undefined until written."""
        if not self._free:
            return None
        slot_id = self._free.pop()
        self._move(slot_id, SlotState.RESERVED)
        self._slots[slot_id].owner = owner
        return slot_id

    def written(self, slot_id: SlotId, owner: Owner, *, state: SlotState, depth: int) -> None:
        """A write of the state after ``depth`` tokens was enqueued: the slot is now ``LIVE`` or ``SNAPSHOT``."""
        slot = self._owned(slot_id, owner)
        if depth < 1:
            raise SlotError(f"{self._describe(slot_id)} cannot hold a state of {depth} tokens.")
        self._move(slot_id, state)
        slot.depth = depth

    def advance(self, slot_id: SlotId, owner: Owner) -> None:
        """``written`` with one token more, of a working slot that holds a state; in every step of every answer."""
        slot = self._slots[slot_id]
        if slot.owner is not owner or slot.state is not SlotState.LIVE or slot.depth is None:
            raise SlotError(f"{owner!r} cannot go on from {self._describe(slot_id)}.")
        slot.depth += 1

    def donate(self, slot_id: SlotId, owner: Owner, *, to: Owner, depth: int) -> None:
        """Hand a snapshot over for good. No byte moves.

        Raises:
            SlotError: it is not a snapshot of ``owner``, or encodes another number of tokens (I1).
        """
        slot = self._owned(slot_id, owner)
        if slot.depth != depth:
            raise SlotError(f"I1: {self._describe(slot_id)} is donated as the state of {depth} tokens.")
        self._move(slot_id, SlotState.CHECKPOINT)
        slot.owner = to

    def free(self, slot_id: SlotId, owner: Owner) -> None:
        """Give a slot back.

        Raises:
            SlotError: there is no such slot, it is free already, or ``owner`` does not own it (I3).
        """
        slot = self._owned(slot_id, owner)
        self._move(slot_id, SlotState.FREE)
        slot.owner = slot.depth = None
        self._free.append(slot_id)

    def state(self, slot_id: SlotId) -> SlotState:
        return self._slot(slot_id).state

    def owner(self, slot_id: SlotId) -> Owner | None:
        return self._slot(slot_id).owner

    def depth(self, slot_id: SlotId) -> int | None:
        """Tokens that the state encodes; None while undefined."""
        return self._slot(slot_id).depth

    def owned(self) -> Iterator[tuple[SlotId, Owner]]:
        """Every slot that is not free, with its owner. O(size)."""
        for slot_id, slot in self._slots.items():
            if slot.state is not SlotState.FREE:
                yield slot_id, slot.owner

    def check_invariants(self) -> None:
        free = {slot_id for slot_id, slot in self._slots.items() if slot.state is SlotState.FREE}
        assert len(self._free) == len(free), f"I2: {len(self._free)} slots are listed free, {len(free)} are: {self!r}"
        assert set(self._free) == free, f"I3: listed free but owned, or the reverse: {set(self._free) ^ free}"
        for slot_id, slot in self._slots.items():
            assert (slot.owner is None) == (slot.state is SlotState.FREE), f"I3: {self._describe(slot_id)}"
            has_depth = slot.state not in (SlotState.FREE, SlotState.RESERVED)
            assert (slot.depth is not None) == has_depth, f"I1: {self._describe(slot_id)}"

    def _slot(self, slot_id: SlotId) -> _Slot:
        slot = self._slots.get(slot_id)
        if slot is None:
            first = min(self._slots)
            raise SlotError(f"There is no state slot {slot_id}: they are {first} to {first + self.size - 1}.")
        return slot

    def _owned(self, slot_id: SlotId, owner: Owner) -> _Slot:
        slot = self._slot(slot_id)
        if slot.owner != owner:
            raise SlotError(f"{owner!r} does not own {self._describe(slot_id)}.")
        return slot

    def _move(self, slot_id: SlotId, to: SlotState) -> None:
        slot = self._slots[slot_id]
        if (slot.state, to) not in LEGAL_MOVES:
            raise SlotError(f"{self._describe(slot_id)} cannot become {to.value}.")
        slot.state = to

    def _describe(self, slot_id: SlotId) -> str:
        slot = self._slots[slot_id]
        owned = f"owned by {slot.owner!r}" if slot.owner is not None else "owned by nobody"
        depth = f", a state of {slot.depth} tokens" if slot.depth is not None else ""
        return f"state slot {slot_id} ({slot.state.value}, {owned}{depth})"
