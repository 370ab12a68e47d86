"""Reference of ``latent_experts``."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from sglang_k3.kernels.mxfp4_dequant.reference import mxfp4_dequant
from sglang_k3.kernels.situ_and_mul.reference import situ_and_mul


def latent_experts(
    z: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    w13: Tensor,
    w2: Tensor,
    *,
    w13_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
    beta: float,
    linear_beta: float | None,
    expert_offset: int = 0,
) -> Tensor:
    total = torch.zeros_like(z, dtype=torch.float32)
    local_ids = topk_ids - expert_offset
    for expert in local_ids[(local_ids >= 0) & (local_ids < w13.shape[0])].unique().tolist():
        tokens, choices = (local_ids == expert).nonzero(as_tuple=True)
        gate_up = linear(z[tokens], _weight(w13, w13_scale, expert, z.dtype))
        activated = situ_and_mul(gate_up, beta=beta, linear_beta=linear_beta)
        outputs = linear(activated, _weight(w2, w2_scale, expert, z.dtype))
        total.index_add_(0, tokens, topk_weights[tokens, choices].unsqueeze(-1) * outputs.float())
    return total.to(z.dtype)


def _weight(weight: Tensor, scale: Tensor | None, expert: int, dtype: torch.dtype) -> Tensor:
    return weight[expert] if scale is None else mxfp4_dequant(weight[expert], scale[expert], dtype=dtype)
