"""The three moves of a state: restore, snapshot, donate; and what a forward pass does to one.

    restore     checkpoint -> working slot    a copy: the checkpoint stays, the request overwrites its own
    snapshot    working slot -> fresh slot    a copy, or written by the forward itself at an inner depth
    donate      snapshot -> tree              no copy: ``StateSlots.donate`` hands the index over

Law I4: every copy is a kernel on the forward stream, enqueued between the forwards that write what it reads and
overwrite what it reads. A freed slot may therefore be given away at once, while a forward that uses it is still in
flight: whoever gets it enqueues behind that forward. Law I1: a slot's depth is taken from the source of the copy.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from sglang_k3.kernels import OpContext, bind
from sglang_k3.mem.state_slots import Owner, SlotId, SlotState, StateSlots

if TYPE_CHECKING:
    from torch import Tensor


@dataclasses.dataclass(frozen=True)
class DeviceWork:
    """Something for the device, and the slots that it touches.

    Attributes:
        name: ``"restore"``, ``"snapshot"``, ``"forward"``.
        run: does it; called once, when its turn comes.
    """

    name: str
    run: Callable[[], None]
    reads: frozenset[SlotId]
    writes: frozenset[SlotId]


class Stream(Protocol):
    """The forward stream: works run in the order of their enqueuing, among the forward passes."""

    def enqueue(self, work: DeviceWork) -> None: ...


@dataclasses.dataclass(frozen=True)
class Copy:
    """One state to copy: between two slots, for the owner of the target."""

    src: SlotId
    dst: SlotId
    owner: Owner


class StateMoves:
    """The copies between slots of one rank's pools.

    Args:
        slots: whose depths follow the copies.
        pools: each ``[layers, slots, ...]``, any dtype: the convolution's and the recurrence's states.
        stream: the forward stream.
    """

    def __init__(self, slots: StateSlots, pools: Sequence[Tensor], stream: Stream) -> None:
        self._slots, self._pools, self._stream = slots, tuple(pools), stream
        self._copy = [bind("state_copy", OpContext(pool.device, pool.dtype)) for pool in self._pools]

    def restore(self, copies: Sequence[Copy]) -> None:
        """Checkpoints into working slots; several requests may start from one checkpoint."""
        self._enqueue("restore", copies, SlotState.LIVE)

    def snapshot(self, copies: Sequence[Copy]) -> None:
        """Working slots into slots that nothing has written since they were taken."""
        self._enqueue("snapshot", copies, SlotState.SNAPSHOT)

    def forwarded(self, slot_id: SlotId, owner: Owner, *, depth: int, state: SlotState = SlotState.LIVE) -> None:
        """A forward was enqueued that leaves the state after ``depth`` tokens in a slot."""
        self._slots.written(slot_id, owner, state=state, depth=depth)

    def _enqueue(self, name: str, copies: Sequence[Copy], state: SlotState) -> None:
        if not copies:
            return
        sources, targets = [copy.src for copy in copies], [copy.dst for copy in copies]
        assert len({*targets}) == len(targets) and not {*targets} & {*sources}, f"I4: {name} of {copies}"
        for copy in copies:
            depth = self._slots.depth(copy.src)
            assert depth is not None, f"I1: {name} of slot {copy.src}, which holds no state"
            self._slots.written(copy.dst, copy.owner, state=state, depth=depth)
        run = functools.partial(self._run, sources, targets)
        self._stream.enqueue(DeviceWork(name, run, frozenset(sources), frozenset(targets)))

    def _run(self, sources: list[SlotId], targets: list[SlotId]) -> None:
        src_indices, dst_indices = (on_device(slot_ids, self._pools[0].device) for slot_ids in (sources, targets))
        for pool, copy in zip(self._pools, self._copy, strict=True):
            copy(pool, src_indices=src_indices, dst_indices=dst_indices)


def on_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """As int64, from pinned memory, so that nobody waits for the device (I4)."""
    if device.type == "cpu":
        return torch.tensor(numbers)
    return torch.tensor(numbers, pin_memory=True).to(device, non_blocking=True)
