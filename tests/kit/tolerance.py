"""The one table of tolerances: numerics class x dtype of the result (style.md, section 5), the same everywhere."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from tests.kit.compare import assert_bitwise, assert_ratio, assert_ulp


@dataclasses.dataclass(frozen=True)
class Ratio:
    rms_ratio: float
    cosine_deficit: float


MAX_ULP = {torch.float32: 2, torch.bfloat16: 1}
RATIO = {
    torch.float32: Ratio(rms_ratio=1e-5, cosine_deficit=1e-5),
    torch.bfloat16: Ratio(rms_ratio=5e-3, cosine_deficit=1e-5),
}
# An fp32 sum of products of which one factor was rounded to bf16: each is off by up to 2 ** -9, or 2e-3.
ROUNDED = Ratio(rms_ratio=2e-3, cosine_deficit=1e-5)


def assert_close(
    actual: Tensor, expected: Tensor, numerics: str, what: str = "tensors", *, inner: torch.dtype | None = None
) -> None:
    """Compare two results of one op in its declared class: ``bitwise``, ``ulp``, ``ratio`` or ``rounded``.

    ``inner`` is the dtype to which a ``ratio`` op may round on the way, where that is narrower than the result.
    """
    if numerics == "bitwise":
        assert_bitwise(actual, expected, what)
    elif numerics == "ulp":
        assert_ulp(actual, expected, max_ulp=MAX_ULP[actual.dtype], what=what)
    elif numerics == "ratio":
        limits = max((RATIO[dtype] for dtype in (actual.dtype, inner or actual.dtype)), key=lambda r: r.rms_ratio)
        assert_ratio(actual, expected, rms_ratio=limits.rms_ratio, cosine_deficit=limits.cosine_deficit, what=what)
    elif numerics == "rounded":
        limits = ROUNDED
        assert_ratio(actual, expected, rms_ratio=limits.rms_ratio, cosine_deficit=limits.cosine_deficit, what=what)
    else:
        raise ValueError(f"numerics={numerics!r} must be bitwise, ulp, ratio or rounded")
