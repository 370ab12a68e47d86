"""The repetition penalty of the host without its compiler: the first request with one would wait half a minute."""

from __future__ import annotations

import torch


def apply_scaling_penalties(logits: torch.Tensor, scaling_penalties: torch.Tensor) -> None:
    """Divide positive logits by the penalty and multiply negative ones, in place.

    Args:
        logits: ``[B, V]``, fp32.
        scaling_penalties: ``[B, V]``, fp32, 1 where there is none.
    """
    logits.copy_(torch.where(logits < 0, logits * scaling_penalties, logits / scaling_penalties))
