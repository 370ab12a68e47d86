"""Triton kernel of ``depth_mix``: a program takes one token after the other and keeps a running softmax.

It takes several rows at a time, so that they arrive together and their scores are reduced together. The sum over depth
is rescaled when one of them scores higher than all before. Weights are read once for all tokens of a program; few
tokens get a program each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from sglang_k3.kernels.triton_math import normalise

if TYPE_CHECKING:
    from torch import Tensor


_ROWS = 8  # at a time; K3 has no more in its bank
_PROGRAMS = 512  # about what a large GPU runs at once


def depth_mix(
    bank: Tensor,
    prefix_sum: Tensor,
    folded_weight: Tensor,
    *,
    eps: float,
    norm_weight: Tensor | None = None,
    delta: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    tokens, width = prefix_sum.shape
    out = torch.empty(tokens, width, dtype=prefix_sum.dtype, device=prefix_sum.device)
    sums = prefix_sum if delta is None else torch.empty_like(out)
    if out.numel() == 0:
        return out, sums
    block = triton.next_power_of_2(width)
    _depth_mix[(min(tokens, _PROGRAMS),)](
        bank,
        prefix_sum,
        folded_weight,
        norm_weight,
        delta,
        out,
        None if delta is None else sums,
        tokens,
        bank.shape[0],
        width,
        eps,
        *bank.stride(),
        *prefix_sum.stride(),
        folded_weight.stride(0),
        0 if norm_weight is None else norm_weight.stride(0),
        (0, 0) if delta is None else delta.stride(),
        BLOCK=block,
        ROWS=min(triton.next_power_of_2(max(bank.shape[0], 1)), _ROWS),
        num_warps=min(max(block // 512, 1), 16),
    )
    return out, sums


@triton.jit(do_not_specialize=["num_tokens"])
def _depth_mix(
    bank_ptr,
    prefix_ptr,
    weight_ptr,
    norm_ptr,
    delta_ptr,
    out_ptr,
    sums_ptr,
    num_tokens,
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
    delta_strides,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    cols = tl.arange(0, BLOCK)[None, :]
    inside = cols < width
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    weight = tl.load(weight_ptr + cols * weight_col, mask=inside, other=0.0)
    norm_weight = weight if norm_ptr is None else tl.load(norm_ptr + cols * norm_col, mask=inside, other=0.0)
    for token in range(tl.program_id(0).to(tl.int64), num_tokens, tl.num_programs(0)):
        prefix = tl.load(prefix_ptr + token * prefix_token + cols * prefix_col, mask=inside, other=0.0)
        if delta_ptr is not None:
            delta = tl.load(delta_ptr + token * delta_strides[0] + cols * delta_strides[1], mask=inside, other=0.0)
            prefix = (prefix.to(tl.float32) + delta.to(tl.float32)).to(dtype)
            tl.store(sums_ptr + token * width + cols, prefix, mask=inside)
        mixed = tl.zeros([1, BLOCK], tl.float32)
        highest, total = tl.zeros([1], tl.float32) - float("inf"), tl.zeros([1], tl.float32)
        for first in range(0, num_rows, ROWS):
            depths = first + tl.arange(0, ROWS)
            in_bank = depths < num_rows
            rows_ptr = bank_ptr + token * bank_token + cols * bank_col + depths.to(tl.int64)[:, None] * bank_row
            mask = in_bank[:, None] & inside
            rows = tl.load(rows_ptr, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
            scores = tl.where(in_bank, _scores(rows, weight, width, eps), float("-inf"))
            # The rows are too many for the registers, so what comes next has them from the cache once more.
            rows = tl.load(rows_ptr, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
            mixed, total, highest = _add(rows, scores, mixed, total, highest)
        prefix = prefix.to(tl.float32)
        mixed, total, highest = _add(prefix, _scores(prefix, weight, width, eps), mixed, total, highest)
        out = (mixed * tl.div_rn(1.0, total)[:, None]).to(dtype)
        if norm_ptr is not None:
            out = normalise(out.to(tl.float32), norm_weight, width, eps, dtype)
        tl.store(out_ptr + token * width + cols, out, mask=inside)


@triton.jit
def _scores(rows, weight, width, eps):
    return tl.sum(rows * weight, axis=1) * tl.rsqrt(tl.sum(rows * rows, axis=1) / width + eps)


@triton.jit
def _add(rows, scores, mixed, total, highest):
    """Sums over depth, in units of the exponential of the ``highest`` score so far, with some more rows."""
    higher = tl.maximum(highest, tl.max(scores, axis=0, keep_dims=True))
    kept, added = tl.exp(highest - higher), tl.exp(scores - higher)
    mixed = mixed * kept[:, None] + tl.sum(rows * added[:, None], axis=0, keep_dims=True)
    return mixed, total * kept + tl.sum(added, axis=0, keep_dims=True), higher
