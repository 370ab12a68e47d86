"""Reference of ``kda_prefill``."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sglang_k3.kernels.kda_step import kda_step, normalise_inputs


def kda_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    ssm_states: Tensor,
    cu_seqlens: Tensor,
    cache_indices: Tensor,
    has_initial_state: Tensor,
    scale: float,
    lower_bound: float = -math.inf,  # noqa: ARG001 - only kernels that take many tokens at a time need it
    track_lens: Tensor | None = None,
    track_indices: Tensor | None = None,
) -> Tensor:
    o = torch.zeros_like(v)
    q, k, decay = normalise_inputs(q, k, g, scale=scale)
    offsets, slots, continues = cu_seqlens.tolist(), cache_indices.tolist(), has_initial_state.tolist()
    depths = [-1] * len(slots) if track_lens is None else track_lens.tolist()
    targets = [-1] * len(slots) if track_indices is None else track_indices.tolist()
    for b, slot in enumerate(slots):
        if slot < 0:
            continue
        begin, end = offsets[b], offsets[b + 1]
        state_vk = (ssm_states[slot] if continues[b] else torch.zeros_like(ssm_states[slot])).float()
        if depths[b] == 0:
            ssm_states[targets[b]] = state_vk.to(ssm_states.dtype)
        for t in range(begin, end):
            state_vk, o_t = kda_step(state_vk, q[t], k[t], v[t].float(), decay[t], beta[t])
            o[t] = o_t.to(v.dtype)
            if t + 1 - begin == depths[b]:
                ssm_states[targets[b]] = state_vk.to(ssm_states.dtype)
        ssm_states[slot] = state_vk.to(ssm_states.dtype)
    return o
