"""The rehearsal runs every kind of step without a request, and touches no memory that a request could have."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

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
            model_config=SimpleNamespace(context_len=256),
            server_args=SimpleNamespace(chunked_prefill_size=100, dp_size=1, enable_mamba_extra_buffer=lambda: tracks),
        )

    def steps(self) -> list[tuple[str, int, int]]:
        return [(b.forward_mode.name, b.batch_size, len(b.out_cache_loc) // max(1, b.batch_size)) for b in self.batches]


def test_every_batch_size_and_prompts_up_to_a_chunk() -> None:
    rehearsing = Rehearsing()
    rehearsal.rehearse(rehearsing.runner, [1, 3])
    steps = rehearsing.steps()
    assert steps[:2] == [("DECODE", 1, 1), ("DECODE", 3, 1)]
    prompts = {length for mode, size, length in steps if mode == "EXTEND" and size == 1}
    assert prompts == {1, 2, 7, 16, 24, 33, 64, 100}
    assert ("EXTEND", 4, 24) in steps and ("EXTEND", 8, 24) not in steps
    assert any(batch.forward_mode.name == "EXTEND" and batch.extend_prefix_lens_cpu[0] for batch in rehearsing.batches)


@pytest.mark.parametrize("tracks", [True, False])
def test_only_the_slots_of_nobody_are_written(tracks: bool) -> None:
    rehearsing = Rehearsing(tracks=tracks)
    pools = [*rehearsing.fake.kv.values(), *rehearsing.fake.conv, *rehearsing.fake.temporal]
    before = [pool.clone() for pool in pools]
    rehearsal.rehearse(rehearsing.runner, [2])
    assert all((batch.mamba_track_mask is not None) == tracks for batch in rehearsing.batches)
    for pool, was in zip(pools, before, strict=True):
        assert_bitwise(pool[1:], was[1:], "slots of requests")
