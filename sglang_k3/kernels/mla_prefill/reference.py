"""Reference of ``mla_prefill``."""

from __future__ import annotations

import torch
from torch import Tensor


def mla_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    k_shared: Tensor | None = None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    if k_shared is not None:
        k = torch.cat([k, k_shared.unsqueeze(1).expand(-1, k.shape[1], -1)], dim=-1)
    out = torch.zeros(*q.shape[:2], v.shape[2], device=q.device)
    lse = torch.full(q.shape[:2], -torch.inf, device=q.device)
    offsets_q, offsets_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for b in range(len(offsets_q) - 1):
        rows = slice(offsets_q[b], offsets_q[b + 1])
        keys = slice(offsets_k[b], offsets_k[b + 1])
        scores = torch.einsum("qhd,khd->qhk", q[rows].float(), k[keys].float()) * scale
        if causal:
            num_q, _, num_k = scores.shape
            seen = torch.ones(num_q, num_k, dtype=torch.bool, device=q.device).tril(num_k - num_q)
            scores = scores.masked_fill(~seen.unsqueeze(1), -torch.inf)
        lse[rows] = scores.logsumexp(-1)
        # A query that sees no key has lse = -inf; the clamp makes its weights exp(-inf) = 0 instead of NaN.
        weights = torch.exp(scores - lse[rows].clamp_min(torch.finfo(torch.float32).min).unsqueeze(-1))
        out[rows] = torch.einsum("qhk,khv->qhv", weights, v[keys].float())
    return out, lse
