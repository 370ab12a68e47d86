"""Reference of ``short_conv_prefill``."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_k3.kernels.short_conv_step import conv_silu


def short_conv_prefill(
    x: Tensor,
    weight: Tensor,
    *,
    conv_states: Tensor,
    cu_seqlens: Tensor,
    cache_indices: Tensor,
    has_initial_state: Tensor,
    track_lens: Tensor | None = None,
    track_indices: Tensor | None = None,
) -> Tensor:
    y = torch.zeros_like(x)
    offsets, slots, continues = cu_seqlens.tolist(), cache_indices.tolist(), has_initial_state.tolist()
    depths = [-1] * len(slots) if track_lens is None else track_lens.tolist()
    targets = [-1] * len(slots) if track_indices is None else track_indices.tolist()
    history_len = weight.shape[1] - 1
    for b, slot in enumerate(slots):
        if slot < 0:
            continue
        begin, end = offsets[b], offsets[b + 1]
        history = conv_states[slot] if continues[b] else torch.zeros_like(conv_states[slot])
        rows = torch.cat([history.float(), x[begin:end].float()])  # depth d of this extend is rows[d : d + W - 1]
        y[begin:end] = conv_silu(rows, weight).to(x.dtype)
        if depths[b] >= 0:
            conv_states[targets[b]] = rows[depths[b] : depths[b] + history_len].to(conv_states.dtype)
        conv_states[slot] = rows[end - begin :].to(conv_states.dtype)
    return y
