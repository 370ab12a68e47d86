"""Triton kernels of ``latent_experts``: grouped products straight from the 4-bit weights.

The choices are dealt out by expert into blocks of at most M, then two grouped products run over (block, tile of weight
rows) and a last kernel weights and adds the outputs of a token, in the order of its choices. Nothing waits for the
host: the number of blocks has a bound from sizes alone, and programs beyond the last block end at once.

The product is taken as ``weight x^T``: the matrix units accept their left operand from registers, so weights are
decoded where they are used and only their 4 bits pass through shared memory. A word of a weight holds 8 columns.
Activations are laid out as all first columns of the words, then all second ones and so on, so that nibble i of a tile
of words meets one stretch of a row and nothing is interleaved.

Sizes that change from call to call (blocks, choices) are not specialised, so that each tile is compiled once.

Legend: T tokens, P = T k choices, E experts, M choices of a block, N weight rows of a tile, K contracted columns,
W = K / 8 words of a row, G = K / 32 scales of a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from sglang_k3.kernels.triton_math import dot_dtype, sigmoid, soft_cap

if TYPE_CHECKING:
    from torch import Tensor

PLAN_BLOCK = 1024
COMBINE_BLOCK = 256
GROUP_WORDS = tl.constexpr(4)  # 32 values share a scale

# Two bf16 at a time. Two neighbouring words go in, and the pair of their nibbles i comes out for each i. A byte of each
# word is put at the bottom of the two halves of a register; a product with two powers of two copies a nibble to where
# its sign belongs and to where its magnitude does: the lowest bits of the exponent and the highest of the mantissa.
# That is 2^-126 times the value, 0.5 (a subnormal) included. The factor makes it 2^-62 times the weight and the sum is
# multiplied by 2^62, so that one product serves all scales from 2^-63 to 2^63 exactly; beyond, weights fade to zero or
# grow to infinity.
DECODE_PTX = tl.constexpr(
    "{ .reg .b32 bytes, bits, nil; mov.b32 nil, 0x80008000;"
    + "".join(
        f"prmt.b32 bytes, $8, $9, {0x4400 + 0x1111 * byte};"
        + "".join(
            f"and.b32 bits, bytes, {nibble}; mul.lo.u32 bits, bits, {copies}; and.b32 bits, bits, 0x81C081C0;"
            f"fma.rn.bf16x2 {value}, bits, $10, nil;"
            for value, nibble, copies in (
                (f"${2 * byte}", 0x000F000F, 2**12 + 2**6),
                (f"${2 * byte + 1}", 0x00F000F0, 2**8 + 2**2),
            )
        )
        for byte in range(4)
    )
    + "}"
)


class Tile(NamedTuple):
    """Choices, weight rows and words (columns, if not packed) of a tile, warps and pipeline stages."""

    m: int
    n: int
    k: int
    num_warps: int
    num_stages: int


class Plan(NamedTuple):
    """Which choices of which expert each block has; a single token's choices are blocks of one already."""

    num_blocks: int
    block_experts: Tensor | None = None
    block_pairs: Tensor | None = None


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
    num_tokens, latent = z.shape
    num_experts, top_k = w13.shape[0], topk_ids.shape[1]
    num_pairs, width = num_tokens * top_k, w13.shape[1] // 2
    out = torch.empty(z.shape, dtype=z.dtype, device=z.device)
    if out.numel() == 0:
        return out
    tile = _tile(num_pairs / num_experts, packed=w13_scale is not None, dtype=z.dtype)
    plan = _plan(topk_ids, num_experts, expert_offset, tile.m)
    x = z
    if w13_scale is not None:
        x = z.unflatten(1, (-1, 8)).transpose(1, 2).reshape(z.shape)
        w13, w2 = w13.view(torch.int32), w2.view(torch.int32)
    hidden = torch.empty(num_pairs, width, dtype=z.dtype, device=z.device)
    outputs = torch.empty(num_pairs, latent, dtype=z.dtype, device=z.device)
    for rows, result, weight, scale, is_gate_up in (
        (x, hidden, w13, w13_scale, True),
        (hidden, outputs, w2, w2_scale, False),
    ):
        _expert_linear[(plan.num_blocks * triton.cdiv(weight.shape[1], tile.n),)](
            rows,
            weight,
            scale,
            result,
            plan.block_experts,
            plan.block_pairs,
            topk_ids,
            plan.num_blocks,
            num_experts,
            expert_offset,
            beta,
            linear_beta,
            rows.stride(),
            weight.stride(),
            (0, 0, 0) if scale is None else scale.stride(),
            topk_ids.stride(1),
            ROWS=weight.shape[1],
            K=rows.shape[1],
            PAIRS_PER_ROW=top_k if is_gate_up else 1,
            GATE_UP=is_gate_up,
            M=tile.m,
            N=tile.n,
            BLOCK_K=tile.k,
            DOT=dot_dtype(z),
            PTX=z.is_cuda and z.dtype == torch.bfloat16,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
    _combine[(num_tokens, triton.cdiv(latent, COMBINE_BLOCK))](
        outputs,
        topk_weights,
        topk_ids,
        out,
        num_experts,
        expert_offset,
        outputs.stride(0),
        topk_weights.stride(),
        topk_ids.stride(),
        out.stride(0),
        TOP_K=top_k,
        BLOCK_K=triton.next_power_of_2(top_k),
        L=latent,
        BLOCK_L=COMBINE_BLOCK,
    )
    return out


def _tile(pairs_per_expert: float, *, packed: bool, dtype: torch.dtype) -> Tile:
    """By the mean number of choices of an expert, an upper bound where other ranks hold experts too."""
    if dtype == torch.float32:
        return Tile(16, 32, 8 if packed else 32, 4, 1)
    k = 32 if packed else 128  # words of a whole cache line
    if pairs_per_expert <= 8:
        return Tile(8, 128, k, 4, 3)
    if pairs_per_expert <= 32:
        return Tile(32, 128, k, 4, 3)
    if pairs_per_expert <= 64:
        return Tile(64, 128, k, 8, 3)
    return Tile(128, 128, k, 8, 3)


def _plan(topk_ids: Tensor, num_experts: int, expert_offset: int, block: int) -> Plan:
    num_tokens, top_k = topk_ids.shape
    if num_tokens == 1:
        return Plan(top_k)
    num_pairs = num_tokens * top_k
    # An expert that is hit leaves at most block - 1 places of its last block empty.
    num_blocks = (num_pairs + min(num_pairs, num_experts) * (block - 1)) // block
    sizes = (num_experts, num_pairs, num_blocks * block, num_blocks)
    memory = torch.full((sum(sizes),), -1, dtype=torch.int32, device=topk_ids.device)
    last_ranks, ranks, block_pairs, block_experts = memory.split(sizes)
    grid = (triton.cdiv(num_pairs, PLAN_BLOCK),)
    common = (topk_ids, topk_ids.stride(), num_pairs, num_experts, expert_offset, last_ranks, ranks)
    _rank[grid](*common, TOP_K=top_k, BLOCK=PLAN_BLOCK)
    _deal[grid](
        *common,
        block_experts,
        block_pairs,
        TOP_K=top_k,
        BLOCK=PLAN_BLOCK,
        BLOCK_E=triton.next_power_of_2(num_experts),
        M=block,
    )
    return Plan(num_blocks, block_experts, block_pairs)


@triton.jit
def _local_experts(topk_ids, ids_strides, pairs, inside, num_experts, expert_offset, TOP_K: tl.constexpr):
    """Local expert of each choice, and whether this rank holds it."""
    rows = (pairs // TOP_K).to(tl.int64)
    local = tl.load(topk_ids + rows * ids_strides[0] + pairs % TOP_K * ids_strides[1], mask=inside, other=-1)
    local = tl.where(inside, local - expert_offset, -1).to(tl.int32)
    return local, (local >= 0) & (local < num_experts)


@triton.jit(do_not_specialize=["num_pairs"])
def _rank(
    topk_ids,
    ids_strides,
    num_pairs,
    num_experts,
    expert_offset,
    last_ranks,
    ranks,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Number the choices of each expert; which gets which number does not matter, every row is computed alike."""
    pairs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    local, held = _local_experts(topk_ids, ids_strides, pairs, pairs < num_pairs, num_experts, expert_offset, TOP_K)
    rank = tl.atomic_add(last_ranks + local, 1, mask=held) + 1
    tl.store(ranks + pairs, rank, mask=held)


@triton.jit(do_not_specialize=["num_pairs"])
def _deal(
    topk_ids,
    ids_strides,
    num_pairs,
    num_experts,
    expert_offset,
    last_ranks,
    ranks,
    block_experts,
    block_pairs,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,
    M: tl.constexpr,
):
    """Put each choice into its place in the blocks of its expert."""
    experts = tl.arange(0, BLOCK_E)
    counts = tl.load(last_ranks + experts, mask=experts < num_experts, other=-1) + 1
    blocks = tl.cdiv(counts, M)
    first_blocks = tl.cumsum(blocks, axis=0) - blocks
    pairs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    local, held = _local_experts(topk_ids, ids_strides, pairs, pairs < num_pairs, num_experts, expert_offset, TOP_K)
    rank = tl.load(ranks + pairs, mask=held, other=0)
    block = tl.gather(first_blocks, tl.where(held, local, 0), axis=0) + rank // M
    tl.store(block_pairs + block * M + rank % M, pairs, mask=held)
    tl.store(block_experts + block, local, mask=held & (rank % M == 0))


@triton.jit(do_not_specialize=["num_blocks"])
def _expert_linear(
    x,
    weight,
    scale,
    out,
    block_experts,
    block_pairs,
    topk_ids,
    num_blocks,
    num_experts,
    expert_offset,
    beta,
    linear_beta,
    x_strides,
    weight_strides,
    scale_strides,
    ids_stride,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    GATE_UP: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOT: tl.constexpr,
    PTX: tl.constexpr,
):
    """``weight x^T`` for one tile of weight rows and one block of choices, activated if the rows are gate and up."""
    block = tl.program_id(0) % num_blocks
    tile = tl.program_id(0) // num_blocks
    m = tl.arange(0, M)
    if block_experts is None:
        expert = tl.load(topk_ids + block * ids_stride).to(tl.int32) - expert_offset
        pairs = tl.where(m == 0, block, -1)
    else:
        expert = tl.load(block_experts + block)
        pairs = tl.load(block_pairs + block * M + m)
    if (expert < 0) | (expert >= num_experts):
        return
    # Outputs are found by their place in a row of out, which for gate and up is laid out as the next product wants it.
    # Rows of gate and up alternate, so that a pair of them is easily split.
    n = tl.arange(0, N)
    width: tl.constexpr = ROWS // 2 if GATE_UP else ROWS
    places = tile * (N // 2) + n // 2 if GATE_UP else tile * N + n
    columns = places
    if GATE_UP and scale is not None:
        columns = places % (width // 8) * 8 + places // (width // 8)
    rows = n % 2 * width + columns if GATE_UP else columns
    x_rows = x + tl.maximum(pairs // PAIRS_PER_ROW, 0)[:, None].to(tl.int64) * x_strides[0]
    weight_rows = weight + expert.to(tl.int64) * weight_strides[0] + rows[:, None].to(tl.int64) * weight_strides[1]
    live, inside = pairs[:, None] >= 0, places[:, None] < width
    total = tl.zeros([N, M], tl.float32)
    if scale is None:
        for start in range(0, K, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            a = tl.load(x_rows + k[None, :] * x_strides[1], mask=live & (k[None, :] < K), other=0.0)
            w = tl.load(weight_rows + k[None, :] * weight_strides[2], mask=inside & (k[None, :] < K), other=0.0)
            total = tl.dot(w, tl.trans(a), total, input_precision="ieee")
    else:
        scale_rows = scale + expert.to(tl.int64) * scale_strides[0] + rows[:, None].to(tl.int64) * scale_strides[1]
        W: tl.constexpr = K // 8
        WHOLE: tl.constexpr = W % BLOCK_K == 0  # tiles fill the row, no column needs a check
        for start in range(0, W, BLOCK_K):
            w = (start + tl.arange(0, BLOCK_K))[None, :]
            words = tl.load(weight_rows + w * weight_strides[2], mask=inside & ((w < W) | WHOLE), other=0)
            g = (tl.arange(0, BLOCK_K // GROUP_WORDS) + start // GROUP_WORDS)[None, :]
            codes = tl.load(scale_rows + g * scale_strides[2], mask=inside & ((g < W // GROUP_WORDS) | WHOLE), other=0)
            k = tl.arange(0, 8 * BLOCK_K)[None, :]
            w = start + k % BLOCK_K
            a = tl.load(x_rows + (k // BLOCK_K * W + w) * x_strides[1], mask=live & ((w < W) | WHOLE), other=0.0)
            total = tl.dot(_decode(words, codes, DOT, PTX), tl.trans(a), total, input_precision="ieee")
        if PTX:
            total *= 4.611686018427388e18  # 2^62
    dtype = out.dtype.element_ty
    total = total.to(dtype)
    if GATE_UP:
        gate, up = tl.split(tl.permute(tl.reshape(total.to(tl.float32), [N // 2, 2, M]), (0, 2, 1)))
        total = (_situ(gate, beta) * (up if linear_beta is None else soft_cap(up, linear_beta))).to(dtype)
        places = tile * (N // 2) + tl.arange(0, N // 2)
    out_rows = out + pairs[None, :].to(tl.int64) * width
    tl.store(out_rows + places[:, None], total, mask=(pairs[None, :] >= 0) & (places[:, None] < width))


@triton.jit
def _situ(gate, beta):
    return soft_cap(gate, beta) * sigmoid(gate)


@triton.jit
def _decode(words, codes, DOT: tl.constexpr, PTX: tl.constexpr):
    """Each of the 8 nibbles of ``words [N, W]`` times its scale ``codes [N, W / 4]``; with PTX 2^-62 times that."""
    if PTX:
        factors = _spread((tl.minimum(codes.to(tl.int32), 191) + 64) * 0x00800080, words.shape)
        values = tl.inline_asm_elementwise(
            DECODE_PTX,
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r",
            [words, factors],
            dtype=(tl.bfloat16,) * 8,
            is_pure=True,
            pack=2,
        )
    else:
        bits = tl.where(codes == 0, 1 << 22, tl.where(codes == 255, 0x7FC00000, codes.to(tl.int32) << 23))
        factors = _spread(bits.to(tl.float32, bitcast=True), words.shape)
        values = ()
        for i in tl.static_range(8):
            values = values + ((_e2m1(words >> (4 * i)) * factors).to(DOT),)
    # A thread has its words' nibbles already: these are all names of registers.
    even = tl.join(tl.join(values[0], values[4]), tl.join(values[2], values[6]))
    odd = tl.join(tl.join(values[1], values[5]), tl.join(values[3], values[7]))
    return tl.reshape(tl.permute(tl.join(even, odd), (0, 2, 3, 4, 1)), [words.shape[0], 8 * words.shape[1]])


@triton.jit
def _spread(factors, shape: tl.constexpr):
    """``[N, G]`` to ``[N, W]``: each for its group of words."""
    N: tl.constexpr = shape[0]
    W: tl.constexpr = shape[1]
    return tl.reshape(tl.broadcast_to(factors[:, :, None], [N, W // GROUP_WORDS, GROUP_WORDS]), [N, W])


@triton.jit
def _e2m1(nibbles):
    """Value of 4-bit floats in fp32, by its bits: as in ``DECODE_PTX``."""
    bits = nibbles.to(tl.uint32)
    bits = ((bits & 7) << 22) | ((bits & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126


@triton.jit
def _combine(
    outputs,
    topk_weights,
    topk_ids,
    out,
    num_experts,
    expert_offset,
    outputs_stride,
    weights_strides,
    ids_strides,
    out_stride,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    L: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    choices = tl.arange(0, BLOCK_K)
    columns = tl.program_id(1) * BLOCK_L + tl.arange(0, BLOCK_L)
    pairs = token * TOP_K + choices
    _, held = _local_experts(topk_ids, ids_strides, pairs, choices < TOP_K, num_experts, expert_offset, TOP_K)
    weights = tl.load(topk_weights + token * weights_strides[0] + choices * weights_strides[1], mask=held, other=0.0)
    mask = held[:, None] & (columns[None, :] < L)
    rows = tl.load(outputs + pairs[:, None] * outputs_stride + columns[None, :], mask=mask, other=0.0)
    total = tl.sum(weights[:, None] * rows.to(tl.float32), axis=0)
    tl.store(out + token * out_stride + columns, total.to(out.dtype.element_ty), mask=columns < L)
