"""Triton kernel of ``attn_merge``: one program per token and head."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor


def attn_merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    tokens, heads, value_dim = out_a.shape
    out = torch.empty(out_a.shape, dtype=torch.float32, device=out_a.device)
    lse = torch.empty(lse_a.shape, dtype=torch.float32, device=out_a.device)
    if lse.numel() == 0:
        return out, lse
    block = triton.next_power_of_2(value_dim)
    _attn_merge[(tokens, heads)](
        out_a,
        lse_a,
        out_b,
        lse_b,
        out,
        lse,
        value_dim,
        *out_a.stride(),
        *lse_a.stride(),
        *out_b.stride(),
        *lse_b.stride(),
        BLOCK=block,
        num_warps=min(max(block // 128, 1), 4),
    )
    return out, lse


@triton.jit
def _attn_merge(
    out_a_ptr,
    lse_a_ptr,
    out_b_ptr,
    lse_b_ptr,
    out_ptr,
    lse_ptr,
    value_dim,
    out_a_token,
    out_a_head,
    out_a_col,
    lse_a_token,
    lse_a_head,
    out_b_token,
    out_b_head,
    out_b_col,
    lse_b_token,
    lse_b_head,
    BLOCK: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cols = tl.arange(0, BLOCK)
    inside = cols < value_dim
    lse_a = tl.load(lse_a_ptr + token * lse_a_token + head * lse_a_head)
    lse_b = tl.load(lse_b_ptr + token * lse_b_token + head * lse_b_head)
    largest = tl.maximum(lse_a, lse_b)
    # With both parts empty the largest is -inf, and -inf - -inf would be NaN.
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    weight_a, weight_b = tl.exp(lse_a - shift), tl.exp(lse_b - shift)
    out_a = tl.load(out_a_ptr + token * out_a_token + head * out_a_head + cols * out_a_col, mask=inside)
    out_b = tl.load(out_b_ptr + token * out_b_token + head * out_b_head + cols * out_b_col, mask=inside)
    # A part of no weight counts as zero, whatever its output holds.
    weighted = tl.where(weight_a == 0.0, 0.0, out_a * weight_a) + tl.where(weight_b == 0.0, 0.0, out_b * weight_b)
    total = weight_a + weight_b
    out = tl.div_rn(weighted, tl.where(total == 0.0, 1.0, total))
    row = token * tl.num_programs(1) + head
    tl.store(out_ptr + row * value_dim + cols, out, mask=inside)
    tl.store(lse_ptr + row, shift + tl.log(total))
