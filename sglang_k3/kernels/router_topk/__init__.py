"""Choose the experts of each token.

    s   = sigmoid(x W^T)                       fp32 GEMM of fp32 operands
    ids = the top_k largest of s + bias        the bias steers the choice only; ties go to the lower index
    w   = s[ids];  w <- w / (sum(w) + 1e-20) if renormalize;  w <- w * scaling_factor

With ``topk_group < num_expert_group`` the experts compete only inside the best groups; the score of a group is the sum
of its two best biased scores, ties again to the lower index.

Numerics: RATIO for the weights; the ids are exact wherever scores differ by more than fp32 noise. A row of NaN gives
valid ids and NaN weights. The Triton kernel gives a token the same bits in every batch. Capturable in CUDA graphs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_k3.kernels import OpContext, bind
from sglang_k3.kernels.checks import FLOATS, FP32, check_dtypes, check_shapes
from sglang_k3.kernels.dispatch import Impl, reference_impl
from sglang_k3.kernels.router_topk import reference
from sglang_k3.kernels.triton_support import triton_impl

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["IMPLS", "router_topk"]

IMPLS: tuple[Impl, ...] = (triton_impl(reference.router_topk), reference_impl(reference.router_topk))


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
    """Route each token.

    Args:
        x: hidden states at full width ``[T, D]``; converted to fp32.
        weight: ``[E, D]``; converted to fp32.
        bias: correction of the choice ``[E]``, fp32.
        top_k: experts per token.
        renormalize: whether the weights of a token are divided by their sum.
        scaling_factor: multiplies the weights last.
        num_expert_group, topk_group: number of groups, and how many of them a token may use.
    Returns:
        Weights ``[T, top_k]``, fp32, and expert ids ``[T, top_k]``, int32, best biased score first.
    Raises:
        ValueError: a shape or dtype does not fit, the groups do not divide the experts, or ``top_k`` exceeds what
            the kept groups hold.
    """
    op = "router_topk"
    sizes = check_shapes(op, x=(x, "T D"), weight=(weight, "E D"), bias=(bias, "E"))
    check_dtypes(op, FLOATS, x=x, weight=weight)
    check_dtypes(op, FP32, bias=bias)
    num_experts = sizes["E"]
    if num_expert_group < 1 or num_experts % num_expert_group or not 1 <= topk_group <= num_expert_group:
        raise ValueError(
            f"{op}: num_expert_group={num_expert_group} must divide the {num_experts} experts and be at least "
            f"topk_group={topk_group}, which is at least 1. Use 1 and 1 for no groups."
        )
    eligible = num_experts // num_expert_group * topk_group
    if not 1 <= top_k <= eligible:
        raise ValueError(f"{op}: top_k={top_k} must be 1 to {eligible}, the experts of the kept groups.")
    chosen: tuple[Tensor, Tensor] = bind(op, OpContext(x.device, x.dtype, sizes))(
        x,
        weight,
        bias,
        top_k=top_k,
        renormalize=renormalize,
        scaling_factor=scaling_factor,
        num_expert_group=num_expert_group,
        topk_group=topk_group,
    )
    return chosen
