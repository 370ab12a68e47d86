"""Where the Triton kernels run, and how an op lists its own without importing Triton."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

import torch

from sglang_k3.env import triton_interprets
from sglang_k3.kernels.dispatch import PUBLISHED, Impl, Layout, OpContext

if TYPE_CHECKING:
    from collections.abc import Callable

MIN_CAPABILITY = (8, 0)


def supports_triton(ctx: OpContext) -> str | None:
    """Why no Triton kernel runs in ``ctx``, or ``None``. On a CPU they run in Triton's interpreter only, for tests."""
    if ctx.device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(ctx.device)
        if (major, minor) < MIN_CAPABILITY:
            return f"needs a CUDA device of sm_80 or newer, got sm_{major}{minor}"
        return None
    if ctx.device.type == "cpu" and triton_interprets():
        return None
    return f"needs a CUDA device of sm_80 or newer, got {ctx.device.type}"


def supports_triton_up_to(**largest: int) -> Callable[[OpContext], str | None]:
    """``supports_triton`` for kernels whose tiles hold a whole row: refuses sizes above what they were tested with."""

    def supports(ctx: OpContext) -> str | None:
        reason = supports_triton(ctx)
        for name, limit in largest.items():
            if reason is None and ctx.sizes.get(name, 0) > limit:
                reason = f"takes {name} up to {limit}, got {ctx.sizes[name]}"
        return reason

    return supports


def triton_impl(
    reference: Callable[..., Any],
    supports: Callable[[OpContext], str | None] = supports_triton,
    layout: Layout = PUBLISHED,
) -> Impl:
    """The function of the same name in the ``triton_impl.py`` beside ``reference``.

    Args:
        reference: the op in plain torch, which gives name, place and signature.
        supports: one of the functions above, or a function that asks one and adds reasons of its own.
        layout: of the weights that the function takes.
    """
    return lazy_impl("triton", reference, supports, layout)


def lazy_impl(
    name: str,
    reference: Callable[..., Any],
    supports: Callable[[OpContext], str | None],
    layout: Layout = PUBLISHED,
) -> Impl:
    """Likewise of the ``NAME_impl.py`` beside ``reference``, for a ``name`` that may be a library's; the first call
    imports it."""
    module = f"{reference.__module__.removesuffix('.reference')}.{name}_impl"

    @functools.cache
    def launcher() -> Callable[..., Any]:
        fn: Callable[..., Any] = getattr(importlib.import_module(module), reference.__name__)
        return fn

    @functools.wraps(reference)
    def launch(*args: Any, **kwargs: Any) -> Any:
        return launcher()(*args, **kwargs)

    return Impl(name, launch, supports, layout)
