"""The routed experts of a LatentMoE layer, in the latent space.

    e_k = SiTU(z w1^T, z w3^T) w2^T         for each chosen expert, rounded as three ordinary linears and the activation
    out = sum_k weight_k e_k                weighted after the down projection, in fp32, rounded once

Experts that this rank does not hold are skipped, so the outputs of all ranks add up to the whole. The norm on the sum
comes after that reduction and is not part of the op.

Scales are data too. A kernel may decode only those between ``LOWEST_SCALE`` and ``HIGHEST_SCALE`` exactly: whoever
binds the op names the extremes of its weights as sizes ``lowest_scale`` and ``highest_scale``. The op that checks its
inputs looks them up, and waits for the device.

Packed weights are published as ``mxfp4_dequant`` reads them, and so the reference takes them. The Triton kernel takes
them, and their scales, in ``layout.TILES``: whoever binds it brings its weights there once. The op that checks its
inputs takes published weights everywhere; where a kernel runs it moves a copy of them, at every call.

Numerics: RATIO. Which experts are hit is data, so the reference waits for the device; a kernel need not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang_k3.kernels import OpContext, bind_impl
from sglang_k3.kernels.checks import BYTES, FLOATS, FP32, INTEGERS, check_dtypes, check_shapes, check_together
from sglang_k3.kernels.dispatch import Impl, reference_impl
from sglang_k3.kernels.latent_experts import reference
from sglang_k3.kernels.latent_experts.layout import TILES
from sglang_k3.kernels.triton_support import supports_triton, triton_impl

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["IMPLS", "latent_experts"]

LOWEST_SCALE, HIGHEST_SCALE = 64, 190  # codes of 2^-63 and 2^63


def _supports(ctx: OpContext) -> str | None:
    codes = ctx.sizes.get("lowest_scale", LOWEST_SCALE), ctx.sizes.get("highest_scale", HIGHEST_SCALE)
    if codes[0] < LOWEST_SCALE or codes[1] > HIGHEST_SCALE:
        return f"decodes scale codes {LOWEST_SCALE} to {HIGHEST_SCALE} exactly, got {codes[0]} to {codes[1]}"
    return supports_triton(ctx)


IMPLS: tuple[Impl, ...] = (
    triton_impl(reference.latent_experts, _supports, TILES),
    reference_impl(reference.latent_experts),
)


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
    """Run the chosen experts of each token and add them up.

    Args:
        z: latent inputs ``[T, L]``.
        topk_weights: ``[T, k]``, fp32.
        topk_ids: global expert ids ``[T, k]``; an id outside ``expert_offset + [0, E)`` is skipped.
        w13: gate rows (w1), then up rows (w3), ``[E, 2I, L]`` in the dtype of ``z``, or packed MXFP4
            ``[E, 2I, L / 2]``, uint8.
        w2: ``[E, L, I]``, or packed ``[E, L, I / 2]``.
        w13_scale, w2_scale: ``[E, 2I, L / 32]`` and ``[E, L, I / 32]``, uint8, if and only if the weights are packed.
        beta, linear_beta: of ``situ_and_mul``.
        expert_offset: global id of local expert 0.
    Returns:
        ``[T, L]`` in the dtype of ``z``.
    Raises:
        ValueError: a shape or dtype does not fit, or weights are packed without their scales.
    """
    op = "latent_experts"
    check_together(op, w13_scale=w13_scale, w2_scale=w2_scale)
    tokens = {"z": (z, "T L"), "topk_weights": (topk_weights, "T A"), "topk_ids": (topk_ids, "T A")}
    if w13_scale is None or w2_scale is None:
        sizes = check_shapes(op, **tokens, w13=(w13, "E 2I L"), w2=(w2, "E L I"))
        check_dtypes(op, (z.dtype,), w13=w13, w2=w2)
    else:
        packed = {"w13": (w13, "E 2I L/2"), "w2": (w2, "E L I/2")}
        scales = {"w13_scale": (w13_scale, "E 2I L/32"), "w2_scale": (w2_scale, "E L I/32")}
        sizes = check_shapes(op, **tokens, **packed, **scales)
        check_dtypes(op, BYTES, w13=w13, w2=w2, w13_scale=w13_scale, w2_scale=w2_scale)
        codes = [int(code) for scale in (w13_scale, w2_scale) if scale.numel() for code in scale.aminmax()]
        sizes |= {"lowest_scale": min(codes), "highest_scale": max(codes)} if codes else {}
    check_dtypes(op, FLOATS, z=z)
    check_dtypes(op, FP32, topk_weights=topk_weights)
    check_dtypes(op, INTEGERS, topk_ids=topk_ids)
    impl = bind_impl(op, OpContext(z.device, z.dtype, sizes))
    weights = {"w13": w13, "w2": w2}
    if w13_scale is not None and w2_scale is not None:
        weights |= {"w13_scale": w13_scale, "w2_scale": w2_scale}
        for name in impl.layout.arguments:
            weights[name] = weights[name].clone(memory_format=torch.contiguous_format)
            impl.layout.apply(name, weights[name])
    out: Tensor = impl.fn(
        z,
        topk_weights,
        topk_ids,
        **weights,
        beta=beta,
        linear_beta=linear_beta,
        expert_offset=expert_offset,
    )
    return out
