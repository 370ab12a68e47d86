"""Cases of ``mla_prefill``."""

from __future__ import annotations

import dataclasses

import torch

from sglang_k3.kernels.case_kit import BaseCase, Cost, Draw, Inputs, cu_seqlens

TOLERANCE = "ratio"
TOLERANCE_16_BIT = "rounded"  # of the output; the log-sum-exp keeps the other one


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case(BaseCase):
    """``shared_dim`` more key channels come apart.

    In a broken batch the last key of the first sequence is NaN, and so is what the queries get that see it.
    """

    lens_q: tuple[int, ...]
    lens_k: tuple[int, ...]
    heads: int
    key_dim: int
    value_dim: int
    shared_dim: int = 0
    causal: bool = True
    broken: bool = False


BF16 = torch.bfloat16

CASES = (
    Case(lens_q=(1,), lens_k=(1,), heads=1, key_dim=1, value_dim=1, seed=1),
    Case(lens_q=(5, 3), lens_k=(5, 3), heads=2, key_dim=24, value_dim=16, seed=2),
    Case(lens_q=(3, 1, 4), lens_k=(10, 7, 4), heads=3, key_dim=7, value_dim=9, seed=3),
    Case(lens_q=(4, 0, 2), lens_k=(0, 5, 2), heads=2, key_dim=8, value_dim=8, seed=4),
    Case(lens_q=(5, 2), lens_k=(3, 2), heads=2, key_dim=8, value_dim=4, seed=5),
    Case(lens_q=(5, 3, 2), lens_k=(9, 1, 0), heads=2, key_dim=24, value_dim=16, causal=False, seed=6),
    Case(lens_q=(5, 3), lens_k=(9, 3), heads=2, key_dim=24, value_dim=16, broken=True, seed=11),
    Case(lens_q=(33, 31), lens_k=(64, 31), heads=2, key_dim=192, value_dim=128, seed=7),
    Case(lens_q=(5, 3), lens_k=(8, 3), heads=2, key_dim=24, value_dim=16, dtype=BF16, seed=8),
    Case(lens_q=(17,), lens_k=(63,), heads=2, key_dim=192, value_dim=128, dtype=BF16, seed=9),
    Case(lens_q=(5, 3), lens_k=(9, 3), heads=3, key_dim=16, shared_dim=8, value_dim=24, seed=12),
    Case(lens_q=(4, 0, 2), lens_k=(9, 5, 2), heads=2, key_dim=7, shared_dim=5, value_dim=3, causal=False, seed=13),
    Case(lens_q=(5, 3), lens_k=(9, 3), heads=2, key_dim=12, shared_dim=1, value_dim=16, broken=True, seed=14),
    Case(lens_q=(3,), lens_k=(0,), heads=2, key_dim=8, shared_dim=4, value_dim=8, seed=15),
    Case(lens_q=(17,), lens_k=(63,), heads=2, key_dim=128, shared_dim=64, value_dim=128, dtype=BF16, seed=16),
    *(
        Case(
            lens_q=(300, 1, 0, 257),
            lens_k=(700, 65, 5, 257),
            heads=3,
            key_dim=192 - shared_dim,
            shared_dim=shared_dim,
            value_dim=128,
            dtype=BF16,
            seed=seed,
            marks=("gpu",),
        )
        for seed, shared_dim in ((10, 0), (17, 64))
    ),
)


def make_inputs(case: Case, device: torch.device | str) -> Inputs:
    draw = Draw(case, device)
    q = draw.normal(case.heads, sum(case.lens_q), case.key_dim + case.shared_dim).transpose(0, 1)
    kv = draw.normal(sum(case.lens_k), case.heads, case.key_dim + case.value_dim)
    if case.broken:
        kv[case.lens_k[0] - 1, :, : case.key_dim] = torch.nan
    kwargs = {
        "cu_seqlens_q": cu_seqlens(case.lens_q, draw.device),
        "cu_seqlens_k": cu_seqlens(case.lens_k, draw.device),
        "scale": (case.key_dim + case.shared_dim) ** -0.5,
        "causal": case.causal,
    }
    if case.shared_dim:  # a part of wider rows, as in a pool
        kwargs["k_shared"] = draw.normal(sum(case.lens_k), case.shared_dim + 3)[:, 3:]
    return Inputs((q, kv[..., : case.key_dim], kv[..., case.key_dim :]), kwargs)


def cost(case: Case) -> Cost:
    """Without the savings of the mask."""
    pairs = sum(n * m for n, m in zip(case.lens_q, case.lens_k, strict=True)) * case.heads
    tokens_q, tokens_k = sum(case.lens_q) * case.heads, sum(case.lens_k) * case.heads
    key_dim = case.key_dim + case.shared_dim
    elements = tokens_q * key_dim + tokens_k * (case.key_dim + case.value_dim) + sum(case.lens_k) * case.shared_dim
    num_bytes = elements * case.dtype.itemsize + 4 * tokens_q * (case.value_dim + 1)
    return Cost(num_bytes, 2 * pairs * (key_dim + case.value_dim))
