"""A pool may be larger than 32 bits can count: every op finds its slots behind 2**31 elements as well as before.

A case is run twice, on its own pool and on one of the same values whose slots lie so far apart that half of those it
uses begin beyond. Around the far pool there is room for wrapped addresses, so that they read zeros instead of crashing.
"""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sglang_k3.env import triton_interprets
from sglang_k3.kernels import OPS
from sglang_k3.kernels.mla_decode import mla_decode
from tests.kit.compare import assert_bitwise
from tests.kit.ops import clone_pool

LIMIT = 2**31
# The argument that is a pool of slots, and which of its dimensions counts them.
POOLS = {
    "kda_decode": ("ssm_states", 0),
    "kda_prefill": ("ssm_states", 0),
    "kv_gather": ("kv_pool", 0),
    "kv_scatter": ("kv_pool", 0),
    "mla_decode": ("kv_pool", 0),
    "short_conv_decode": ("conv_states", 0),
    "short_conv_prefill": ("conv_states", 0),
    "state_copy": ("states", 1),
}
SLOT_ARGUMENTS = ("cache_indices", "dst_indices", "kv_indices", "loc", "src_indices", "track_indices")


def arguments_of(op):
    """The cheapest case that uses several slots, its arguments by name."""
    cases = importlib.import_module(f"{OPS[op]}.cases")
    signature = inspect.signature(getattr(importlib.import_module(OPS[op]), op))
    for case in sorted((case for case in cases.CASES if not case.marks), key=cases.cost):
        inputs = cases.make_inputs(case, torch.device("cpu"))
        bound = signature.bind(*inputs.args, **inputs.kwargs)
        if len(used_slots(bound.arguments)) > 2:
            return bound
    raise AssertionError(f"{op} has no case with three slots")


def used_slots(arguments):
    """Slots beyond the first, in order."""
    listed = [arguments[name].flatten() for name in SLOT_ARGUMENTS if arguments.get(name) is not None]
    return [slot for slot in torch.cat(listed).unique().tolist() if slot > 0]


def far_copy(pool, slot_dim, used, folder):
    """A pool of the same values whose middle used slot begins just beyond the limit."""
    slots, rest = pool.shape[slot_dim], pool.select(slot_dim, 0)
    slot_stride = LIMIT // used[len(used) // 2] + rest.numel()
    strides = list(torch.empty(rest.shape, device="meta").stride())
    strides.insert(slot_dim, slot_stride)
    reach = LIMIT + slots * slot_stride
    memory = allocate(reach, pool.dtype, pool.device, folder)
    far = memory.as_strided(pool.shape, strides, LIMIT)
    far.copy_(pool)
    return far


def allocate(elements, dtype, device, folder):
    """Memory on the device; on a CPU a sparse file, of which only the touched pages exist."""
    if device.type != "cpu":
        return torch.zeros(elements, dtype=dtype, device=device)
    return torch.from_file(str(Path(folder) / "pool"), shared=True, size=elements, dtype=dtype)


@pytest.mark.parametrize("op", POOLS)
def test_slots_beyond_are_found(op, device, tmp_path):
    fn = getattr(importlib.import_module(OPS[op]), op)
    name, slot_dim = POOLS[op]
    bound = arguments_of(op)
    for key, value in bound.arguments.items():
        if torch.is_tensor(value):
            bound.arguments[key] = value.to(device)
    used = used_slots(bound.arguments)
    near = clone_pool(bound.arguments[name])
    far = far_copy(near, slot_dim, used, tmp_path)
    assert far.stride(slot_dim) < LIMIT < used[-1] * far.stride(slot_dim)
    results = []
    for pool in (near, far):
        bound.arguments[name] = pool
        result = fn(*bound.args, **bound.kwargs)
        results.append(result if isinstance(result, tuple) else () if result is None else (result,))
    for n, (expected, actual) in enumerate(zip(*results, strict=True)):
        assert_bitwise(actual, expected, f"result {n}")
    assert_bitwise(far.contiguous(), near.contiguous(), name)


def test_a_wrapped_address_finds_nothing(tmp_path):
    """What the test above would see of an op that computes addresses in 32 bits."""
    pool = torch.arange(1.0, 9.0).view(4, 2)
    far = far_copy(pool, 0, [1, 2, 3], tmp_path)
    address = 3 * far.stride(0)
    wrapped = (address + LIMIT) % (2 * LIMIT) - LIMIT
    at = torch.as_strided(far, (2,), (1,), LIMIT + wrapped)
    assert wrapped != address and (at == 0).all()
    assert torch.as_strided(far, (2,), (1,), LIMIT + address).tolist() == [7.0, 8.0]


@pytest.mark.skipif(triton_interprets(), reason="the interpreter would take minutes for a million rows")
def test_one_sequence_may_have_a_million_rows(device):
    """Rows that come again and again weigh as often as they come."""
    length, pool = 1_048_576, torch.randn(3, 24, device=device)
    q = torch.randn(1, 2, 24, device=device)
    slots = torch.tensor([0, 1, 1, 2], device=device).repeat(length // 4)
    span = torch.tensor([[0, length]], device=device)
    out, lse = mla_decode(q, pool, kv_spans=span, kv_indices=slots, max_len=length, scale=0.3, v_dim=16)
    counts = torch.tensor([1, 2, 1], device=device).double() * (length // 4)
    scores = 0.3 * q[0].double() @ pool.double().T + counts.log()
    torch.testing.assert_close(lse[0].double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out[0].double(), scores.softmax(-1) @ pool[:, :16].double(), rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(triton_interprets() or torch.cuda.is_available(), reason="this is the run that it starts")
def test_tritons_kernels_find_them_in_the_interpreter():
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-5000:] + ran.stderr[-2000:]
