"""Triton kernels of ``router_topk``: a GEMM in fp32, then a choice by one program per token.

The sum over the width is cut into a number of parts that the width alone decides. Few tokens: each part is a program,
so that all of the device reads the weight; many tokens: one program adds the parts in the same order. Experts are the
rows of the product and tokens its columns, hence a token's bits are the same in any batch.

For the choice each warp takes the best of its own experts, one after the other and without waiting for the others; the
place of each of those in the whole is the number of those that are better.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from sglang_k3.kernels.triton_math import sigmoid

if TYPE_CHECKING:
    from torch import Tensor

_WIDTH = 64  # of a tile; sizes of tiles in the other dimensions do not change a bit
_PART = 14 * _WIDTH  # K3's 7168 are eight parts
_MANY_TOKENS = 2048
_SET = 128  # experts that one warp holds

LOWEST = tl.constexpr(-(1 << 31))
LOWEST_KEY = tl.constexpr(-(1 << 63))


def router_topk(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    top_k: int,
    renormalize: bool,
    scaling_factor: float,
    num_expert_group: int = 1,
    topk_group: int = 1,
) -> tuple[Tensor, Tensor]:
    tokens, num_experts = x.shape[0], weight.shape[0]
    topk_weights = torch.empty(tokens, top_k, dtype=torch.float32, device=x.device)
    topk_ids = torch.empty(tokens, top_k, dtype=torch.int32, device=x.device)
    if tokens == 0:
        return topk_weights, topk_ids
    logits = _partial_logits(x, weight)
    rounds = min(top_k, _SET)
    _choose[(tokens,)](
        logits,
        bias,
        topk_weights,
        topk_ids,
        num_experts,
        scaling_factor,
        logits.stride(1),
        bias.stride(0),
        NUM_PARTS=logits.shape[0],
        TOP_K=top_k,
        RENORMALIZE=renormalize,
        GROUPS=num_expert_group,
        KEPT=topk_group,
        SETS=triton.next_power_of_2(triton.cdiv(num_experts, _SET)),
        SET=_SET,
        ROUNDS=rounds,
        BLOCK_K=triton.next_power_of_2(rounds),
        BLOCK_G=triton.next_power_of_2(num_expert_group),
        num_warps=8,
    )
    return topk_weights, topk_ids


def _partial_logits(x: Tensor, weight: Tensor) -> Tensor:
    """``[parts, T, E]``, fp32: the logits are the sum over the parts, in order."""
    (tokens, width), num_experts = x.shape, weight.shape[0]
    num_parts = max(triton.cdiv(width, _PART), 1)
    if tokens >= _MANY_TOKENS:
        parts_per_program, block_e, block_t, num_warps = num_parts, 128, 128, 8
    else:
        parts_per_program, block_e, block_t, num_warps = 1, 64, min(max(triton.next_power_of_2(tokens), 16), 64), 4
    num_programs = num_parts // parts_per_program
    logits = torch.empty(num_programs, tokens, num_experts, dtype=torch.float32, device=x.device)
    # All experts of a tile of tokens come together: x does not stay in the cache for long, the weight does.
    grid = (triton.cdiv(num_experts, block_e), triton.cdiv(tokens, block_t), num_programs)
    _multiply[grid](
        x,
        weight,
        logits,
        tokens,
        num_experts,
        width,
        *x.stride(),
        *weight.stride(),
        logits.stride(1),
        PARTS=parts_per_program,
        PART=_PART,
        NATIVE=x.dtype == weight.dtype and x.dtype != torch.float32,
        BLOCK_E=block_e,
        BLOCK_T=block_t,
        BLOCK_D=_WIDTH,
        num_warps=num_warps,
        num_stages=4,
    )
    return logits


@triton.jit(do_not_specialize=["num_tokens"])
def _multiply(
    x_ptr,
    weight_ptr,
    logits_ptr,
    num_tokens,
    num_experts,
    width,
    x_row,
    x_col,
    weight_row,
    weight_col,
    logits_row,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Products of two 16-bit floats are exact in fp32; otherwise both are widened and multiplied as fp32."""
    tokens = tl.program_id(1).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    experts = tl.program_id(0).to(tl.int64) * BLOCK_E + tl.arange(0, BLOCK_E)
    cols = tl.program_id(2) * (PARTS * PART) + tl.arange(0, BLOCK_D)
    x_ptr += tokens[None, :] * x_row + cols[:, None] * x_col
    weight_ptr += experts[:, None] * weight_row + cols[None, :] * weight_col
    total = tl.zeros([BLOCK_E, BLOCK_T], tl.float32)
    for _ in range(PARTS):
        part = tl.zeros([BLOCK_E, BLOCK_T], tl.float32)
        for _ in range(PART // BLOCK_D):
            x = tl.load(x_ptr, mask=(tokens < num_tokens)[None, :] & (cols < width)[:, None], other=0.0)
            weight = tl.load(weight_ptr, mask=(experts < num_experts)[:, None] & (cols < width)[None, :], other=0.0)
            if NATIVE:
                part = tl.dot(weight, x, part)
            else:
                part = tl.dot(weight.to(tl.float32), x.to(tl.float32), part, input_precision="ieee")
            cols += BLOCK_D
            x_ptr += BLOCK_D * x_col
            weight_ptr += BLOCK_D * weight_col
        total += part
    # Parts are multiples of rows: were their stride an argument, it would be one that follows the number of tokens.
    first_row = tl.program_id(2).to(tl.int64) * num_tokens
    logits_ptr += (first_row + tokens)[None, :] * logits_row + experts[:, None]
    tl.store(logits_ptr, total, mask=(tokens < num_tokens)[None, :] & (experts < num_experts)[:, None])


@triton.jit
def _choose(
    logits_ptr,
    bias_ptr,
    topk_weights_ptr,
    topk_ids_ptr,
    num_experts,
    scaling_factor,
    logits_row,
    bias_col,
    NUM_PARTS: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    SETS: tl.constexpr,
    SET: tl.constexpr,
    ROUNDS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, SETS)[:, None] * SET + tl.arange(0, SET)[None, :]
    inside = experts < num_experts
    logits_ptr += token * logits_row
    logits_part = tl.num_programs(0).to(tl.int64) * logits_row
    biased = _scores(logits_ptr + experts, inside, logits_part, NUM_PARTS)
    biased += tl.load(bias_ptr + experts * bias_col, mask=inside, other=0.0)
    if KEPT < GROUPS:
        group = experts // (num_experts // GROUPS)
        biased = tl.where(_in_best_groups(biased, experts, group, GROUPS, KEPT, BLOCK_G), biased, float("-inf"))
    keys, ids = _best_of_each(tl.where(inside, _ordered(biased), LOWEST), experts, ROUNDS, SETS, BLOCK_K)
    scores = _scores(logits_ptr + ids, (ids >= 0) & (ids < num_experts), logits_part, NUM_PARTS)
    places = tl.arange(0, SETS * BLOCK_K)  # of equal keys the first has the lowest index
    above = keys[:, None] + (places[:, None] < places[None, :]).to(tl.int32) > keys[None, :]
    rank = tl.sum(above.to(tl.int32), axis=0)
    chosen = rank < TOP_K
    if RENORMALIZE:
        scores = tl.div_rn(scores, tl.sum(tl.where(chosen, scores, 0.0), axis=0) + 1e-20)
    tl.store(topk_ids_ptr + token * TOP_K + rank, ids, mask=chosen)
    tl.store(topk_weights_ptr + token * TOP_K + rank, scores * scaling_factor, mask=chosen)


@triton.jit
def _best_of_each(keys, experts, ROUNDS: tl.constexpr, SETS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Keys and indices ``[SETS * BLOCK_K]`` of the ``ROUNDS`` best experts of each set; the rest is below all experts.

    A set is what one warp holds, and its largest 32-bit key, then the lowest index of that, are one instruction each.
    """
    places = tl.arange(0, BLOCK_K)[None, :]
    best_keys = tl.zeros([SETS, BLOCK_K], tl.int32) + LOWEST
    best_ids = best_keys
    for place in tl.static_range(ROUNDS):
        best = tl.max(keys, axis=1)[:, None]
        index = tl.min(tl.where(keys == best, experts, 0x7FFFFFFF), axis=1)[:, None]
        best_keys = tl.where(places == place, best, best_keys)
        best_ids = tl.where(places == place, index, best_ids)
        keys = tl.where(experts == index, LOWEST, keys)
    return tl.reshape(best_keys, [SETS * BLOCK_K]), tl.reshape(best_ids, [SETS * BLOCK_K])


@triton.jit
def _scores(logits_ptr, inside, logits_part, NUM_PARTS: tl.constexpr):
    logits = tl.load(logits_ptr, mask=inside, other=0.0)
    for part in tl.static_range(1, NUM_PARTS):
        logits += tl.load(logits_ptr + part * logits_part, mask=inside, other=0.0)
    return sigmoid(logits)


@triton.jit
def _in_best_groups(biased, experts, group, GROUPS: tl.constexpr, KEPT: tl.constexpr, BLOCK_G: tl.constexpr):
    """Whether each expert is in one of the ``KEPT`` groups whose two best experts have the largest sums."""
    keys = _pack(_ordered(biased), experts)
    places = tl.arange(0, BLOCK_G)
    sums = tl.zeros([BLOCK_G], tl.float32)
    for place in tl.static_range(GROUPS):
        members = tl.where(group == place, keys, LOWEST_KEY)
        best = tl.max(members)
        second = tl.max(tl.where(members == best, LOWEST_KEY, members))  # no expert's, in a group of one
        two = (keys == best) | (keys == second)
        sums = tl.where(places == place, tl.sum(tl.where(two, biased, 0.0)), sums)
    group_keys = tl.where(places < GROUPS, _pack(_ordered(sums), places), LOWEST_KEY)
    kept = group < 0
    for _ in tl.static_range(KEPT):
        best = tl.max(group_keys, axis=0)
        kept |= group == _index_of(best)
        group_keys = tl.where(group_keys == best, LOWEST_KEY, group_keys)
    return kept


@triton.jit
def _ordered(value):
    """An int32 that orders like the fp32 value, NaN above all; never ``LOWEST``, and one more is still an int32."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return tl.where(value != value, 0x7FFFFFFE, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits))


@triton.jit
def _pack(ordered, index):
    """An int64 that orders like ``ordered``, and among equals by the lower index."""
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def _index_of(key):
    return (0x7FFFFFFF - (key & 0x7FFFFFFF)).to(tl.int32)
