"""``kda_prefill`` in Triton at every depth and length and at extreme decays: the GPU runs all of them, CI a sample.

The sample runs in Triton's interpreter, which has to be chosen before Triton is imported: in a process of its own.
"""

import os
import random
import subprocess
import sys

import pytest
import torch

from sglang_k3.env import triton_interprets
from sglang_k3.kernels import kda_prefill
from sglang_k3.kernels.case_kit import cu_seqlens
from tests.kit.compare import assert_bitwise, assert_ratio
from tests.kit.kda_oracle import Head, prepared, recurrence
from tests.kit.ops import clone_pool, fp64
from tests.kit.tolerance import assert_close

PREFILL = kda_prefill.IMPLS[0].fn
HEADS, KEY_DIM, VALUE_DIM = 2, 12, 7
SCALE = KEY_DIM**-0.5

runs_triton = (lambda test: test) if triton_interprets() else pytest.mark.gpu


in_both_ways = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # other tiles, other products


def on_gpu_or(sample, every):
    return sample if triton_interprets() else every


def tokens_of(length, device, *, g=None, dtype=torch.float32):
    """q, k, v, g, beta of ``length`` tokens; g is drawn from its range or given as a function of its shape."""
    q, k = (torch.randn(length, HEADS, KEY_DIM).to(dtype) for _ in range(2))
    v, beta = torch.randn(length, HEADS, VALUE_DIM).to(dtype), torch.rand(length, HEADS)
    g = -5 * torch.randn(length, HEADS, KEY_DIM).sigmoid() if g is None else g(length, HEADS, KEY_DIM)
    return [x.to(device) for x in (q, k, v, g, beta)]


def pool_of(slots, device, *, used):
    """Slots apart in a larger buffer; NaN in all that are not used, and between them."""
    size = HEADS * VALUE_DIM * KEY_DIM
    buffer = torch.full((slots, size + 3), torch.nan)
    buffer[used, 1 : 1 + size] = torch.randn(len(used), size)
    return buffer.to(device)[:, 1 : 1 + size].view(slots, HEADS, VALUE_DIM, KEY_DIM)


def prefill(tokens, pool, lens, slots, *, starts, track_lens=None, track_slots=None):
    device = pool.device
    tracked = track_lens is not None
    return PREFILL(
        *tokens,
        ssm_states=pool,
        cu_seqlens=cu_seqlens(tuple(lens), device),
        cache_indices=torch.tensor(slots, device=device),
        has_initial_state=torch.tensor(starts, device=device),
        scale=SCALE,
        lower_bound=min([0.0, *tokens[3].flatten().tolist()]),
        track_lens=torch.tensor(track_lens, device=device) if tracked else None,
        track_indices=torch.tensor(track_slots, device=device) if tracked else None,
    )


def oracle(tokens, starts_vk):
    """Outputs ``[T, H, V]`` and states after 0, 1, ..., T tokens ``[T + 1, H, V, K]``, by the recurrence in fp64."""
    heads = [
        recurrence(prepared(Head(*fp64(*(x[:, h] for x in tokens))), SCALE), starts_vk[h].double().cpu().T)
        for h in range(HEADS)
    ]
    states = torch.stack([torch.stack(visited) for _, visited in heads], dim=1).transpose(2, 3)
    return torch.stack([outputs for outputs, _ in heads], dim=1), states


def assert_near(actual, expected, dtype, what):
    """With 16-bit inputs only near: the recurrences here are small or ill-conditioned, which multiplies roundings."""
    if dtype == torch.float32:
        assert_close(actual.cpu(), expected.float(), "ratio", what)
    else:
        assert_ratio(actual.cpu().double(), expected, rms_ratio=5e-2, cosine_deficit=1e-3, what=what)


@runs_triton
@in_both_ways
@pytest.mark.parametrize("length", on_gpu_or([1, 17, 32, 65], range(1, 201)))
def test_any_length_gives_the_recurrence(length, dtype, device):
    tokens, pool = tokens_of(length, device, dtype=dtype), pool_of(3, device, used=[1])
    outputs, states = oracle(tokens, pool[1])
    o = prefill(tokens, pool, [length], [1], starts=[True])
    assert_near(o, outputs, dtype, "output")
    assert_near(pool[1], states[-1], dtype, "last state")
    assert pool[0].isnan().all() and pool[2].isnan().all()


