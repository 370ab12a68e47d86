"""Seam: small functions of the host that wait for a compiler when they are first called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

FORWARD_BATCH = "sglang.srt.model_executor.forward_batch_info"
COMPILED_BY_TORCH = (
    "sglang.srt.layers.vocab_parallel_embedding.get_masked_input_and_mask",
    "sglang.srt.layers.sampler.multinomial_with_seed",
)


def install() -> None:
    HookRegistry.register(f"{FORWARD_BATCH}.clamp_position", _positions, HookType.AROUND)
    for target in COMPILED_BY_TORCH:
        HookRegistry.register(target, _as_written, HookType.AROUND)
    HookRegistry.apply_hooks()


def _positions(original: Callable[..., Any], seq_lens: Any) -> Any:
    """The host's own function for devices on which it has no CUDA compiler."""
    from sglang.srt.model_executor.forward_batch_info import _clamp_position_native

    return _clamp_position_native(seq_lens)


def _as_written(original: Callable[..., Any], *args: Any) -> Any:
    """The function that was given to ``torch.compile``: a few launches more, and none at all under a CUDA graph."""
    return original._torchdynamo_orig_callable(*args)  # type: ignore[attr-defined]
