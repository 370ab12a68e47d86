"""The KDA recurrence (Kimi Delta Attention), one token at a time. Prefill, decode, verify and fold all call this (I6).

    S  <- diag(exp(g)) S          decay the key channels first
    u   = beta (v - S^T k)        error of the prediction from the decayed state
    S  <- S + k u^T
    o   = S^T q                   read the updated state

Everything is fp32 here. A state pool of a narrower dtype is rounded once, by whoever stores ``state_vk`` into it; the
output is read from the unrounded state.
"""

from __future__ import annotations

import torch
from torch import Tensor

L2_NORM_EPS = 1e-6


def normalise_inputs(q: Tensor, k: Tensor, g: Tensor, *, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """What the step needs of q, k and g, for any number of tokens at once.

    Args:
        q, k: raw query and key ``[..., K]``.
        g: log decay ``[..., K]``, fp32.
    Returns:
        ``scale * q / |q|``, ``k / |k|`` (epsilon inside the root) and ``exp(g)``, fp32.
    """
    return _l2_normalise(q) * scale, _l2_normalise(k), g.exp()


def kda_step(state_vk: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Advance the state by one token. All tensors fp32; leading dimensions may be any (heads; sequences, heads).

    Args:
        state_vk: state before the token ``[..., V, K]``.
        q, k, decay: from ``normalise_inputs``, ``[..., K]``.
        v: ``[..., V]``.
        beta: write strength ``[...]``.
    Returns:
        The state after the token ``[..., V, K]`` and the output ``[..., V]``.
    """
    k_row = k.unsqueeze(-2)
    decayed = state_vk * decay.unsqueeze(-2)
    # Products are summed over the last dimension, not by a GEMM: the order is then the same for every batch size.
    u = beta.unsqueeze(-1) * (v - (decayed * k_row).sum(-1))
    state_vk = decayed + u.unsqueeze(-1) * k_row
    return state_vk, (state_vk * q.unsqueeze(-2)).sum(-1)


def _l2_normalise(x: Tensor) -> Tensor:
    x = x.float()
    return x / torch.sqrt(x.square().sum(-1, keepdim=True) + L2_NORM_EPS)
