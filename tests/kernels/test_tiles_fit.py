"""The largest tiles fit into the shared memory of the GPUs that run them. Looked up in what Triton compiles."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_k3.env import triton_interprets

pytestmark = pytest.mark.skipif(triton_interprets(), reason="the interpreter compiles nothing")

SCRIPT = r"""
import importlib, json, sys
import torch
from triton.runtime.driver import driver
from sglang_k3.kernels.compile_farm import CompileOnlyDriver, held_back
from sglang_k3.kernels.latent_experts.triton_impl import latent_experts
from sglang_k3.kernels.mla_decode.triton_impl import mla_decode
from sglang_k3.kernels.mla_prefill.triton_impl import mla_prefill

driver.set_active(CompileOnlyDriver(int(sys.argv[1])))

def new(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")

spans, slots = new(2, 2, dtype=torch.int64), new(200, dtype=torch.int32)
with held_back() as jobs:
    for heads in (12, 24, 96):
        lists = {"kv_spans": spans, "kv_indices": slots, "max_len": 100}
        mla_decode(new(2, heads, 576), new(320, 576), **lists, scale=1.0, v_dim=512)
    for own, shared in ((128, 64), (192, None), (64, 64)):  # the largest that are supported, and a small one
        lens = new(3, dtype=torch.int32)
        k_shared = None if shared is None else new(90, shared)
        mla_prefill(new(70, 2, own + (shared or 0)), new(90, 2, own), new(90, 2, 128), k_shared=k_shared,
                    cu_seqlens_q=lens, cu_seqlens_k=lens, causal=True, scale=0.1)
    for num_tokens, num_experts in ((24, 16), (16, 2), (100, 2), (300, 2)):  # 3, 16, 100 and 300 choices an expert
        u8, ids = torch.uint8, new(num_tokens, 2, dtype=torch.int32)
        packed = new(num_experts, 128, 128, dtype=u8), new(num_experts, 256, 32, dtype=u8)
        scales = {"w13_scale": new(num_experts, 128, 8, dtype=u8), "w2_scale": new(num_experts, 256, 2, dtype=u8)}
        weights = new(num_tokens, 2, dtype=torch.float32)
        latent_experts(new(num_tokens, 256), weights, ids, *packed, **scales, beta=4.0, linear_beta=25.0)
for job in map(json.loads, jobs):
    kernel = getattr(importlib.import_module(job["module"]), job["name"]).preload(job["data"])
    print(kernel.metadata.shared)
"""


@pytest.mark.parametrize(
    ("capability", "kib"),
    [
        (90, 227),  # in CI because it is the one that we run on
        pytest.param(89, 99, marks=pytest.mark.full),  # the least
        pytest.param(80, 163, marks=pytest.mark.full),
        pytest.param(120, 99, marks=pytest.mark.full),
    ],
)
def test_every_tile_fits_into_shared_memory(tmp_path: Path, capability: int, kib: int) -> None:
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", SCRIPT, str(capability)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    needed = [int(line) for line in done.stdout.split()]
    assert len(needed) > 15 and max(needed) <= kib * 1024
