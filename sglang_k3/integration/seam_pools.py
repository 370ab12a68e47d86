"""Seam: how the host sizes the pools of a pipeline stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType


def install() -> None:
    target = "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator._compute_cell_size"
    HookRegistry.register(target, _compute_cell_size, HookType.AROUND)
    HookRegistry.apply_hooks()


def _compute_cell_size(original: Callable[..., int], configurator: Any, *args: Any) -> int:
    """Bytes of one token's rows: at least one, as the host divides by it, also in a stage without an MLA layer.

    Such a stage then offers room for billions of tokens, and takes the number that the smallest stage has.
    """
    return max(1, original(configurator, *args))
