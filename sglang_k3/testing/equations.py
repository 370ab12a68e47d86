"""The equations of the K3 text model for one token, written as the papers write them.

Every function is pure, takes and returns one floating dtype, and rounds nothing: where a served model stores a
value in bf16 is the caller's business. Legend: D hidden, H heads, K key dim, V value dim, W conv taps, N rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

L2NORM_EPS = 1e-6
ROUTING_WEIGHT_EPS = 1e-20


def unit_rms(x: Tensor, *, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps)`` over the last dimension."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def situ(gate: Tensor, up: Tensor, *, beta: float, linear_beta: float | None) -> Tensor:
    """``[beta tanh(gate / beta) sigmoid(gate)] * [linear_beta tanh(up / linear_beta)]``; null means plain ``up``."""
    capped_up = up if linear_beta is None else linear_beta * torch.tanh(up / linear_beta)
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * capped_up


def depth_mix(rows: Sequence[Tensor], *, norm_weight: Tensor, proj: Tensor, eps: float) -> Tensor:
    """Softmax over depth: the rows ``[D]`` are scored after normalisation and averaged without it."""
    stacked = torch.stack(list(rows))  # [N, D]
    scores = unit_rms(stacked, eps=eps) @ (norm_weight * proj)  # [N]
    return torch.softmax(scores, dim=0) @ stacked


def short_conv(window: Tensor, weight: Tensor) -> Tensor:
    """Depth-wise causal convolution and SiLU: window ``[W, C]`` oldest first, weight ``[C, W]`` -> ``[C]``."""
    return torch.nn.functional.silu((window * weight.T).sum(0))


def l2norm(x: Tensor) -> Tensor:
    """``x / sqrt(sum(x^2) + 1e-6)`` over the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2NORM_EPS)


def log_decay(a: Tensor, A_log: Tensor, dt_bias: Tensor, *, lower_bound: float) -> Tensor:
    """``g = lower_bound * sigmoid(exp(A_log) * (a + dt_bias))``: a, dt_bias ``[H, K]``, A_log ``[H]``."""
    return lower_bound * torch.sigmoid(torch.exp(A_log)[:, None] * (a + dt_bias))


def delta_rule(state_kv: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """One step of the gated delta rule; q, k are normalised and q is scaled already.

    Args:
        state_kv: ``[H, K, V]``; not modified.
        q, k, g: ``[H, K]``. v: ``[H, V]``. beta: ``[H]``.
    Returns:
        The new state and the output ``[H, V]``.
    """
    decayed = torch.exp(g)[:, :, None] * state_kv
    recalled = torch.einsum("hkv,hk->hv", decayed, k)
    update = beta[:, None] * (v - recalled)
    new_state = decayed + k[:, :, None] * update[:, None, :]
    return new_state, torch.einsum("hkv,hk->hv", new_state, q)


def softmax_attention(q: Tensor, keys: Tensor, values: Tensor, *, scale: float) -> Tensor:
    """q ``[H, K]`` over keys ``[n, H, K]`` and values ``[n, H, V]`` -> ``[H, V]``; no positions, no mask."""
    probs = torch.softmax(scale * torch.einsum("hk,nhk->hn", q, keys), dim=-1)
    return torch.einsum("hn,nhv->hv", probs, values)


def route(
    logits: Tensor,
    bias: Tensor,
    *,
    top_k: int,
    num_expert_group: int,
    topk_group: int,
    renormalize: bool,
    scaling_factor: float,
) -> tuple[list[int], Tensor]:
    """Choose experts by ``sigmoid(logits) + bias`` ``[E]``, weigh them by ``sigmoid(logits)``.

    With more than one group, a group's score is the sum of its two best biased scores and only the experts of the
    ``topk_group`` best groups may be chosen. Ties go to the lower index.

    Returns:
        The chosen expert indices, best first, and their weights ``[top_k]``.
    """
    scores = torch.sigmoid(logits)
    biased = scores + bias
    if num_expert_group > 1:
        grouped = biased.view(num_expert_group, -1)
        group_scores = grouped.topk(min(2, grouped.shape[1]), dim=-1).values.sum(-1)
        kept = torch.argsort(group_scores, descending=True, stable=True)[:topk_group]
        excluded = torch.full_like(grouped, -torch.inf)
        excluded[kept] = grouped[kept]
        biased = excluded.view(-1)
    chosen = torch.argsort(biased, descending=True, stable=True)[:top_k]
    weights = scores[chosen]
    if renormalize:
        weights = weights / (weights.sum() + ROUTING_WEIGHT_EPS)
    return chosen.tolist(), weights * scaling_factor
