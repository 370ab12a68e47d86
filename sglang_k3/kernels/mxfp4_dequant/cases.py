"""Cases of ``mxfp4_dequant``."""

from __future__ import annotations

import dataclasses

import torch

from sglang_k3.kernels.case_kit import BaseCase, Cost, Draw, Inputs

TOLERANCE = "bitwise"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case(BaseCase):
    """``scale_codes`` is the range the E8M0 codes are drawn from, both ends included."""

    shape: tuple[int, ...]
    scale_codes: tuple[int, int] = (110, 135)


CASES = tuple(
    Case(shape=shape, scale_codes=scale_codes, dtype=dtype, seed=seed)
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    for seed, (shape, scale_codes) in enumerate(
        [((0, 32), (127, 127)), ((1, 32), (0, 1)), ((3, 7, 64), (110, 135)), ((2, 3, 5, 96), (0, 255))]
    )
)


def make_inputs(case: Case, device: torch.device | str) -> Inputs:
    draw = Draw(case, device)
    *leading, columns = case.shape
    low, high = case.scale_codes
    packed = draw.integers(*leading, columns // 2, low=0, high=256, dtype=torch.uint8)
    scale = draw.integers(*leading, columns // 32, low=low, high=high + 1, dtype=torch.uint8)
    return Inputs((packed, scale), {"dtype": case.dtype})


def cost(case: Case) -> Cost:
    num_elements = torch.Size(case.shape).numel()
    return Cost(num_elements // 2 + num_elements // 32 + num_elements * case.dtype.itemsize, num_elements)
