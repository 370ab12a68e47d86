"""A slot has one owner and one life; whatever is against it is refused (I3)."""

from __future__ import annotations

import itertools

import pytest

from sglang_k3.mem.state_slots import LEGAL_MOVES, SlotError, SlotId, SlotState, StateSlots

S = SlotState


def slot_in(state: SlotState) -> tuple[StateSlots, SlotId]:
    """The only slot of a pool, brought to a state by its owner, ``"a"``."""
    slots = StateSlots(1)
    slot_id = slots.try_alloc("a")
    assert slot_id is not None
    if state is S.FREE:
        slots.free(slot_id, "a")
    elif state is not S.RESERVED:
        slots.written(slot_id, "a", state=S.LIVE if state is S.LIVE else S.SNAPSHOT, depth=4)
    if state is S.CHECKPOINT:
        slots.donate(slot_id, "a", to="a", depth=4)
    return slots, slot_id


def move(slots: StateSlots, slot_id: SlotId, to: SlotState) -> None:
    if to is S.FREE:
        slots.free(slot_id, slots.owner(slot_id))
    elif to is S.CHECKPOINT:
        slots.donate(slot_id, slots.owner(slot_id), to="tree", depth=slots.depth(slot_id))
    elif to is S.RESERVED:
        assert slots.try_alloc("b") in (slot_id, None)
        if slots.owner(slot_id) != "b":
            raise SlotError("it was not given away again")
    else:
        slots.written(slot_id, slots.owner(slot_id), state=to, depth=4)


@pytest.mark.parametrize(("start", "to"), [*itertools.product(S, S)])
def test_only_the_moves_of_the_table_can_be_made(start: SlotState, to: SlotState):
    slots, slot_id = slot_in(start)
    if (start, to) in LEGAL_MOVES:
        move(slots, slot_id, to)
        assert slots.state(slot_id) is to
    else:
        with pytest.raises(SlotError):
            move(slots, slot_id, to)
        assert slots.state(slot_id) is start
    slots.check_invariants()


@pytest.mark.parametrize("slot_id", [-1, 0, 5])
def test_a_number_that_is_no_slot_is_refused(slot_id: int):
    with pytest.raises(SlotError, match=f"There is no state slot {slot_id}: they are 1 to 4"):
        StateSlots(4, first=1).free(SlotId(slot_id), "a")


def test_nobody_frees_or_writes_or_donates_another_s_slot():
    slots, slot_id = slot_in(S.SNAPSHOT)
    for misuse in (
        lambda: slots.free(slot_id, "b"),
        lambda: slots.written(slot_id, "b", state=S.SNAPSHOT, depth=4),
        lambda: slots.donate(slot_id, "b", to="tree", depth=4),
    ):
        with pytest.raises(
            SlotError, match=r"'b' does not own state slot 0 \(snapshot, owned by 'a', a state of 4 tok"
        ):
            misuse()
    slots.donate(slot_id, "a", to="tree", depth=4)
    with pytest.raises(SlotError, match="'a' does not own"):
        slots.free(slot_id, "a")


def test_a_second_free_is_refused():
    slots, slot_id = slot_in(S.FREE)
    for owner in ("a", None):
        with pytest.raises(SlotError):
            slots.free(slot_id, owner)
    assert slots.num_free == 1


def test_a_snapshot_is_donated_as_what_was_written_not_as_what_was_planned():
    slots, slot_id = slot_in(S.SNAPSHOT)
    with pytest.raises(
        SlotError, match="I1: state slot 0 .* a state of 4 tokens.* is donated as the state of 8 tokens"
    ):
        slots.donate(slot_id, "a", to="tree", depth=8)


def test_a_freed_slot_has_no_depth_and_no_owner():
    slots, slot_id = slot_in(S.LIVE)
    slots.free(slot_id, "a")
    assert slots.depth(slot_id) is None and slots.owner(slot_id) is None
    assert slots.try_alloc("b") == slot_id
    assert slots.depth(slot_id) is None


def test_what_finds_no_slot_is_told_so():
    slots, _ = slot_in(S.LIVE)
    assert slots.try_alloc("b") is None


@pytest.mark.parametrize(("size", "first"), [(0, 0), (-3, 0), (4, -1)])
def test_a_pool_without_slots_is_refused(size: int, first: int):
    with pytest.raises(ValueError, match="Give at least 1, from 0"):
        StateSlots(size, first=first)


def test_the_counts_are_in_its_repr():
    slots, _ = slot_in(S.CHECKPOINT)
    assert repr(slots) == "StateSlots(1: 1 checkpoint)"


def test_a_working_slot_goes_on_by_one_token_and_nothing_else_does():
    slots = StateSlots(2)
    slot = slots.try_alloc("a")
    with pytest.raises(SlotError, match="cannot go on"):
        slots.advance(slot, "a")
    slots.written(slot, "a", state=SlotState.LIVE, depth=7)
    slots.advance(slot, "a")
    assert slots.depth(slot) == 8
    with pytest.raises(SlotError, match="cannot go on"):
        slots.advance(slot, "b")
