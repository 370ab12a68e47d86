"""The numerical core of K3: one folder per op, each with a reference in plain torch that defines what is correct.

Models ``bind`` an op once, in their constructor, and call the function they get. The op of the same name in its module
(``sglang_k3.kernels.rms_norm.rms_norm``) has the same signature and checks its inputs first.
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

from sglang_k3.env import kernel_mode
from sglang_k3.kernels.dispatch import OpContext, choose

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from sglang_k3.kernels.dispatch import Impl

__all__ = ["OPS", "OpContext", "bind", "bind_impl"]

OPS: Mapping[str, str] = {
    name: f"{__name__}.{name}"
    for name in (
        "attn_merge",
        "depth_mix",
        "gated_rms_norm",
        "kda_decode",
        "kda_gate",
        "kda_prefill",
        "kv_gather",
        "kv_scatter",
        "latent_experts",
        "mla_decode",
        "mla_prefill",
        "mxfp4_dequant",
        "rms_norm",
        "router_topk",
        "short_conv_decode",
        "short_conv_prefill",
        "sigmoid_gate",
        "situ_and_mul",
        "state_copy",
    )
}


def bind(op_name: str, ctx: OpContext) -> Callable[..., Any]:
    """The implementation of ``op_name`` for ``ctx``: a plain function that checks nothing.

    Raises:
        ValueError: as ``bind_impl``.
    """
    return bind_impl(op_name, ctx).fn


def bind_impl(op_name: str, ctx: OpContext) -> Impl:
    """The same with all that is known of it, for an op whose weights may have to lie in its ``layout``.

    Raises:
        ValueError: no op of that name, or no implementation that may run (see ``dispatch.choose``).
    """
    if op_name not in OPS:
        raise ValueError(f"There is no op {op_name!r}. Known: {', '.join(OPS)}.")
    return _bind(op_name, ctx, kernel_mode())


@functools.lru_cache(maxsize=1024)
def _bind(op_name: str, ctx: OpContext, mode: str) -> Impl:
    return choose(importlib.import_module(OPS[op_name]).IMPLS, ctx, mode)