@runs_triton
@in_both_ways
@pytest.mark.parametrize("starts", on_gpu_or([True], [False, True]))
@pytest.mark.parametrize("length", on_gpu_or([33], [1, 32, 33, 64, 65, 100]))
def test_a_snapshot_at_any_depth_is_the_state_after_exactly_that_many_tokens(length, starts, dtype, device):
    tokens, pool = tokens_of(length, device, dtype=dtype), pool_of(3, device, used=[1] if starts else [])
    outputs, states = oracle(tokens, pool[1] if starts else torch.zeros_like(pool[1]))
    for depth in on_gpu_or([0, 1, 32, 33], range(length + 1)):
        after = clone_pool(pool)
        o = prefill(tokens, after, [length], [1], starts=[starts], track_lens=[depth], track_slots=[2])
        assert_near(after[2], states[depth], dtype, f"state after {depth} tokens")
        assert_near(after[1], states[-1], dtype, f"last state, snapshot at {depth}")
        assert_near(o, outputs, dtype, f"output beside a snapshot at {depth}")


@runs_triton
@pytest.mark.parametrize("seed", range(on_gpu_or(1, 30)))
def test_a_mixed_batch_gives_what_each_sequence_gives_alone(seed, device):
    """Empty, padding, fresh and tracked sequences in any order; tokens after the last sequence belong to nobody."""
    draw = random.Random(seed)
    longest = on_gpu_or(40, 300)
    lens = [draw.choice([0, 1, 32, draw.randint(2, longest)]) for _ in range(5)]
    slots = [draw.choice([-1, b, b, b]) for b in range(5)]
    starts = [draw.random() < 0.5 for _ in range(5)]
    depths = [draw.choice([-1, draw.randint(0, n)]) for n in lens]
    used = [slot for slot, start in zip(slots, starts, strict=True) if slot >= 0 and start]
    tokens, pool = tokens_of(sum(lens) + 3, device), pool_of(11, device, used=used)
    after = clone_pool(pool)
    o = prefill(tokens, after, lens, slots, starts=starts, track_lens=depths, track_slots=range(5, 10))
    expected_o, expected = torch.zeros(o.shape), pool.cpu().clone()
    begin = 0
    for b, (length, slot) in enumerate(zip(lens, slots, strict=True)):
        rows = slice(begin, begin + length)
        begin += length
        if slot < 0:
            continue
        outputs, states = oracle([x[rows] for x in tokens], pool[b] if starts[b] else torch.zeros_like(pool[b]))
        expected_o[rows], expected[b] = outputs.float(), states[-1].float()
        if depths[b] >= 0:
            expected[5 + b] = states[depths[b]].float()
    assert_close(o.cpu(), expected_o, "ratio", "output")
    assert_close(after.cpu(), expected, "ratio", "pool")


def spikes(*shape):
    return torch.where(torch.rand(shape) < 0.3, -90.0, -1e-3)


DECAYS = {
    "none": torch.zeros,
    "the lower bound": lambda *shape: torch.full(shape, -5.0),
    "far below it": lambda *shape: torch.full(shape, -60.0),
    "a channel forgotten now and then": spikes,
}


@runs_triton
@in_both_ways
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("same_token", [False, True])
def test_no_decay_overflows_or_loses_what_it_should_keep(decay, same_token, dtype, device):
    """With the same key at every token, fully written, (I + A)^-1 is at its worst."""
    tokens, pool = tokens_of(40, device, g=DECAYS[decay], dtype=dtype), pool_of(3, device, used=[1])
    if same_token:
        tokens[1][:] = tokens[1][:1].clone()
        tokens[4].fill_(0.999)
    outputs, states = oracle(tokens, pool[1])
    o = prefill(tokens, pool, [40], [1], starts=[True])
    assert_near(o, outputs, dtype, "output")
    assert_near(pool[1], states[-1], dtype, "last state")


@runs_triton
def test_what_is_not_a_number_stays_in_its_sequence(device):
    lens, slots = [33, 5, 30], [0, 1, 2]
    tokens, pool = tokens_of(68, device), pool_of(3, device, used=slots)
    clean_pool, after = clone_pool(pool), clone_pool(pool)
    clean = prefill(tokens, clean_pool, lens, slots, starts=[True] * 3)
    for x in tokens:
        x[33:38] = torch.nan
    o = prefill(tokens, after, lens, slots, starts=[True] * 3)
    others = torch.tensor([*range(33), *range(38, 68)])
    assert_bitwise(o.cpu()[others], clean.cpu()[others], "output")
    assert_bitwise(after[[0, 2]], clean_pool[[0, 2]], "pool")


def test_the_interpreter_agrees_on_the_cpu():
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not on_the_cpu", __file__],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-5000:] + ran.stderr[-2000:]
