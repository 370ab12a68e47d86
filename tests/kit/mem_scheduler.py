"""A scheduler in miniature over the checkpoint engine and the fake model: chunked and mixed batches, results that are
handled some steps late as under an overlap schedule, retraction for want of KV, aborts at any moment, sessions.

Everything that a test wants to know is counted: tokens prefilled, tokens cached per request, slots per request.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Hashable
from typing import Any

import torch

from sglang_k3.mem.checkpoints import CheckpointCache
from sglang_k3.mem.engine import CheckpointEngine, Refusal
from sglang_k3.mem.lease import Lease, StepPlan
from sglang_k3.mem.ledger import check_kv, check_slots
from sglang_k3.mem.limits import CheckpointLimits, running_requests
from sglang_k3.mem.policy_names import DEFAULT_POLICY, PolicyName, create_policy
from sglang_k3.mem.radix_tree import RadixTree
from sglang_k3.mem.state_moves import DeviceWork, StateMoves
from sglang_k3.mem.state_slots import Owner, SlotId, StateSlots
from sglang_k3.testing.cache_contest import K3_COST
from tests.kit.delayed_device import DelayedStream
from tests.kit.fake_model import FakeModel, Row, answer_alone
from tests.kit.kv_pages import KVPages

NO_KV = torch.empty(0, dtype=torch.int64)


@dataclasses.dataclass(eq=False)
class Request:
    name: str
    prompt: list[int]
    num_tokens: int
    namespace: Hashable = None
    session: str | None = None
    lease: Lease | None = None
    kv_locs: torch.Tensor = NO_KV
    device_tokens: list[int] = dataclasses.field(default_factory=list)
    answer: list[int] = dataclasses.field(default_factory=list)
    cached: list[int] = dataclasses.field(default_factory=list)  # tokens, per admission
    is_over: bool = False


@dataclasses.dataclass
class Launched:
    """A forward whose results are not handled yet."""

    work: DeviceWork
    rows: list[tuple[Request, Lease, StepPlan]]
    results: list[int]


class Scheduler:
    """One server.

    Args:
        chunk: tokens that one forward prefills at most.
        lag: forwards that are launched before the results of one are handled; 1 is the overlap schedule.
        is_poisoned: what is freed becomes NaN, behind everything that was enqueued before.
        policy: which state or leaf goes when room is needed.
    """

    def __init__(
        self,
        limits: CheckpointLimits,
        *,
        num_slots: int,
        num_pages: int,
        chunk: int,
        lag: int = 1,
        stream: DelayedStream | None = None,
        is_poisoned: bool = True,
        max_running: int | None = None,
        policy: PolicyName = DEFAULT_POLICY,
    ) -> None:
        self.limits, self.chunk, self.lag = limits, chunk, lag
        self.max_running = max_running or running_requests(num_slots)
        self.stream = stream or DelayedStream()
        self.model = FakeModel(num_slots, num_pages * limits.page_size)
        self.kv = KVPages(num_pages, limits.page_size, self._poison_kv if is_poisoned else lambda locs: None)
        self.slots = PoisonedSlots(num_slots, self) if is_poisoned else StateSlots(num_slots)
        self.tree = RadixTree(limits.page_size, NO_KV)
        self.cache = CheckpointCache(
            self.tree, self.slots, self.kv, policy=create_policy(policy, K3_COST), limits=limits
        )
        moves = StateMoves(self.slots, [self.model.conv, self.model.recurrent], self.stream)
        self.engine = CheckpointEngine(self.cache, moves, self.kv)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.launched: collections.deque[Launched] = collections.deque()
        self.num_prefilled = 0
        self.most_slots = 0
        self.most_slots_away_from_boundaries = 0
        self.num_retracted = 0

    def arrive(self, name: str, prompt: list[int], num_tokens: int, **options: Hashable) -> Request:
        request = Request(name, prompt, num_tokens, **options)
        self.waiting.append(request)
        return request

    def step(self) -> None:
        """Launch one forward over what runs, then handle the results that are due."""
        self._donate_chunks()
        self._admit()
        plans = self._plan()
        if plans:
            self._launch(plans)
        while len(self.launched) > (self.lag if plans else 0):
            self._handle(self.launched.popleft())

    def run(self, *, max_steps: int = 10_000) -> None:
        """Until nothing waits or runs."""
        for _ in range(max_steps):
            if not (self.waiting or self.running):
                break
            self.step()
        assert not (self.waiting or self.running), f"{self.waiting} wait, {self.running} run after {max_steps} steps"
        self.step()
        self.stream.drain()

    def serve(self, prompt: list[int], num_tokens: int = 4, **options: Hashable) -> Request:
        """One request from its arrival to its end."""
        request = self.arrive(f"r{len(prompt)}", prompt, num_tokens, **options)
        self.run()
        return request

    def abort(self, request: Request) -> None:
        """At any moment: the client is gone."""
        if request in self.waiting:
            self.waiting.remove(request)
        else:
            self._leave(request)
        request.is_over = True

    def retract(self, request: Request) -> None:
        """Back to the queue, with what it has answered so far."""
        self._leave(request)
        self.waiting.insert(0, request)
        self.num_retracted += 1

    def check(self) -> None:
        """I1 and I2, and Oracle B if the device is not late: every cached state counts its tokens."""
        check_slots(self.engine)
        held = [request.kv_locs[request.lease.node.depth :] for request in self.running]
        check_kv(self.engine, num_pages=self.kv.num_pages, free_pages=self.kv.free_pages, held=held)
        if not self.stream.late:
            counts = self.model.recurrent[0, :, 1].tolist()
            for node in self.tree.nodes():
                assert node.checkpoint is None or counts[node.checkpoint.slot_id] == node.depth, f"I1: {node}"

    def _admit(self) -> None:
        for request in [*self.waiting]:
            if len(self.running) == self.max_running:
                break
            tokens = request.prompt + request.answer
            lease = self.engine.admit(request.name, request.namespace, tokens)
            if isinstance(lease, Refusal):
                continue
            kv_locs = self.cache.kv_locs(lease.node, 0)
            first = min(len(tokens), lease.computed + self.chunk)
            self._make_room(kv_locs, first)
            extended = self.kv.try_extend(kv_locs, first)
            if extended is None:  # reserved, not committed: nothing stays behind
                self.engine.discard(lease, kv_locs)
                break
            request.lease, request.kv_locs, request.device_tokens = lease, extended, tokens
            request.cached.append(lease.computed)
            self.waiting.remove(request)
            self.running.append(request)

    def _plan(self) -> list[tuple[Request, StepPlan]]:
        plans, budget = [], self.chunk
        for request in [*self.running]:
            if request not in self.running:
                continue  # retracted for an earlier one
            lease = request.lease
            if lease.is_prefilling:
                end = min(lease.prefill_end, lease.computed + budget)
                if end == lease.computed or not self._extend_kv(request, end):
                    continue
                budget -= end - lease.computed
                self.num_prefilled += end - lease.computed
                plans.append((request, self.engine.plan_extend(lease, end)))
            elif self._extend_kv(request, lease.computed + 1):
                start = lease.computed
                is_quiet = self.engine.decode_quietly(lease)
                plan = StepPlan(lease, start, start + 1) if is_quiet else self.engine.plan_decode(lease)
                plans.append((request, plan))
        return [(request, plan) for request, plan in plans if plan.lease is request.lease]

    def _launch(self, plans: list[tuple[Request, StepPlan]]) -> None:
        self._count_slots([plan for _, plan in plans])
        due = [plan for _, plan in plans if plan.end > plan.lease.computed]  # the others decode quietly
        self.engine.before_forward(due)
        results: list[int] = []
        rows = [
            Row(
                plan.lease.working,
                plan.start,
                plan.end,
                request.device_tokens,
                request.kv_locs,
                (plan.inner.slot_id, plan.inner.depth) if plan.inner else None,
            )
            for request, plan in plans
        ]
        work = DeviceWork("forward", functools.partial(self._forward, rows, results), *self._touched(rows))
        self.stream.enqueue(work)
        self.engine.after_forward(due)
        launched = [(request, plan.lease, plan) for request, plan in plans]
        self.launched.append(Launched(work, launched, results))

    def _forward(self, rows: list[Row], results: list[int]) -> None:
        for row in rows:
            token = self.model.forward(row)
            if row.end == len(row.tokens):
                row.tokens.append(token)
            results.append(token)

    def _handle(self, launched: Launched) -> None:
        self.stream.wait_for(launched.work)
        for (request, lease, plan), token in zip(launched.rows, launched.results, strict=True):
            if request.lease is not lease or plan.end < lease.prefill_end:
                continue  # gone meanwhile, or not the last chunk
            self.engine.append(lease, token)
            request.answer.append(token)
            if len(request.answer) == request.num_tokens:
                self.running.remove(request)
                request.lease, request.is_over = None, True
                self.engine.finish(lease, request.kv_locs, session=request.session)
                assert request.answer == answer_alone(tuple(request.prompt), request.num_tokens), request
            elif plan.end == lease.prefill_end:
                self._donate(request)

    def _donate_chunks(self) -> None:
        """Between two chunks, before the next is planned; its results may be on their way."""
        for request in self.running:
            if request.lease.is_prefilling:
                self._donate(request)

    def _donate(self, request: Request) -> None:
        lease = request.lease
        moved = self.engine.donate(lease, request.kv_locs[: lease.computed])
        end = lease.node.depth
        request.kv_locs = torch.cat([request.kv_locs[: end - len(moved)], moved, request.kv_locs[end:]])

    def _extend_kv(self, request: Request, length: int) -> bool:
        """Room for ``length`` tokens; if need be, the youngest that runs is retracted, at last the request itself."""
        while True:
            self._make_room(request.kv_locs, length)
            extended = self.kv.try_extend(request.kv_locs, length)
            if extended is not None:
                request.kv_locs = extended
                return True
            victim = self.running[-1]
            self.retract(victim)
            if victim is request:
                return False

    def _make_room(self, kv_locs: torch.Tensor, length: int) -> None:
        short = length - len(kv_locs) - len(self.kv.free_pages) * self.limits.page_size
        if short > 0:
            self.engine.evict_kv(short)

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
        lease, request.lease = request.lease, None
        self.engine.discard(lease, request.kv_locs)

    def _count_slots(self, plans: list[StepPlan]) -> None:
        """Slots that a request owns or protects: with those that this forward is about to fill, and without."""
        for plan in plans:
            lease = plan.lease
            slots = len(lease.slot_ids) + (lease.source is not None)
            self.most_slots = max(self.most_slots, slots)
            away = slots - (plan.inner is not None) - (plan.at_end is not None)
            self.most_slots_away_from_boundaries = max(self.most_slots_away_from_boundaries, away)

    def _touched(self, rows: list[Row]) -> tuple[frozenset[SlotId], frozenset[SlotId]]:
        """What a forward reads and writes: slots, and KV locations as slots below zero."""
        reads, writes = set(), set()
        for row in rows:
            writes |= {row.slot_id, *([row.inner[0]] if row.inner else [])}
            reads |= {row.slot_id}
            if self.stream.late:
                reads |= _kv_touched(row.kv_locs[: row.start])
                writes |= _kv_touched(row.kv_locs[row.start : row.end])
        return frozenset(reads), frozenset(writes)

    def poison_slot(self, slot_id: SlotId) -> None:
        def run() -> None:
            self.model.recurrent[:, slot_id] = torch.nan
            self.model.conv[:, slot_id] = torch.nan

        self.stream.enqueue(DeviceWork("poison", run, frozenset(), frozenset({slot_id})))

    def _poison_kv(self, kv_locs: torch.Tensor) -> None:
        def run() -> None:
            self.model.kv[kv_locs] = torch.nan

        self.stream.enqueue(DeviceWork("poison", run, frozenset(), _kv_touched(kv_locs)))


class PoisonedSlots(StateSlots):
    """What is free is NaN, behind all that was enqueued before it was freed."""

    def __init__(self, size: int, scheduler: Scheduler) -> None:
        super().__init__(size)
        self._scheduler = scheduler

    def free(self, slot_id: SlotId, owner: Owner) -> None:
        super().free(slot_id, owner)
        self._scheduler.poison_slot(slot_id)


def _kv_touched(kv_locs: torch.Tensor) -> frozenset[SlotId]:
    return frozenset(SlotId(-1 - loc) for loc in kv_locs.tolist())


def small_server(
    *, page: int = 1, chunk: int = 64, num_slots: int = 64, num_tokens: int = 8192, cap: int = 64, **options: Any
) -> Scheduler:
    """A server on the grid of 64 tokens, with room for everything unless said otherwise."""
    limits = CheckpointLimits(state_chunk=64, page_size=page, track_interval=256, checkpoints_per_path=cap)
    return Scheduler(limits, num_slots=num_slots, num_pages=num_tokens // page, chunk=chunk, **options)
