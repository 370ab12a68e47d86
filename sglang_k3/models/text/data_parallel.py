"""Data-parallel attention: each rank attends for its own requests, and all ranks share the experts.

Attention, mixes and norms see the tokens of the rank's own requests. MLPs and experts are split over all ranks, so
they see everyone's: tokens are gathered before them, and each rank takes its own out of the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.dp_attention import dp_gather_replicate, dp_scatter, is_dp_attention_enabled

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


def over_all_requests(
    mlp: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, forward_batch: ForwardBatch
) -> torch.Tensor:
    """``mlp(x) [T, D]``, computed together with the tokens of the other data-parallel ranks.

    The host's buffer holds the tokens of all ranks one after the other, none of them padded (seam "padding of
    data-parallel ranks").
    """
    if not is_dp_attention_enabled():
        return mlp(x)
    gathered = x.new_empty(forward_batch.global_dp_buffer_len, *x.shape[1:])
    dp_gather_replicate(gathered, x, forward_batch)
    own = torch.empty_like(x)
    dp_scatter(own, mlp(gathered), forward_batch)
    return own
