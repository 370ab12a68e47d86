"""The arithmetic of the short convolution, shared by prefill and decode so that both add the taps in one order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_k3.kernels.elementwise import sigmoid

if TYPE_CHECKING:
    from torch import Tensor


def conv_silu(rows: Tensor, weight: Tensor) -> Tensor:
    """``SiLU(sum_tau weight[:, tau] * rows[t + tau])`` in fp32, oldest tap first.

    Args:
        rows: the ``W - 1`` inputs of history, then the ``n`` new ones, ``[..., W - 1 + n, C]``, fp32.
        weight: ``[C, W]``, fp32.
    Returns:
        ``[..., n, C]``, fp32.
    """
    width = weight.shape[1]
    n = rows.shape[-2] - (width - 1)
    y = rows.narrow(-2, 0, n) * weight[:, 0]
    for tap in range(1, width):
        y = y + rows.narrow(-2, tap, n) * weight[:, tap]
    return y * sigmoid(y)
