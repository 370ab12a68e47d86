"""Functions whose result for an element depends on that element alone.

``torch.sigmoid``, ``silu`` and ``rsqrt`` on a CPU give other last bits to the elements that a vector loop leaves over,
so a row would change with the batch around it. ``exp``, ``sqrt`` and division do not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    """``1 / (1 + exp(-x))``, fp32 in and out."""
    return 1.0 / (1.0 + torch.exp(-x))


def root_mean_square(x: Tensor, *, eps: float) -> Tensor:
    """``(mean(x^2) + eps)^(1/2)`` over the last dimension, kept, fp32 in and out."""
    return torch.sqrt(x.square().mean(-1, keepdim=True) + eps)
