"""Cases of ``kda_prefill``."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from sglang_k3.kernels.case_kit import BaseCase, Cost, Draw, Inputs, cu_seqlens

if TYPE_CHECKING:
    from torch import Tensor

from sglang_k3.kernels.short_conv_prefill.cases import draw_track_lens

TOLERANCE = "ratio"
LOWER_BOUND = -5.0  # of K3's log decay


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case(BaseCase):
    """``lens``: one extend per sequence; ``padding``, ``fresh``: which of them are padding, or have no state yet."""

    lens: tuple[int, ...]
    heads: int
    key_dim: int
    value_dim: int
    padding: tuple[int, ...] = ()
    fresh: tuple[int, ...] = ()
    track: bool = True
    state_dtype: torch.dtype = torch.float32


F32, BF16 = torch.float32, torch.bfloat16

CASES = (
    Case(lens=(1,), heads=1, key_dim=1, value_dim=1, track=False, seed=1),
    Case(lens=(5, 2, 1), heads=2, key_dim=16, value_dim=16, fresh=(1,), seed=2),
    Case(lens=(0, 3, 0, 7), heads=3, key_dim=8, value_dim=12, fresh=(0, 3), seed=3),
    Case(lens=(4, 0, 2, 8), heads=2, key_dim=17, value_dim=5, padding=(1, 2), fresh=(0, 2), seed=4),
    Case(lens=(31, 33), heads=2, key_dim=16, value_dim=24, fresh=(0,), seed=5),
    Case(lens=(64, 1), heads=1, key_dim=63, value_dim=64, padding=(1,), seed=6),
    Case(lens=(9, 13), heads=2, key_dim=128, value_dim=128, seed=7),
    Case(lens=(5, 2, 1), heads=2, key_dim=16, value_dim=16, fresh=(1,), dtype=BF16, seed=8),
    Case(lens=(4, 0, 2, 8), heads=2, key_dim=17, value_dim=5, padding=(1, 2), fresh=(0,), dtype=BF16, seed=9),
    Case(lens=(9, 13), heads=2, key_dim=128, value_dim=128, dtype=BF16, state_dtype=BF16, seed=10),
    Case(lens=(31, 6), heads=3, key_dim=12, value_dim=20, fresh=(0,), dtype=F32, state_dtype=BF16, seed=11),
    Case(lens=(130, 3), heads=2, key_dim=24, value_dim=40, fresh=(1,), dtype=BF16, seed=12),
    Case(lens=(2,), heads=64, key_dim=8, value_dim=65, track=False, dtype=BF16, seed=13),
)


def inner_dtype(case: Case) -> torch.dtype:
    """Kernels may round to the dtype of the inputs on the way, so a state of fp32 is held to the tolerance of that."""
    return case.dtype


def make_inputs(case: Case, device: torch.device | str) -> Inputs:
    draw = Draw(case, device)
    num_seqs = len(case.lens)
    num_slots = 2 * num_seqs + 2
    slots = draw.distinct(2 * num_seqs, below=num_slots, dtype=torch.int32)
    working, targets = slots[:num_seqs], slots[num_seqs:]
    has_initial_state = torch.tensor([b not in case.fresh for b in range(num_seqs)], device=draw.device)
    is_padding = torch.tensor([b in case.padding for b in range(num_seqs)], device=draw.device)
    used = working[has_initial_state & ~is_padding]
    shape = (case.heads, case.value_dim, case.key_dim)
    kwargs = {
        "ssm_states": draw.pool(num_slots, *shape, used=used, dtype=case.state_dtype),
        "cu_seqlens": cu_seqlens(case.lens, draw.device),
        "cache_indices": working.masked_fill(is_padding, -1),
        "has_initial_state": has_initial_state,
        "scale": case.key_dim**-0.5,
        "lower_bound": LOWER_BOUND,
        "track_lens": draw_track_lens(draw, case.lens) if case.track else None,
        "track_indices": targets if case.track else None,
    }
    return Inputs(draw_tokens(draw, sum(case.lens), case.heads, case.key_dim, case.value_dim), kwargs)


def draw_tokens(draw: Draw, tokens: int, heads: int, key_dim: int, value_dim: int) -> tuple[Tensor, ...]:
    """q, k, v as views of one convolution output, and g, beta in their ranges."""
    qkv = draw.normal(tokens, heads * (2 * key_dim + value_dim))
    q, k, v = qkv.split([heads * key_dim, heads * key_dim, heads * value_dim], dim=1)
    g = draw.uniform(tokens, heads, key_dim, low=LOWER_BOUND, high=0.0, dtype=torch.float32)
    beta = draw.uniform(tokens, heads, low=0.0, high=1.0, dtype=torch.float32)
    return (
        q.unflatten(1, (heads, key_dim)),
        k.unflatten(1, (heads, key_dim)),
        v.unflatten(1, (heads, value_dim)),
        g,
        beta,
    )


def cost(case: Case) -> Cost:
    tokens, matrix = sum(case.lens) * case.heads, case.heads * case.key_dim * case.value_dim
    token_bytes = (2 * case.key_dim + 2 * case.value_dim) * case.dtype.itemsize + 4 * (case.key_dim + 1)
    num_bytes = tokens * token_bytes + 2 * len(case.lens) * matrix * case.state_dtype.itemsize
    return Cost(num_bytes, 7 * sum(case.lens) * matrix)
