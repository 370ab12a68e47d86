"""Cases of ``kda_decode``."""

from __future__ import annotations

import dataclasses

import torch

from sglang_k3.kernels.case_kit import BaseCase, Cost, Draw, Inputs
from sglang_k3.kernels.kda_prefill.cases import draw_tokens

TOLERANCE = "ratio"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case(BaseCase):
    """``padding`` names the rows that are padding."""

    batch: int
    heads: int
    key_dim: int
    value_dim: int
    padding: tuple[int, ...] = ()
    state_dtype: torch.dtype = torch.float32


BF16 = torch.bfloat16

CASES = (
    Case(batch=0, heads=2, key_dim=16, value_dim=16, seed=1),
    Case(batch=1, heads=1, key_dim=1, value_dim=1, seed=2),
    Case(batch=3, heads=2, key_dim=16, value_dim=24, padding=(1,), seed=3),
    Case(batch=5, heads=3, key_dim=17, value_dim=5, seed=4),
    Case(batch=2, heads=2, key_dim=8, value_dim=12, padding=(0, 1), seed=5),
    Case(batch=4, heads=2, key_dim=128, value_dim=128, padding=(3,), seed=6),
    Case(batch=3, heads=2, key_dim=16, value_dim=24, padding=(1,), dtype=BF16, seed=7),
    Case(batch=3, heads=2, key_dim=128, value_dim=128, padding=(0,), dtype=BF16, state_dtype=BF16, seed=8),
    Case(batch=7, heads=1, key_dim=33, value_dim=31, state_dtype=BF16, seed=9),
)


def make_inputs(case: Case, device: torch.device | str) -> Inputs:
    draw = Draw(case, device)
    num_slots = case.batch + 3
    slots = draw.distinct(case.batch, below=num_slots, dtype=torch.int32)
    is_padding = torch.tensor([b in case.padding for b in range(case.batch)], dtype=torch.bool, device=draw.device)
    shape = (case.heads, case.value_dim, case.key_dim)
    kwargs = {
        "ssm_states": draw.pool(num_slots, *shape, used=slots[~is_padding], dtype=case.state_dtype),
        "cache_indices": slots.masked_fill(is_padding, -1),
        "scale": case.key_dim**-0.5,
    }
    return Inputs(draw_tokens(draw, case.batch, case.heads, case.key_dim, case.value_dim), kwargs)


def cost(case: Case) -> Cost:
    matrix = case.heads * case.key_dim * case.value_dim
    token_bytes = (2 * case.key_dim + 2 * case.value_dim) * case.dtype.itemsize + 4 * (case.key_dim + 1)
    num_bytes = case.batch * (case.heads * token_bytes + 2 * matrix * case.state_dtype.itemsize)
    return Cost(num_bytes, 7 * case.batch * matrix)
