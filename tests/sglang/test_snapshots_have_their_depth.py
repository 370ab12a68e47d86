"""A snapshot that the host hands to its tree encodes as many tokens as the host says, whatever was scheduled between.

One request is played through the host's own bookkeeping as the overlap schedule does it: launch a step, then handle the
result of the one before. Every schedule of a few steps is tried, with every moment to finish.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers import schedule_batch
from sglang.srt.managers.scheduler_components import batch_result_processor
from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool

from sglang_k3.integration.seam_snapshots import _noted_slot, _written_snapshot

pytestmark = pytest.mark.sglang
INTERVAL = 4
STEPS = 8


class OurProcessor(SchedulerBatchResultProcessor):
    def _mamba_check_track_boundary(self, *args: Any) -> tuple[bool, int]:
        return _written_snapshot(SchedulerBatchResultProcessor._mamba_check_track_boundary, self, *args)


class OurPool(HybridReqToTokenPool):
    def get_mamba_ping_pong_keep_idx(self, req: Any) -> int:
        return _noted_slot(HybridReqToTokenPool.get_mamba_ping_pong_keep_idx, self, req)


class Slots:
    """The host's allocator, and what was written to each slot."""

    def __init__(self) -> None:
        self.depths: dict[int, int | None] = {}

    def alloc(self, count: int) -> torch.Tensor:
        new = [len(self.depths) + n for n in range(count)]
        self.depths.update(dict.fromkeys(new))
        return torch.tensor(new)

    def free(self, slots: torch.Tensor) -> None:
        self.depths[int(slots)] = None


class Play:
    """One request from its prefill to its end."""

    def __init__(self, processor: type, pool: type, prompt: int, *, lazy: bool) -> None:
        self.lazy, self.slots = lazy, Slots()
        self.pool = pool.__new__(pool)
        self.pool.enable_mamba_extra_buffer_lazy = lazy
        self.pool.mamba_ping_pong_track_buffer_size = 2
        self.pool.mamba_allocator = self.slots
        self.pool.req_index_to_mamba_ping_pong_track_buffer_mapping = torch.zeros(1, 2, dtype=torch.int64)
        self.processor = processor.__new__(processor)
        object.__setattr__(self.processor, "server_args", schedule_batch.get_server_args())  # a frozen dataclass
        second = torch.tensor([-1]) if lazy else self.slots.alloc(1)
        self.req = SimpleNamespace(
            rid="r",
            req_pool_idx=0,
            kv_committed_len=prompt,
            mamba_ping_pong_track_buffer=torch.cat([self.slots.alloc(1), second]),
            mamba_next_track_idx=0,
            mamba_last_track_seqlen=prompt // INTERVAL * INTERVAL,
            mamba_lazy_is_insert=True,
            finished=lambda: self.finishing,
        )
        self.finishing = False
        self.write(self.req.mamba_last_track_seqlen)
        if not lazy:
            self.req.mamba_next_track_idx = 1

    def write(self, depth: int) -> None:
        self.slots.depths[int(self.req.mamba_ping_pong_track_buffer[self.req.mamba_next_track_idx])] = depth

    def launch(self) -> Any:
        """A decode step; its part of the batch."""
        self.req.kv_committed_len += 1
        length = self.req.kv_committed_len
        lengths = torch.tensor([length])
        if self.lazy:
            batch = SimpleNamespace(reqs=[self.req], seq_lens_cpu=lengths, req_to_token_pool=self.pool)
            schedule_batch.ScheduleBatch.mamba_lazy_prealloc_at_boundary(batch, INTERVAL)
        if length % INTERVAL == 0:
            self.write(length)
        spec = SimpleNamespace(is_none=lambda: True)
        return SimpleNamespace(seq_lens_cpu=lengths, req_to_token_pool=self.pool, spec_algorithm=spec)

    def handed_over(self) -> tuple[int | None, int | None]:
        """What the host takes the snapshot to encode, and what it does."""
        slot = int(self.req.mamba_ping_pong_track_buffer[self.pool.get_mamba_ping_pong_keep_idx(self.req)])
        return self.req.mamba_last_track_seqlen, self.slots.depths.get(slot)

    def run(self, schedule: tuple[bool, ...], last_result: int) -> Iterator[tuple[int | None, int | None]]:
        """Everything handed over. True in the schedule is a step of ours, False a prefill of others."""
        pending: Any = "prefill"
        handled = 0
        for ours in schedule:
            launched = self.launch() if ours else None
            if pending == "prefill":
                yield self.handed_over()
                self.pool.donate_mamba_ping_pong_slot(self.req, self.slots.alloc(1))
                self.req.mamba_last_track_seqlen = None
            elif pending is not None:
                handled += 1
                self.finishing = handled == last_result
                self.processor._mamba_prefix_cache_update(self.req, pending, None, 0)
                if self.finishing:
                    if self.req.mamba_last_track_seqlen is not None and self.req.mamba_lazy_is_insert:
                        yield self.handed_over()
                    return
            pending = launched


def wrong_snapshots(processor: type, pool: type, *, lazy: bool) -> int:
    wrong = 0
    for prompt in range(INTERVAL, 2 * INTERVAL):
        for schedule in itertools.product((False, True), repeat=STEPS):
            for last_result in range(1, sum(schedule) + 1):
                play = Play(processor, pool, prompt, lazy=lazy)
                wrong += any(noted != held for noted, held in play.run(schedule, last_result))
    return wrong


@pytest.fixture(params=[False, True], ids=["extra_buffer", "extra_buffer_lazy"])
def lazy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    args = SimpleNamespace(mamba_track_interval=INTERVAL, enable_mamba_extra_buffer_lazy=lambda: request.param)
    for module in (schedule_batch, batch_result_processor):
        monkeypatch.setattr(module, "get_server_args", lambda: args)
    return request.param


def test_every_snapshot_has_the_depth_that_is_noted(lazy: bool) -> None:
    assert wrong_snapshots(OurProcessor, OurPool, lazy=lazy) == 0


def test_without_the_seam_some_have_not(lazy: bool) -> None:
    """When this fails, the seam can go."""
    assert wrong_snapshots(SchedulerBatchResultProcessor, HybridReqToTokenPool, lazy=lazy) > 0
