"""Where FlashMLA serves ``mla_decode``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang_k3.kernels.mla_decode import reference
from sglang_k3.kernels.triton_support import lazy_impl

if TYPE_CHECKING:
    from sglang_k3.kernels import OpContext

PAGE = 64  # rows; FlashMLA knows no other size
LATENT, WIDTH = 512, 576
FEW_HEADS = 32  # it computes 64 at a time


def supports(ctx: OpContext) -> str | None:
    """Why it does not, or ``None``. Sizes: rows of a page, heads H, elements of a row D and of its latent part L."""
    if ctx.device.type != "cuda":
        return f"needs a Hopper GPU (sm_90), got {ctx.device.type}"
    major, minor = torch.cuda.get_device_capability(ctx.device)
    if (major, minor) != (9, 0):
        return f"needs a Hopper GPU (sm_90), got sm_{major}{minor}"
    page, heads, sizes = ctx.sizes.get("page"), ctx.sizes.get("H", 0), (ctx.sizes.get("L"), ctx.sizes.get("D"))
    if page != PAGE:
        return f"needs pages of {PAGE} rows, got {page or 'no pages'}"
    if ctx.dtype != torch.bfloat16 or sizes != (LATENT, WIDTH):
        return f"needs rows of {WIDTH} torch.bfloat16, {LATENT} of them latent, got {sizes[1]} {ctx.dtype}, {sizes[0]}"
    if heads <= FEW_HEADS:
        return f"is no faster up to {FEW_HEADS} heads, got {heads}"
    try:
        import sgl_kernel.flashmla_ops  # noqa: F401  registers torch.ops.sgl_kernel
    except ImportError as error:
        return f"cannot be loaded ({error})"
    return None


FLASHMLA = lazy_impl("flashmla", reference.mla_decode, supports)
