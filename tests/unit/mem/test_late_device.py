"""Device work that runs late races with nothing; and of the orderings that this rests on, none can be spared (I4).

The stream holds its work back for as long as it may and reorders whatever is independent. An ordering edge is a pair of
kinds of work that touch a slot or a KV location in common, one of them writing it.
"""

from __future__ import annotations

import random

import pytest

from sglang_k3.mem.engine import CheckpointEngine
from sglang_k3.mem.limits import CheckpointLimits
from sglang_k3.mem.state_moves import Copy, DeviceWork
from sglang_k3.mem.state_slots import SlotId, SlotState
from tests.kit.delayed_device import DelayedStream, Edge
from tests.kit.mem_scheduler import Scheduler

# Every pair of moves and forwards but for a snapshot behind a restore: a snapshot depends on the forward of its batch,
# this one on the last that its requests ran in, and that one on their restores.
EDGES: tuple[Edge, ...] = (
    ("forward", "forward"),  # the next chunk or token; another's KV; a working slot or a page that changed hands
    ("forward", "restore"),  # a state that the forward itself left inside a chunk; a working slot that changed hands
    ("forward", "snapshot"),  # the state that the forward has reached
    ("restore", "forward"),  # the state to start from
    ("restore", "restore"),  # the source was evicted, and its slot is the next one's working slot
    ("snapshot", "forward"),  # the next forward overwrites what is copied
    ("snapshot", "restore"),  # a state that was donated before its copy has run
    ("snapshot", "snapshot"),  # a snapshot was dropped, and its slot takes another
)
SEEDS = range(30)


LIMITS = CheckpointLimits(state_chunk=4, page_size=1, track_interval=4)


def play(seed: int, stream: DelayedStream, *, is_poisoned: bool) -> Scheduler:
    """Few slots, many prompts with common beginnings, results three forwards late."""
    if seed == 0:
        return a_source_becomes_a_working_slot(stream, is_poisoned=is_poisoned)
    rng = random.Random(seed)
    server = Scheduler(
        LIMITS,
        num_slots=rng.choice([3, 4, 5, 8]),
        num_pages=rng.choice([150, 400]),
        chunk=rng.choice([4, 6, 20]),
        lag=3,
        stream=stream,
        is_poisoned=is_poisoned,
        max_running=rng.choice([1, 2, 3]),
    )
    trunk = [rng.randrange(3) for _ in range(40)]
    for n in range(14):
        prompt = trunk[: rng.randrange(40)] + [rng.randrange(3) for _ in range(rng.randint(1, 6))]
        server.arrive(f"r{n}", prompt, rng.randint(1, 12))
        for _ in range(rng.randrange(3)):
            server.step()
            server.check()
        if server.running and rng.random() < 0.4:
            server.abort(rng.choice(server.running))
    server.run()
    return server


def a_source_becomes_a_working_slot(stream: DelayedStream, *, is_poisoned: bool) -> Scheduler:
    """Too rare to wait for: the state that one request starts from is evicted for another that starts from a second."""
    server = Scheduler(
        LIMITS, num_slots=4, num_pages=99, chunk=20, lag=3, stream=stream, is_poisoned=is_poisoned, max_running=3
    )
    shallow, deep = [0, 1, 2, 0, 1], [1, 2, 0, 1, 2, 0, 1, 2, 0]
    server.serve(shallow, 1)
    server.serve(deep, 1)
    for prompt in ([*shallow, 2], [2], [*deep, 2]):
        server.arrive("r", prompt, 2)
        server.step()
    server.run()
    return server


@pytest.mark.covers("k3", "overlap", "chunks", "abort")
@pytest.mark.parametrize("late", [1, 8, 1000])
@pytest.mark.parametrize("is_poisoned", [False, True], ids=["stale", "poisoned"])
def test_late_work_races_with_nothing(late: int, is_poisoned: bool):
    for seed in SEEDS:
        server = play(seed, DelayedStream(late), is_poisoned=is_poisoned)
        server.check()
        # What is cached by then is what the tokens give.
        for node in server.tree.nodes():
            if node.checkpoint is not None:
                assert server.model.read(node.checkpoint.slot_id).count == node.depth


