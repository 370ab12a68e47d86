"""Run the model once for each kind of step that a server will see, so that its kernels are known before a request.

Nothing of it matters but which kernels are launched, and for which sizes and types they are compiled: the requests own
no memory, and launches of this package are held back (``kernels.compile_farm``). Ranks rehearse together, as they
communicate.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.dp_attention import DpPaddingMode
from sglang.srt.model_executor.forward_batch_info import ForwardMode, PPProxyTensors
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

from sglang_k3.kernels.state_copy import state_copy

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from sglang.srt.model_executor.model_runner import ModelRunner

# Tokens of a prompt: one by one, around the sizes at which kernels change tiles, and odd and even multiples of 16,
# for which Triton compiles apart.
PROMPT_LENGTHS = (1, 2, 7, 16, 24, 33, 64, 100, 128, 250, 256, 400, 512, 1000, 1024, 2000, 2048, 4096, 8192)
SHARED_BATCHES = (2, 4, 8, 16, 32, 64)  # prompts that are computed together
PREFIXES = (64, 1000)


def rehearse(runner: ModelRunner, decode_sizes: Iterable[int], *, has_k3_cache: bool) -> None:
    """One forward pass without a head for each batch size of decoding, and for prompts of many lengths.

    Args:
        has_k3_cache: K3's own prefix cache asks for inner states of some prompts only, and copies states between steps.
            The host's tree asks in every step, decoding included, and its copies are part of the step.
    """
    in_decode = runner.server_args.enable_mamba_extra_buffer()
    in_extend = (True, False) if has_k3_cache else (in_decode,)
    longest = runner.server_args.chunked_prefill_size
    if longest is None or longest < 1:  # prompts are not cut; what is longer than this compiles nothing new
        longest = min(runner.model_config.context_len - 1, max(PROMPT_LENGTHS))
    with torch.no_grad():
        for tracks in in_extend:  # first, as their kernels take longest to compile
            for size, length, prefix in _extends(runner, longest):
                _forward(runner, _extend(runner, [length] * size, [prefix] * size, tracks), size * length)
        for size in decode_sizes:
            _forward(runner, _decode(runner, size, in_decode), size)
        if has_k3_cache:
            _copy_nothing(runner)
        _hand_out_nothing(runner)


def _extends(runner: ModelRunner, longest: int) -> Iterator[tuple[int, int, int]]:
    """Prompts, tokens of each that are computed, and tokens of each that come from the cache."""
    for length in {*(n for n in PROMPT_LENGTHS if n < longest), longest}:
        yield 1, length, 0
    for size in SHARED_BATCHES:
        if size <= runner.req_to_token_pool.size and 24 * size <= longest:
            yield size, 24, 0
    for prefix in PREFIXES:
        if prefix + 24 < runner.model_config.context_len:
            yield from ((1, 24, prefix), (2, 24, prefix))


def _copy_nothing(runner: ModelRunner) -> None:
    """The copies between steps, of no state at all."""
    pool = runner.req_to_token_pool.mamba_pool.mamba_cache
    nowhere = torch.full((2,), -1, dtype=torch.int64, device=runner.device)
    for states in (*pool.conv, pool.temporal):
        state_copy(states, src_indices=nowhere, dst_indices=nowhere)


def _hand_out_nothing(runner: ModelRunner) -> None:
    """The host's own kernels that find places in pages, which differ by the power of two of requests.

    Each request gets the second place of a page that it has, so that all free pages stay so. These are not held back:
    they are compiled here and now, while other processes compile ours.
    """
    allocator, most = runner.token_to_kv_pool_allocator, runner.req_to_token_pool.size
    page = allocator.page_size
    if page == 1:  # places are taken from a list
        return
    for n in range((most - 1).bit_length() + 1):
        size = min(1 << n, most)  # the last stands for the power of two above
        cached = torch.ones(size, dtype=torch.int64, device=runner.device)
        lens, last = cached + 1, page * torch.arange(size, device=runner.device)
        allocator.alloc_extend(cached, cached.cpu(), lens, lens.cpu(), last, size)
        allocator.alloc_decode(lens, lens.cpu(), last.int())  # of the dtypes that the host's steps have


def _forward(runner: ModelRunner, batch: SimpleNamespace, num_tokens: int) -> None:
    model, device = runner.model.model, runner.device
    ids = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    handed = None
    if not model.pp_group.is_first_rank:
        handed = PPProxyTensors(
            {"hidden_states": torch.zeros(num_tokens, model.handoff_width, dtype=runner.dtype, device=device)}
        )
    with forward_context(ForwardContext(attn_backend=runner.attn_backend)):
        runner.attn_backend.init_forward_metadata(batch)
        model(ids, batch, None, handed)


def _decode(runner: ModelRunner, size: int, tracks: bool) -> SimpleNamespace:
    return _batch(runner, ForwardMode.DECODE, size, size, tracks)


def _extend(runner: ModelRunner, lengths: list[int], prefixes: list[int], tracks: bool) -> SimpleNamespace:
    """Prompts by the tokens that are computed and those that come from the cache."""
    return _batch(
        runner,
        ForwardMode.EXTEND,
        len(lengths),
        sum(lengths),
        tracks,
        extend_seq_lens=torch.tensor(lengths, dtype=torch.int32, device=runner.device),
        extend_prefix_lens=torch.tensor(prefixes, dtype=torch.int32, device=runner.device),
        extend_prefix_lens_cpu=prefixes,
    )


def _batch(
    runner: ModelRunner, mode: ForwardMode, size: int, num_tokens: int, tracks: bool, **fields: Any
) -> SimpleNamespace:
    """Requests in row 0 of the host's tables and in slot 0 of its pools, which belong to nobody."""
    device, ranks = runner.device, runner.server_args.dp_size
    zeros = torch.zeros(size, dtype=torch.int64, device=device)
    everyone = torch.full((ranks,), num_tokens, dtype=torch.int32, device=device)
    return SimpleNamespace(
        forward_mode=mode,
        batch_size=size,
        req_pool_indices=zeros,
        seq_lens=torch.ones_like(zeros),
        out_cache_loc=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        mamba_track_mask=torch.zeros(size, dtype=torch.bool, device=device) if tracks else None,
        mamba_track_indices=zeros if tracks else None,
        mamba_track_seqlens=zeros if tracks else None,
        _original_batch_size=None,
        dp_padding_mode=DpPaddingMode.MAX_LEN,
        dp_local_start_pos=None,
        dp_local_num_tokens=None,
        global_dp_buffer_len=num_tokens * ranks,
        global_num_tokens_gpu=everyone,
        global_num_tokens_cpu=[num_tokens] * ranks,
        **fields,
    )
