"""Seam: how many tokens a data-parallel rank computes in one step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType


def install() -> None:
    target = "sglang.srt.layers.dp_attention.DpPaddingMode.get_dp_padding_mode"
    HookRegistry.register(target, _no_padding, HookType.AROUND)
    HookRegistry.apply_hooks()


def _no_padding(original: Callable[..., Any], cls: Any, *args: Any) -> Any:
    """Its own, however many the others have: padding up to theirs would run through attention and the states."""
    return cls.SUM_LEN