def test_every_edge_was_met():
    met: set[Edge] = set()
    for seed in SEEDS:
        stream = DelayedStream(1000)
        play(seed, stream, is_poisoned=False)
        met |= stream.dependencies
    assert met == {*EDGES}


@pytest.mark.parametrize("edge", EDGES, ids=lambda edge: f"{edge[0]}-then-{edge[1]}")
def test_no_edge_can_be_removed(edge: Edge):
    for seed in SEEDS:
        try:
            play(seed, DelayedStream(1000, frozenset({edge})), is_poisoned=False)
        except AssertionError:
            return
    pytest.fail(f"{edge[1]} may pass {edge[0]}, and nothing shows it")


@pytest.mark.parametrize("kind", ["restore", "snapshot"])
def test_no_copy_can_leave_the_forward_stream(kind: str):
    """A copy that runs when it is asked for, as on the scheduler's own stream, overtakes everything."""

    class Stray(DelayedStream):
        def enqueue(self, work: DeviceWork) -> None:
            if work.name == kind:
                work.run()
            else:
                super().enqueue(work)

    failures = 0
    for seed in SEEDS:
        try:
            play(seed, Stray(1000), is_poisoned=False)
        except AssertionError:
            failures += 1
    assert failures


def test_a_state_given_up_before_its_copy_is_enqueued_is_found(monkeypatch: pytest.MonkeyPatch):
    """The host's part of the order: protection ends behind the copy, not when the copy is planned."""
    plan_extend = CheckpointEngine.plan_extend

    def hasty(self, lease, end):
        plan = plan_extend(self, lease, end)
        if lease.source is not None:
            self.cache.unlock_state(lease.source)
        return plan

    def no_second_release(self, lease):
        lease.source = None

    monkeypatch.setattr(CheckpointEngine, "plan_extend", hasty)
    monkeypatch.setattr(CheckpointEngine, "_release_source", no_second_release)
    with pytest.raises(AssertionError):
        for seed in range(200):
            play(seed, DelayedStream(1000), is_poisoned=True)


def test_a_copy_never_reads_what_the_same_copy_writes():
    server = play(0, DelayedStream(), is_poisoned=True)
    slots = [server.slots.try_alloc("r") for _ in range(3)]
    server.slots.written(slots[0], "r", state=SlotState.LIVE, depth=4)
    moves = server.engine.moves
    with pytest.raises(AssertionError, match="I4: snapshot"):
        moves.snapshot([Copy(slots[0], slots[1], "r"), Copy(slots[1], slots[2], "r")])
    with pytest.raises(AssertionError, match="I4: restore"):
        moves.restore([Copy(slots[0], slots[1], "r"), Copy(slots[0], slots[1], "r")])
    with pytest.raises(AssertionError, match="I1: snapshot of slot .* which holds no state"):
        moves.snapshot([Copy(slots[1], slots[2], "r")])


def test_the_stream_holds_back_and_reorders():
    """The harness itself: what it may and may not do."""
    ran: list[str] = []

    def work(name: str, reads: set[int], writes: set[int]) -> DeviceWork:
        return DeviceWork(name, lambda: ran.append(name), frozenset(map(SlotId, reads)), frozenset(map(SlotId, writes)))

    stream = DelayedStream(10)
    for name, reads, writes in (("a", set(), {1}), ("b", {1}, {2}), ("c", set(), {3}), ("d", {2}, set())):
        stream.enqueue(work(name, reads, writes))
    assert ran == []
    stream.drain()
    assert ran == ["c", "a", "b", "d"]
    assert stream.dependencies == {("a", "b"), ("b", "d")}

    ran.clear()
    stream = DelayedStream(1, overtakes=frozenset({("a", "b")}))
    stream.enqueue(work("a", set(), {1}))
    stream.enqueue(work("b", {1}, set()))
    assert ran == ["b"]
