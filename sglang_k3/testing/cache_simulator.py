"""A server without a model: the checkpoint engine, a byte budget for states and KV together, and a clock.

Requests come at their nominal times (``cache_traces``), chunks and answers take theirs. The engine, the cache and the
tree are those that serve; a state here is a number in the budget. Grid, page, chunk and interval are the real ones in
units of ``UNIT`` tokens.

One budget, as a unified pool has: a state or a page fits when the bytes are free, or become free by evicting what the
policy names. Where running requests alone leave no room, a request waits, or the youngest goes back to the queue.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from array import array
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from sglang_k3.mem.checkpoint_policy import CheckpointPolicy
from sglang_k3.mem.checkpoints import CacheCounts, CheckpointCache
from sglang_k3.mem.engine import CheckpointEngine, Refusal
from sglang_k3.mem.lease import Lease, StepPlan
from sglang_k3.mem.limits import PAIR_SLOTS, SLOTS_PER_REQUEST, CheckpointLimits
from sglang_k3.mem.radix_tree import RadixTree
from sglang_k3.mem.replay_cost import ReplayCost
from sglang_k3.mem.state_moves import DeviceWork, StateMoves
from sglang_k3.mem.state_slots import Owner, SlotId, StateSlots
from sglang_k3.testing.cache_traces import CHUNK_TOKENS, UNIT, Session, Trace, Turn

GRID: Final = 64 // UNIT
CHUNK: Final = CHUNK_TOKENS // UNIT
INTERVAL: Final = 256 // UNIT
NO_CAP: Final = 1 << 30
MOST_SLOTS: Final = 1 << 16  # more than any trace plants
NO_KV: Final = torch.empty(0, dtype=torch.int64)


class _NoDevice:
    """There is no model, so there are no states to copy."""

    def enqueue(self, work: DeviceWork) -> None:
        del work


class Budget:
    """Bytes of one pool."""

    def __init__(self, total: int, cost: ReplayCost) -> None:
        self.total, self.cost = total, cost
        self.used = self.most_used = 0

    @property
    def free(self) -> int:
        return self.total - self.used

    def take(self, num_bytes: int) -> None:
        assert num_bytes <= self.free, f"I9: {num_bytes} bytes of {self.free}"
        self.used += num_bytes
        self.most_used = max(self.most_used, self.used)


class BudgetedSlots(StateSlots):
    """State slots that come out of the budget."""

    def __init__(self, budget: Budget) -> None:
        super().__init__(min(budget.total // budget.cost.state_bytes, MOST_SLOTS) + 1)
        self._budget = budget

    def try_alloc(self, owner: Owner) -> SlotId | None:
        if self._budget.free < self._budget.cost.state_bytes:
            return None
        self._budget.take(self._budget.cost.state_bytes)
        return super().try_alloc(owner)

    def free(self, slot_id: SlotId, owner: Owner) -> None:
        super().free(slot_id, owner)
        self._budget.used -= self._budget.cost.state_bytes


class BudgetedKV:
    """KV pages that come out of the budget. Locations are never looked at, and so they are all the same."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._locs = NO_KV

    def locs(self, length: int) -> Tensor:
        if length > len(self._locs):
            self._locs = torch.zeros(2 * length, dtype=torch.int64)
        return self._locs[:length]

    def page_bytes(self, old: int, new: int) -> int:
        """Of growing a request from ``old`` to ``new`` units."""
        return (-(-new // GRID) - -(-old // GRID)) * GRID * self._budget.cost.kv_bytes

    def free(self, kv_locs: Tensor) -> None:
        self._budget.used -= self.page_bytes(0, len(kv_locs))


class UnifiedCache(CheckpointCache):
    """Whoever needs a slot may have the bytes of KV, and the other way round."""

    budget: Budget

    def evict_state(self) -> bool:
        return self.make_room(self.budget.cost.state_bytes)

    def make_room(self, num_bytes: int) -> bool:
        while self.budget.free < num_bytes:
            if not self.evict():
                return False
        return True


@dataclasses.dataclass(frozen=True)
class Contender:
    """One way to keep states: what is planted (the engine), what goes (the policy), what a hit touches (the cache)."""

    name: str
    policy: Callable[[ReplayCost], CheckpointPolicy]
    engine: type[CheckpointEngine] = CheckpointEngine
    cache: type[UnifiedCache] = UnifiedCache
    checkpoints_per_path: int = NO_CAP


@dataclasses.dataclass
class Outcome:
    """What one run has shown; lengths in units.

    Attributes:
        prompt_units: of first admissions.
        hit_units: of these, restored from a state.
        replayed_units: of these, computed again although their KV was cached.
        first_eviction: requests that had arrived at the first one; None if there was none.
    """

    prompt_units: int = 0
    hit_units: int = 0
    replayed_units: int = 0
    num_retracted: int = 0
    num_arrived: int = 0
    first_eviction: int | None = None
    counts: CacheCounts = dataclasses.field(default_factory=CacheCounts)

    @property
    def token_hit_rate(self) -> float:
        return self.hit_units / self.prompt_units if self.prompt_units else 0.0


@dataclasses.dataclass(eq=False)
class _Request:
    session: Session
    index: int
    age: int  # order of arrival
    tokens: array[int]
    done_units: int = 0  # of the answer
    lease: Lease | None = None
    num_kv: int = 0
    started_s: float = 0.0
    epoch: int = 0  # events of earlier ones are void
    was_admitted: bool = False
    was_retracted: bool = False

    @property
    def turn(self) -> Turn:
        return self.session.turns[self.index]


Action = Callable[[_Request], None]


class Simulator:
    """One contender on one trace.

    Args:
        pool_bytes: of states and KV together.
        cost: of the model, per token.
        on_arrival: told the number of each request as it arrives, from 0.
        stop_after: requests to serve of the trace; all if None.
    """

    def __init__(
        self,
        contender: Contender,
        trace: Trace,
        pool_bytes: int,
        cost: ReplayCost,
        *,
        on_arrival: Callable[[int], None] = lambda number: None,
        stop_after: int | None = None,
    ) -> None:
        self.cost = cost.in_units_of(UNIT)
        self.budget = Budget(pool_bytes, self.cost)
        self.policy = contender.policy(self.cost)
        self.kv = BudgetedKV(self.budget)
        limits = CheckpointLimits(
            state_chunk=GRID,
            page_size=GRID,
            track_interval=INTERVAL,
            checkpoints_per_path=contender.checkpoints_per_path,
        )
        slots = BudgetedSlots(self.budget)
        self.cache = contender.cache(RadixTree(GRID, NO_KV), slots, self.kv, policy=self.policy, limits=limits)
        self.cache.budget = self.budget
        self.engine = contender.engine(self.cache, StateMoves(slots, [], _NoDevice()), self.kv)
        self.outcome = Outcome(counts=self.cache.counts)
        self._trace, self._on_arrival, self._stop_after = trace, on_arrival, stop_after
        self._events: list[tuple[float, int, int, Action, _Request]] = []
        self._order = itertools.count()
        self._now = 0.0
        self._waiting: list[_Request] = []
        self._running: list[_Request] = []

    def run(self) -> Outcome:
        for session in self._trace.sessions:
            if session.turns:
                self._at(session.start_s, self._arrive, _Request(session, 0, 0, session.turns[0].prompt[:]))
        while self._events:
            self._now, _, epoch, action, request = heapq.heappop(self._events)
            if epoch == request.epoch:
                action(request)
                self._admit_waiting()
            if self.outcome.first_eviction is None and self.cache.counts.evicted.total():
                self.outcome.first_eviction = self.outcome.num_arrived
        assert not self._running and not self._waiting, f"{len(self._running)} run, {len(self._waiting)} wait for ever"
        return self.outcome

    def _at(self, time_s: float, action: Action, request: _Request) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), request.epoch, action, request))

    def _arrive(self, request: _Request) -> None:
        if self.outcome.num_arrived == self._stop_after:
            return
        request.age = self.outcome.num_arrived
        self._on_arrival(request.age)
        self.outcome.num_arrived += 1
        self._waiting.append(request)

    def _admit_waiting(self) -> None:
        for request in [*self._waiting]:
            if self._admit(request):
                self._waiting.remove(request)

    def _admit(self, request: _Request) -> bool:
        lease = self.engine.admit(f"request {request.age}", None, request.tokens)
        if isinstance(lease, Refusal):
            return False
        first = min(lease.prefill_end, lease.computed + CHUNK)
        request.lease, request.num_kv = lease, lease.computed
        has_room = not self._running or self._protected_bytes() + self._growth_bytes(request) <= self.budget.total
        if not has_room or not self.cache.make_room(self.kv.page_bytes(lease.computed, first)):
            self.engine.discard(lease, self.kv.locs(lease.computed))
            request.lease = None
            assert self._running, f"a pool of {self.budget.total} bytes is too small for a request; give it more"
            return False
        if not request.was_admitted:
            self.outcome.prompt_units += len(request.tokens)
            self.outcome.hit_units += lease.match.state_depth
            self.outcome.replayed_units += lease.match.kv_depth - lease.match.state_depth
            request.was_admitted = True
            if request.turn.aborts_after_s is not None:
                self._at(self._now + request.turn.aborts_after_s, self._abort, request)
        request.started_s = self._now
        self._running.append(request)
        self._prefill(request)
        return True

    def _prefill(self, request: _Request) -> None:
        """One chunk; the last ends when it would, had nothing been cached."""
        lease = self._lease(request)
        end = min(lease.prefill_end, lease.computed + CHUNK)
        if not self._extend(request, end):
            return
        self._forward(self.engine.plan_extend(lease, end))
        self.engine.donate(lease, self.kv.locs(end))
        if end < lease.prefill_end:
            chunks_left = -(-(lease.prefill_end - end) // CHUNK)
            left_s = request.started_s + request.turn.prefill_s - self._now
            self._at(self._now + max(0.0, left_s) / (chunks_left + 1), self._prefill, request)
        else:
            self._decode_on(request)

    def _decode_on(self, request: _Request) -> None:
        """To the next boundary, half the answer where it is to be retracted, or its end."""
        turn, lease = request.turn, self._lease(request)
        stops = [INTERVAL - lease.computed % INTERVAL, len(turn.answer) - request.done_units]
        half = len(turn.answer) // 2
        if turn.is_retracted and not request.was_retracted:
            stops.append(max(1, half - request.done_units))
        length = min(stops)
        ready_s = max(self._now, request.started_s + turn.prefill_s)
        share = length / len(turn.answer)
        self._at(ready_s + share * (turn.duration_s - turn.prefill_s), lambda one: self._decode(one, length), request)

    def _decode(self, request: _Request, length: int) -> None:
        turn, lease = request.turn, self._lease(request)
        end = lease.computed + length
        if not self._extend(request, end):
            return
        for token in turn.answer[request.done_units : request.done_units + length]:
            self.engine.append(lease, token)
        request.tokens += turn.answer[request.done_units : request.done_units + length]
        request.done_units += length
        if length > 1:
            self._forward(StepPlan(lease, lease.computed, end - 1))  # between boundaries a step plans nothing
        self._forward(self.engine.plan_decode(lease))
        if request.done_units == len(turn.answer):
            self._finish(request)
        elif turn.is_retracted and not request.was_retracted and request.done_units >= len(turn.answer) // 2:
            request.was_retracted = True
            self._retract(request)
        else:
            self._decode_on(request)

    def _finish(self, request: _Request) -> None:
        self.engine.finish(self._lease(request), self.kv.locs(request.num_kv))
        self._leave(request)

    def _abort(self, request: _Request) -> None:
        if request.lease is not None:
            self.engine.discard(request.lease, self.kv.locs(request.num_kv))
            self._leave(request)
        elif request in self._waiting:
            self._waiting.remove(request)
            self._next_turn(request)

    def _leave(self, request: _Request) -> None:
        request.lease = None
        request.epoch += 1
        self._running.remove(request)
        self._next_turn(request)

    def _next_turn(self, request: _Request) -> None:
        if request.index + 1 < len(request.session.turns):
            turn = request.session.turns[request.index + 1]
            following = _Request(request.session, request.index + 1, 0, turn.prompt[:])
            self._at(self._now + turn.think_s, self._arrive, following)

    def _retract(self, request: _Request) -> None:
        self.engine.discard(self._lease(request), self.kv.locs(request.num_kv))
        request.lease = None
        request.epoch += 1
        self._running.remove(request)
        self._waiting.insert(0, request)
        self.outcome.num_retracted += 1

    def _extend(self, request: _Request, length: int) -> bool:
        """Room for ``length`` units of a request; False if it had to be retracted for that itself."""
        num_bytes = self.kv.page_bytes(request.num_kv, length)
        while not self.cache.make_room(num_bytes):
            victim = max(self._running, key=lambda running: running.age)
            assert len(self._running) > 1, f"a pool of {self.budget.total} bytes is too small for {length} units"
            self._retract(victim)
            if victim is request:
                return False
        self.budget.take(num_bytes)
        request.num_kv = length
        return True

    def _protected_bytes(self) -> int:
        """What no eviction could free, and what the running requests will still need."""
        tree, cost = self.cache.tree, self.cost
        evictable_states = self.cache.num_states - self.cache.num_protected_states
        evictable_kv = tree.num_tokens - tree.num_protected_tokens
        evictable = evictable_states * cost.state_bytes + evictable_kv * cost.kv_bytes
        return self.budget.used - evictable + sum(map(self._growth_bytes, self._running))

    def _growth_bytes(self, request: _Request) -> int:
        """To the end of the answer: its KV, and the pair of snapshots."""
        length = len(request.turn.prompt) + len(request.turn.answer)
        return PAIR_SLOTS * self.cost.state_bytes + self.kv.page_bytes(request.num_kv, length)

    def _forward(self, plan: StepPlan) -> None:
        self.engine.before_forward([plan])
        self.engine.after_forward([plan])

    def _lease(self, request: _Request) -> Lease:
        assert request.lease is not None, f"request {request.age} does not run"
        return request.lease


def smallest_pool(trace: Trace, cost: ReplayCost) -> int:
    """Bytes with which the largest request of a trace can run alone, its snapshots included."""
    longest = max(len(turn.prompt) + len(turn.answer) for session in trace.sessions for turn in session.turns)
    return SLOTS_PER_REQUEST * cost.state_bytes + (longest + GRID) * UNIT * cost.kv_bytes
