"""Where FlashMLA serves ``mla_decode``."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

import torch

from sglang_k3.kernels.dispatch import Impl
from sglang_k3.kernels.mla_decode import reference

if TYPE_CHECKING:
    from torch import Tensor

    from sglang_k3.kernels import OpContext

PAGE = 64  # rows; FlashMLA knows no other size
LATENT, WIDTH = 512, 576
FEW_HEADS = 32  # it computes 64 at a time


def supports(ctx: OpContext) -> str | None:
    """Why it does not, or ``None``. Sizes: rows of a page, heads H, elements of a row D and of its latent part L."""
    if ctx.device.type != "cuda" or torch.cuda.get_device_capability(ctx.device) != (9, 0):
        return "needs a Hopper GPU (sm_90)"
    page, heads, sizes = ctx.sizes.get("page"), ctx.sizes.get("H", 0), (ctx.sizes.get("L"), ctx.sizes.get("D"))
    if page != PAGE:
        return f"needs pages of {PAGE} rows, got {page or 'no pages'}"
    if ctx.dtype != torch.bfloat16 or sizes != (LATENT, WIDTH):
        return f"needs rows of {WIDTH} torch.bfloat16, {LATENT} of them latent, got {sizes[1]} {ctx.dtype}, {sizes[0]}"
    if heads <= FEW_HEADS:
        return f"is no faster up to {FEW_HEADS} heads, got {heads}"
    try:
        importlib.import_module("sgl_kernel.flashmla_ops")
    except ImportError as error:
        return f"cannot be loaded ({error})"
    return None


@functools.wraps(reference.mla_decode)
def _launch(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    from sglang_k3.kernels.mla_decode import flashmla_impl  # imports Triton

    return flashmla_impl.mla_decode(*args, **kwargs)


FLASHMLA = Impl("flashmla", _launch, supports)
