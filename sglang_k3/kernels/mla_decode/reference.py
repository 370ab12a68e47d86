"""Reference of ``mla_decode``."""

from __future__ import annotations

import torch
from torch import Tensor

# Rows that are summed at once: a million weights of a millionth each, one after the other, would be a percent off.
PIECE = 4096


def mla_decode(
    q: Tensor,
    kv_pool: Tensor,
    *,
    kv_spans: Tensor,
    kv_indices: Tensor,
    max_len: int,
    scale: float,
    v_dim: int,
    owner_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    out = torch.zeros(*q.shape[:2], v_dim, device=q.device)
    lse = torch.full(q.shape[:2], -torch.inf, device=q.device)
    for b, (begin, end) in enumerate(kv_spans.tolist()):
        assert end - begin <= max_len, f"list {b} has {end - begin} rows, more than max_len={max_len}"
        span = slice(begin, end)
        slots = kv_indices[span] if owner_mask is None else kv_indices[span][owner_mask[span]]
        if slots.numel() == 0:
            continue
        rows = kv_pool[slots].float()  # [n, L + R]
        scores = q[b].float() @ rows.T * scale  # [H, n]
        lse[b] = scores.logsumexp(-1)
        weights = torch.exp(scores - lse[b].unsqueeze(-1))
        pieces = zip(weights.split(PIECE, dim=-1), rows[:, :v_dim].split(PIECE), strict=True)
        out[b] = torch.stack([weight @ value for weight, value in pieces]).sum(0)
    return out, lse
