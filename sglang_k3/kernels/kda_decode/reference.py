"""Reference of ``kda_decode``."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_k3.kernels.kda_step import kda_step, normalise_inputs


def kda_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    ssm_states: Tensor,
    cache_indices: Tensor,
    scale: float,
) -> Tensor:
    o = torch.zeros_like(v)
    used = cache_indices >= 0
    slots = cache_indices[used].long()
    q, k, decay = normalise_inputs(q[used], k[used], g[used], scale=scale)
    state_vk, o_used = kda_step(ssm_states[slots].float(), q, k, v[used].float(), decay, beta[used])
    o[used] = o_used.to(v.dtype)
    ssm_states[slots] = state_vk.to(ssm_states.dtype)
    return o
