"""Whatever prompts come together, the rehearsal has listed every kernel that they launch: none waits for a compiler.

Triton compiles a kernel apart for an integer that is 1 or a multiple of 16; one that follows the requests, as the
number of tokens or of sequences, must not be such an integer, or any number of them must be rehearsed.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sglang_k3.env import triton_interprets

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(triton_interprets(), reason="the interpreter compiles nothing"),
]

SCRIPT = r"""
import dataclasses, json, random, sys
from types import SimpleNamespace

import torch

preset, top = sys.argv[1:]
sys.path.insert(0, f"{top}/benchmarks")
import slice_model
from triton.runtime.driver import driver

from sglang_k3.host import rehearsal
from sglang_k3.kernels import triton_support
from sglang_k3.kernels.compile_farm import CompileOnlyDriver, held_back
from sglang_k3.testing.presets import GPU_PRESETS, PRESETS

triton_support.triton_interprets = lambda: True  # the kernels are chosen on a CPU, and only listed
slice_model.DEVICE = "cpu"
torch.nn.functional.linear = lambda x, weight, bias=None: x.new_empty(*x.shape[:-1], weight.shape[0])
sizes = {"num_layers": 4, "full_attention_layers": (4,), "dense_width": 256, "vocab_size": 512}
slice_model.SLICE_SIZES = dataclasses.replace((PRESETS | GPU_PRESETS)[preset], **sizes)

with slice_model.one_process():
    unit = slice_model.UnitSlice(1)
    pools = slice_model.Pools(unit, 1, 8192)
    driver.set_active(CompileOnlyDriver(90))
    runner = SimpleNamespace(
        device="cpu",
        dtype=torch.bfloat16,
        attn_backend=pools.backend,
        req_to_token_pool=SimpleNamespace(size=64, mamba_pool=pools.req_to_token_pool.mamba_pool),
        token_to_kv_pool_allocator=SimpleNamespace(page_size=1),
        model=SimpleNamespace(model=unit.model.model),
        model_config=SimpleNamespace(context_len=32768),
        server_args=SimpleNamespace(
            chunked_prefill_size=8192, dp_size=1, enable_mamba_extra_buffer=lambda: False
        ),
    )
    rng = random.Random(0)
    with unit.as_rank(), held_back() as jobs:
        rehearsal.rehearse(runner, (1, 2, 4, 8, 16, 64), has_k3_cache=True)
        print(len(jobs))
        for _ in range(80):
            size = rng.choice((1, 1, 2, 3, 7, 16))
            lens = [rng.choice((1, 2, 16, 64, 128, rng.randrange(1, 300), rng.randrange(1, 1500))) for _ in range(size)]
            cached = [rng.choice((0, 0, 64, 2048, 64 * rng.randrange(99), rng.randrange(3000))) for _ in range(size)]
            known = len(jobs)
            batch = rehearsal._extend(runner, lens, cached, rng.random() < 0.5)
            with torch.no_grad():
                rehearsal._forward(runner, batch, sum(lens))
            for job in map(json.loads, jobs[known:]):
                print(f"{job['name']} was not rehearsed for {lens=} {cached=}")
"""


@pytest.mark.parametrize("preset", ["gpu", pytest.param("odd", marks=pytest.mark.full)])
def test_of_prompts_of_any_lengths_that_come_together(preset: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, preset, str(Path(__file__).parents[2])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rehearsed, *missed = done.stdout.splitlines()
    assert int(rehearsed) > 20
    assert missed == []
