"""The rehearsal runs every kind of step without a request, and touches no memory that a request could have."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.allocator import paged

from sglang_k3.host import rehearsal
from tests.kit.compare import assert_bitwise
from tests.model.fakes import FakeRunner, hybrid_backend
from tests.model.harness import tiny_k3

pytestmark = pytest.mark.sglang


class Rehearsing:
    """A fake runner with a model, and the batches that its backends were asked to prepare."""

    def __init__(self, *, tracks: bool = True) -> None:
        tiny = tiny_k3()
        self.fake = FakeRunner(tiny.config)
        self.fake.req_to_token_pool.req_to_token[0] = 0  # as the host keeps the row of nobody
        for pool in (*self.fake.kv.values(), self.fake.conv, self.fake.temporal):
            pool[:1], pool[:, :1] = 0.0, 0.0
        self.batches: list[SimpleNamespace] = []
        backend = hybrid_backend(self.fake, tiny.config)
        prepare = backend.init_forward_metadata
        backend.init_forward_metadata = lambda batch: (self.batches.append(batch), prepare(batch))
        pool = self.fake.req_to_token_pool
        pool.size = 4
        self.runner = SimpleNamespace(
            device="cpu",
            dtype=torch.float32,
            model=tiny.build(),
            attn_backend=backend,
            req_to_token_pool=pool,
            token_to_kv_pool_allocator=SimpleNamespace(page_size=1),
            model_config=SimpleNamespace(context_len=256),
            server_args=SimpleNamespace(chunked_prefill_size=100, dp_size=1, enable_mamba_extra_buffer=lambda: tracks),
        )

    def steps(self) -> list[tuple[str, int, int]]:
        return [(b.forward_mode.name, b.batch_size, len(b.out_cache_loc) // max(1, b.batch_size)) for b in self.batches]


def test_every_batch_size_and_prompts_up_to_a_chunk() -> None:
    rehearsing = Rehearsing()
    rehearsal.rehearse(rehearsing.runner, [1, 3], has_k3_cache=False)
    steps = rehearsing.steps()
    assert steps[-2:] == [("DECODE", 1, 1), ("DECODE", 3, 1)]
    prompts = {length for mode, size, length in steps if mode == "EXTEND" and size == 1}
    assert prompts == {1, 2, 7, 16, 24, 33, 64, 100}
    assert ("EXTEND", 4, 24) in steps and ("EXTEND", 8, 24) not in steps
    assert any(batch.forward_mode.name == "EXTEND" and batch.extend_prefix_lens_cpu[0] for batch in rehearsing.batches)


@pytest.mark.parametrize(
    ("tracks", "has_k3_cache", "expected"),
    [
        (True, False, {("DECODE", True), ("EXTEND", True)}),
        (False, False, {("DECODE", False), ("EXTEND", False)}),
        (False, True, {("DECODE", False), ("EXTEND", False), ("EXTEND", True)}),
    ],
)
def test_states_are_asked_for_as_the_prefix_cache_will_and_only_slots_of_nobody_are_written(
    tracks: bool, has_k3_cache: bool, expected: set[tuple[str, bool]]
) -> None:
    rehearsing = Rehearsing(tracks=tracks)
    pools = [*rehearsing.fake.kv.values(), *rehearsing.fake.conv, *rehearsing.fake.temporal]
    before = [pool.clone() for pool in pools]
    rehearsal.rehearse(rehearsing.runner, [2], has_k3_cache=has_k3_cache)
    asked = {(batch.forward_mode.name, batch.mamba_track_mask is not None) for batch in rehearsing.batches}
    assert asked == expected
    for pool, was in zip(pools, before, strict=True):
        assert_bitwise(pool[1:], was[1:], "slots of requests")


def test_the_copies_of_k3_s_cache_are_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    monkeypatch.setattr(rehearsal, "state_copy", lambda states, **_: copied.append(states.data_ptr()))
    rehearsing = Rehearsing(tracks=False)
    rehearsal.rehearse(rehearsing.runner, [2], has_k3_cache=True)
    assert copied == [rehearsing.fake.conv.data_ptr(), rehearsing.fake.temporal.data_ptr()]


class Launches:
    """In place of a Triton kernel: the sizes and types that it would be compiled for."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.dtypes: set[tuple[torch.dtype, ...]] = set()

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self.launch

    def launch(self, *args: Any) -> None:
        *tensors, size, _ = args
        self.sizes.append(size)
        self.dtypes.add(tuple(x.dtype for x in tensors))


@pytest.mark.parametrize(("most", "sizes"), [(1, [1]), (4, [1, 2, 4]), (6, [1, 2, 4, 8])])
def test_the_host_s_kernels_that_find_places_are_compiled_for_any_number_of_requests(
    most: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    extend, decode = Launches(), Launches()
    monkeypatch.setattr(paged, "alloc_extend_kernel", extend)
    monkeypatch.setattr(paged, "alloc_decode_kernel", decode)
    rehearsing = Rehearsing()
    runner = rehearsing.runner
    runner.req_to_token_pool.size = most
    runner.token_to_kv_pool_allocator = allocator = paged.PagedTokenToKVPoolAllocator(
        size=2 * 16, page_size=16, dtype=torch.float32, device="cpu", kvcache=None, need_sort=False
    )
    rehearsal.rehearse(runner, [1], has_k3_cache=True)
    assert extend.sizes == decode.sizes == sizes
    # What a decoding request ended with is read from the host's table of int32, what a prompt did from its prefix.
    assert extend.dtypes == {(torch.int64,) * 5}
    assert decode.dtypes == {(torch.int64, torch.int32, torch.int64, torch.int64)}
    assert allocator.free_pages.tolist() == [1, 2], "all that were free are free"
