"""Cases of ``mla_decode``."""

from __future__ import annotations

import dataclasses

import torch

from sglang_k3.kernels.case_kit import BaseCase, Cost, Draw, Inputs

TOLERANCE = "ratio"
TOLERANCE_16_BIT = "rounded"  # of the output; the log-sum-exp keeps the other one


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case(BaseCase):
    """``lens`` counts the cached rows of each sequence; 0 is a padding row. ``owners`` is the number of DCP ranks.
    Each ``page`` of rows lies together, from a multiple of its size on.

    In a broken pool the first row of the first sequence is NaN, and so is all that this sequence gets.
    """

    lens: tuple[int, ...]
    heads: int
    latent: int
    rope: int
    owners: int = 1
    page: int = 1
    broken: bool = False


BF16 = torch.bfloat16

CASES = (
    Case(lens=(1,), heads=1, latent=1, rope=1, seed=1),
    Case(lens=(), heads=2, latent=8, rope=4, seed=2),
    Case(lens=(5, 0, 3), heads=2, latent=16, rope=8, seed=3),
    Case(lens=(7, 33, 1), heads=3, latent=17, rope=5, seed=4),
    Case(lens=(9, 1, 0, 4), heads=2, latent=16, rope=8, owners=2, seed=5),
    Case(lens=(64, 63), heads=4, latent=512, rope=64, seed=6),
    Case(lens=(5, 0, 3), heads=2, latent=16, rope=8, dtype=BF16, seed=7),
    Case(lens=(65,), heads=4, latent=512, rope=64, owners=3, dtype=BF16, seed=8),
    Case(lens=(9, 5), heads=2, latent=16, rope=8, broken=True, seed=14),
    Case(lens=(1030,), heads=1, latent=16, rope=8, dtype=BF16, seed=9),
    Case(lens=(*(3, 0) * 65, 300, 1030), heads=2, latent=16, rope=8, seed=11, marks=("gpu",)),
    Case(lens=(1, 700, 0, 2100, 64), heads=96, latent=512, rope=64, dtype=BF16, seed=12, timed=True, marks=("gpu",)),
    Case(lens=(130, 515), heads=96, latent=512, rope=64, owners=2, dtype=BF16, seed=13, marks=("gpu",)),
    Case(lens=(7, 0, 33), heads=2, latent=16, rope=8, page=4, seed=15),
    Case(lens=(3, 1500, 513, 4099), heads=40, latent=512, rope=64, dtype=BF16, seed=10, marks=("gpu",)),
)


def make_inputs(case: Case, device: torch.device | str) -> Inputs:
    """The inputs of rank 0: it owns every ``owners``-th position, and what it does not own has no slot (-1)."""
    draw = Draw(case, device)
    width = case.latent + case.rope
    num_pages = [-(-length // case.page) for length in case.lens]
    num_slots = (sum(num_pages) + 3) * case.page
    pages = draw.distinct(sum(num_pages), below=sum(num_pages) + 3)
    in_page = torch.arange(case.page, device=draw.device)
    of_seqs = [(own[:, None] * case.page + in_page).flatten() for own in pages.split(num_pages)]
    slots = torch.cat([pages[:0], *(own[:length] for own, length in zip(of_seqs, case.lens, strict=True))])
    positions = torch.cat([torch.arange(n) for n in (0, *case.lens)])
    owned = (positions % case.owners == 0).to(draw.device)
    ends = torch.tensor(case.lens, dtype=torch.int64).cumsum(0)
    kwargs = {
        "kv_spans": torch.stack([ends - torch.tensor(case.lens, dtype=torch.int64), ends], dim=1).to(draw.device),
        "kv_indices": slots.where(owned, -1),
        "max_len": max(case.lens, default=0),
        "scale": (case.latent + case.rope) ** -0.5,
        "v_dim": case.latent,
        "owner_mask": None if case.owners == 1 else owned,
    }
    kv_pool = draw.pool(num_slots, width, used=slots[owned])
    if case.broken:
        kv_pool[slots[0]] = torch.nan
    return Inputs((draw.normal(len(case.lens), case.heads, width), kv_pool), kwargs)


def sizes(case: Case) -> dict[str, int]:
    """What an implementation is chosen by."""
    return {"H": case.heads, "D": case.latent + case.rope, "L": case.latent, "page": case.page}


def cost(case: Case) -> Cost:
    rows, width = sum(case.lens) // case.owners, case.latent + case.rope
    num_bytes = (rows + len(case.lens) * case.heads) * width * case.dtype.itemsize
    num_bytes += 4 * len(case.lens) * case.heads * (case.latent + 1)
    return Cost(num_bytes, 2 * rows * case.heads * (width + case.latent))
