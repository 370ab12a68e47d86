"""Triton kernel of ``depth_mix``: one program per token, which reads each row once and keeps a running softmax.

The sum over depth is rescaled whenever a row scores higher than all before it, so no row is kept or read again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from sglang_k3.kernels.rms_norm.triton_impl import normalise

if TYPE_CHECKING:
    from torch import Tensor


def depth_mix(
    bank: Tensor, prefix_sum: Tensor, folded_weight: Tensor, *, eps: float, norm_weight: Tensor | None = None
) -> Tensor:
    tokens, width = prefix_sum.shape
    out = torch.empty(tokens, width, dtype=prefix_sum.dtype, device=prefix_sum.device)
    if out.numel() == 0:
        return out
    block = triton.next_power_of_2(width)
    _depth_mix[(tokens,)](
        bank,
        prefix_sum,
        folded_weight,
        norm_weight,
        out,
        bank.shape[0],
        width,
        eps,
        *bank.stride(),
        *prefix_sum.stride(),
        folded_weight.stride(0),
        0 if norm_weight is None else norm_weight.stride(0),
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
    )
    return out


@triton.jit
def _depth_mix(
    bank_ptr,
    prefix_ptr,
    weight_ptr,
    norm_ptr,
    out_ptr,
    num_rows,
    width,
    eps,
    bank_row,
    bank_token,
    bank_col,
    prefix_token,
    prefix_col,
    weight_col,
    norm_col,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < width
    weight = tl.load(weight_ptr + cols * weight_col, mask=inside, other=0.0)
    prefix = tl.load(prefix_ptr + token * prefix_token + cols * prefix_col, mask=inside, other=0.0).to(tl.float32)
    highest = _score(prefix, weight, width, eps)
    total = highest * 0.0 + 1.0
    mixed = prefix
    bank_ptr += token * bank_token + cols * bank_col
    # Asking for stages lets the next rows arrive while this one is scored.
    for _ in tl.range(0, num_rows, num_stages=4):
        row = tl.load(bank_ptr, mask=inside, other=0.0).to(tl.float32)
        bank_ptr += bank_row
        score = _score(row, weight, width, eps)
        higher = tl.maximum(highest, score)
        kept, added = tl.exp(highest - higher), tl.exp(score - higher)
        mixed = mixed * kept + row * added
        total = total * kept + added
        highest = higher
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    out = tl.div_rn(mixed, total).to(dtype)
    if norm_ptr is not None:
        norm_weight = tl.load(norm_ptr + cols * norm_col, mask=inside, other=0.0)
        out = normalise(out.to(tl.float32), norm_weight, width, eps, dtype)
    tl.store(out_ptr + token * width + cols, out, mask=inside)


@triton.jit
def _score(row, weight, width, eps):
    return tl.sum(row * weight) / tl.sqrt_rn(tl.sum(row * row) / width + eps)
