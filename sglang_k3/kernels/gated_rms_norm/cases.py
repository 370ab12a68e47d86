"""Cases of ``gated_rms_norm``."""

from __future__ import annotations

import dataclasses

import torch

from sglang_k3.kernels.case_kit import BaseCase, Cost, Draw, Inputs

TOLERANCE = "ulp"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case(BaseCase):
    """``dtype`` is that of the gate and the result; ``o_dtype`` that of the attention output."""

    tokens: int
    heads: int
    value_dim: int
    o_dtype: torch.dtype = torch.float32


CASES = tuple(
    Case(tokens=tokens, heads=heads, value_dim=value_dim, dtype=dtype, o_dtype=o_dtype, seed=seed)
    for dtype, o_dtype in (
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
    )
    for seed, (tokens, heads, value_dim) in enumerate([(0, 2, 16), (1, 1, 1), (5, 3, 17), (7, 4, 63), (3, 8, 128)])
)


def make_inputs(case: Case, device: torch.device | str) -> Inputs:
    draw = Draw(case, device)
    shape = (case.tokens, case.heads, case.value_dim)
    args = (draw.normal(*shape, dtype=case.o_dtype), draw.normal(*shape), draw.normal(shape[2], dtype=torch.float32))
    return Inputs(args, {"eps": 1e-5})


def cost(case: Case) -> Cost:
    num_elements = case.tokens * case.heads * case.value_dim
    num_bytes = num_elements * (2 * case.dtype.itemsize + case.o_dtype.itemsize) + 4 * case.value_dim
    return Cost(num_bytes, 8 * num_elements)
