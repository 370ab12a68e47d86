"""Seam: before the host captures its CUDA graphs, every Triton kernel is compiled, by all cores at once."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_k3.env import kernel_mode
from sglang_k3.errors import ConfigError
from sglang_k3.integration.graphs import refuse_larger_than_pool
from sglang_k3.integration.refusals import PREFIX_CACHE

if TYPE_CHECKING:
    from sglang_k3.kernels.compile_farm import CompileFarm

logger = logging.getLogger(__name__)

TARGET = "sglang.srt.model_executor.model_runner_components.cuda_graph_setup.capture_cuda_graphs"
MAX_PROCESSES = 32
PROGRESS_S = 2.0
_farm: CompileFarm | None = None


def install() -> None:
    HookRegistry.register(TARGET, _capture, HookType.AROUND)
    HookRegistry.apply_hooks()


def start_farm(server_args: Any, tp_rank: int) -> None:
    """Start the compiling processes beside the imports and the loading, one farm for the ranks of a stage on a machine.

    Ranks of one machine share Triton's cache, ranks of one stage have the same kernels.
    """
    global _farm
    machines_of_stage = max(1, server_args.nnodes // server_args.pp_size)
    first_on_machine = tp_rank % (server_args.tp_size // machines_of_stage) == 0
    if server_args.device != "cuda" or not first_on_machine or kernel_mode() == "reference":
        return
    from sglang_k3.kernels.compile_farm import CompileFarm

    ranks = server_args.tp_size * server_args.pp_size // server_args.nnodes
    share = (len(os.sched_getaffinity(0)) - ranks) // max(1, server_args.pp_size // server_args.nnodes)
    _farm = CompileFarm(max(1, min(MAX_PROCESSES, share)))


def _capture(original: Callable[..., Any], *, model_runner: Any, **kwargs: Any) -> Any:
    try:
        refuse_larger_than_pool(
            model_runner.server_args.asked_graph_batch,
            model_runner.req_to_token_pool.size,
            "the memory of this GPU leaves",
        )
    except ConfigError as error:
        sys.exit(f"sglang-k3: {error}")
    if model_runner.device == "cuda" and kernel_mode() != "reference":
        _compile_kernels(model_runner)
    return original(model_runner=model_runner, **kwargs)


def _compile_kernels(model_runner: Any) -> None:
    global _farm
    import torch
    from sglang.srt.model_executor.runner import get_batch_sizes_to_capture

    from sglang_k3.host.rehearsal import rehearse
    from sglang_k3.kernels.compile_farm import held_back

    begin = time.monotonic()
    sizes, _ = get_batch_sizes_to_capture(model_runner)
    has_k3_cache = model_runner.server_args.radix_cache_backend == PREFIX_CACHE
    try:
        if _farm is not None:
            major, minor = torch.cuda.get_device_capability(model_runner.gpu_id)
            _farm.begin(10 * major + minor)
        with held_back(None if _farm is None else _farm.submit) as jobs:
            rehearse(model_runner, sizes, has_k3_cache=has_k3_cache)
        torch.cuda.empty_cache()  # or what the longest prompt took would be missing for the graphs
        logger.info("K3: %d Triton kernels to compile, listed in %.1f s.", len(jobs), time.monotonic() - begin)
        if _farm is not None:
            _farm.wait(_Progress(_farm.processes, begin))
    finally:
        if _farm is not None:
            _farm.close()
            _farm = None
    model_runner.tp_group.barrier()  # ranks without a farm find the kernels in the cache that the ranks share


class _Progress:
    """A line in the log every other second, and one at the end; times since ``begin``, when the listing began."""

    def __init__(self, processes: int, begin: float) -> None:
        self._processes = processes
        self._begin = self._last = begin

    def __call__(self, done: int, of: int) -> None:
        now = time.monotonic()
        if done == of or now - self._last > PROGRESS_S:
            self._last = now
            logger.info(
                "K3: %d of %d Triton kernels compiled by %d processes in %.1f s.",
                done,
                of,
                self._processes,
                now - self._begin,
            )
