"""Seam: the places where the host launches a Triton kernel or pins memory although the device is a CPU.

Installed in the scheduler process of a K3 server on a CPU, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType


def install() -> None:
    from sglang.srt.mem_cache.allocator import paged

    for target, hook in (
        ("sglang.srt.utils.common.support_triton", _support_triton),
        ("sglang.srt.mem_cache.allocation.get_last_loc", _get_last_loc),
        ("sglang.srt.managers.schedule_batch.set_mamba_track_indices_from_reqs", _set_track_indices),
        ("sglang.srt.configs.update_config.adjust_config_with_unaligned_cpu_tp", _leave_config_alone),
        ("sglang.srt.constrained.xgrammar_backend.XGrammarGrammar.apply_vocab_mask", _apply_vocab_mask),
        ("sglang.srt.layers.dp_attention.memcpy_triton", _copy_rows),
    ):
        HookRegistry.register(target, hook, HookType.AROUND)
    HookRegistry.apply_hooks()
    # Pinning speeds up copies to an accelerator; without one there is nothing to pin, and torch raises.
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    torch.tensor = _Unpinned(torch.tensor)
    paged.alloc_extend_kernel = _HostKernel(_alloc_extend)
    paged.alloc_decode_kernel = _HostKernel(_alloc_decode)


def _support_triton(original: Callable[..., bool], backend: str) -> bool:
    return False


def _get_last_loc(original: Callable[..., torch.Tensor], *args: torch.Tensor) -> torch.Tensor:
    from sglang.srt.mem_cache.allocation import get_last_loc_torch

    return get_last_loc_torch(*args)


def _set_track_indices(original: Callable[..., None], batch: Any) -> None:
    """The slot that each request's next snapshot goes to, ``[B]`` int64."""
    pairs = batch.req_to_token_pool.req_index_to_mamba_ping_pong_track_buffer_mapping[batch.req_pool_indices]
    which = torch.tensor([req.mamba_next_track_idx or 0 for req in batch.reqs], dtype=torch.int64)
    batch.mamba_track_indices = pairs.gather(1, which.unsqueeze(1)).squeeze(1).to(torch.int64)


def _leave_config_alone(original: Callable[..., Any], model_config: Any, *args: Any) -> Any:
    """The host pads widths for its own CPU kernels, which K3 does not use; K3 checks its splits itself."""
    return model_config


def _apply_vocab_mask(
    original: Callable[..., None], grammar: Any, logits: torch.Tensor, vocab_mask: torch.Tensor
) -> None:
    """Forbid the tokens that a grammar does not allow; the host knows accelerators only."""
    from xgrammar import apply_token_bitmask_inplace

    apply_token_bitmask_inplace(logits, vocab_mask)


def _copy_rows(
    original: Callable[..., None],
    dst: torch.Tensor,
    src: torch.Tensor,
    dim: int,
    offset: torch.Tensor,
    num_rows: torch.Tensor,
    offset_src: bool,
) -> None:
    """Rows ``[offset, offset + num_rows)`` of one tensor and the first ``num_rows`` of the other."""
    count = int(num_rows)
    part = slice(int(offset), int(offset) + count)
    if offset_src:
        dst[:count] = src[part]
    else:
        dst[part] = src[:count]


class _Unpinned:
    """A function that makes tensors, without the wish to pin them."""

    def __init__(self, make: Callable[..., torch.Tensor]) -> None:
        self._make = make

    def __call__(self, *args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return self._make(*args, **kwargs)


class _HostKernel:
    """A torch function launched as a Triton kernel is: ``kernel[grid](...)``."""

    def __init__(self, run: Callable[..., None]) -> None:
        self._run = run

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._run


def _alloc_extend(
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    out_indices: torch.Tensor,
    bs_upper: int,
    page_size: int,
) -> None:
    """Slots for the new tokens of every request: the rest of its last page, then fresh pages in order."""
    offset = page = 0
    for prefix_len, seq_len, last in zip(prefix_lens.tolist(), seq_lens.tolist(), last_loc.tolist(), strict=True):
        for position in range(prefix_len, seq_len):
            if position % page_size == 0:
                last = _fresh_slot(free_pages, page, page_size)
                page += 1
            else:
                last += 1
            out_indices[offset] = last
            offset += 1


def _alloc_decode(
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    out_indices: torch.Tensor,
    bs_upper: int,
    page_size: int,
) -> None:
    """One slot per request: the next of its last page, or the first of a fresh one."""
    page = 0
    for i, (seq_len, last) in enumerate(zip(seq_lens.tolist(), last_loc.tolist(), strict=True)):
        if (seq_len - 1) % page_size == 0:
            out_indices[i] = _fresh_slot(free_pages, page, page_size)
            page += 1
        else:
            out_indices[i] = last + 1


def _fresh_slot(free_pages: torch.Tensor, page: int, page_size: int) -> int:
    # The host launches before it checks that enough pages are free, and drops the result if they are not.
    return int(free_pages[page]) * page_size if page < len(free_pages) else 0
