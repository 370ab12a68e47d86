"""No product on a Hopper GPU is left running while its operands change. Looked up in what Triton compiles, without one.

Triton 3.6 splits a product whose left operand is in registers and lets the parts of one round run on into the next,
which writes those registers anew: right results most of the time, and wrong ones when the GPU is busy. Whoever
multiplies from registers inside a loop has to read the sum there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_k3.env import triton_interprets

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(triton_interprets(), reason="the interpreter compiles nothing"),
]

SCRIPT = r"""
import importlib, json, re
import torch
from triton.runtime.driver import driver
from sglang_k3.kernels.compile_farm import CompileOnlyDriver, held_back
from sglang_k3.kernels.kda_prefill.triton_impl import kda_prefill
from sglang_k3.kernels.latent_experts.triton_impl import latent_experts
from sglang_k3.kernels.mla_prefill.triton_impl import mla_prefill

driver.set_active(CompileOnlyDriver(90))

def new(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")

def int32(*shape):
    return new(*shape, dtype=torch.int32)

def route(dtype, num_tokens):
    scales = {"w13_scale": new(2, 128, 8, dtype=torch.uint8), "w2_scale": new(2, 256, 2, dtype=torch.uint8)}
    w13, w2 = new(2, 128, 128, dtype=torch.uint8), new(2, 256, 32, dtype=torch.uint8)
    z, ids = new(num_tokens, 256, dtype=dtype), int32(num_tokens, 2)
    weights = new(num_tokens, 2, dtype=torch.float32)
    latent_experts(z, weights, ids, w13, w2, **scales, beta=4.0, linear_beta=25.0)

def recur():
    heads, pool = [new(70, 2, 128) for _ in range(3)], new(3, 2, 128, 128, dtype=torch.float32)
    g, beta = new(70, 2, 128, dtype=torch.float32), new(70, 2, dtype=torch.float32)
    kda_prefill(*heads, g, beta, ssm_states=pool, cu_seqlens=int32(2), cache_indices=int32(1),
                has_initial_state=new(1, dtype=torch.bool), scale=0.1, lower_bound=-5.0)

def attend():
    mla_prefill(new(70, 2, 192), new(90, 2, 128), new(90, 2, 128), k_shared=new(90, 64), cu_seqlens_q=int32(2),
                cu_seqlens_k=int32(2), causal=True, scale=0.1)

with held_back() as jobs:
    for dtype in (torch.bfloat16, torch.float16):
        for num_tokens in (16, 32, 300):
            route(dtype, num_tokens)
    recur()
    attend()
from_registers = set()
for job in map(json.loads, jobs):
    kernel = getattr(importlib.import_module(job["module"]), job["name"]).preload(job["data"])
    code = kernel.asm["ttgir"]
    if not re.search(r"ttng\.warp_group_dot %.* : tensor<", code):
        continue
    from_registers.add(job["name"])
    running = set(re.findall(r"warp_group_dot_wait .*pendings = (\d+)", code)) - {"0"}
    assert not running, f"{job['name']} goes on while {running} products run"
print(*sorted(from_registers))
"""


def test_products_from_registers_end_in_their_round(tmp_path: Path) -> None:
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == ["_expert_linear", "_over_chunks", "_prefill", "_within_chunks"]
