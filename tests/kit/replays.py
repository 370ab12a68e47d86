"""A plugin for the host that runs decode steps as CUDA graphs are run, on a CPU.

The host's graph runner does its work: static buffers, padding to a captured size, metadata before a replay. What stands
in for a graph is the Python function that would be captured, called again over the same buffers. So whatever a step
reads that is not in those buffers is as old as the capture, as it would be in a graph.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

SIZES = [1, 2, 4, 8]
TARGET = "sglang.srt.model_executor.model_runner_components.cuda_graph_setup.capture_decode_graph"


def register() -> None:
    if multiprocessing.parent_process() is None:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(TARGET, _capture, HookType.AROUND)


def _capture(original: Callable[..., Any], *, model_runner: Any) -> Any:
    from sglang.srt.distributed.parallel_state import GroupCoordinator
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.model_executor.graph_shared_output import GraphSharedOutput
    from sglang.srt.model_executor.model_runner_components.cuda_graph_setup import DecodeGraphCapture
    from sglang.srt.model_executor.runner import decode_cuda_graph_runner

    decode = model_runner.server_args.cuda_graph_config.decode
    decode.backend, decode.bs = "full", SIZES
    model_runner.graph_shared_output = GraphSharedOutput.create_for_model_runner(model_runner)
    decode_cuda_graph_runner.graph_capture = lambda: contextlib.nullcontext(SimpleNamespace(stream=None))
    decode_cuda_graph_runner.resolve_decode_backend = Replays
    GroupCoordinator.all_gather_into_tensor = _all_gather
    # On a CPU the host replays no idle step; on a GPU a rank without requests replays when the others do.
    ForwardMode.is_cpu_graph = ForwardMode.is_cuda_graph
    runner = decode_cuda_graph_runner.DecodeCudaGraphRunner(model_runner)
    return DecodeGraphCapture(runner=runner, graph_mem_usage=0)


def _all_gather(group: Any, output: torch.Tensor, tensor: torch.Tensor) -> None:
    """The host's own is an operator that it registers for accelerators only."""
    torch.distributed.all_gather(list(output.chunk(group.world_size)), tensor, group=group.device_group)


class Replays:
    """In place of the host's ``FullCudaGraphBackend``."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._captured: dict[Any, Callable[[], Any]] = {}

    @contextlib.contextmanager
    def capture_session(self, stream: Any) -> Iterator[None]:
        yield

    replay_session = contextlib.nullcontext

    def capture_one(
        self, shape_key: Any, forward_fn: Callable[[], Any], dummies: Any = None, post_warmup_hook: Any = None
    ) -> None:
        forward_fn()
        self._captured[shape_key] = forward_fn

    def can_run(self, forward_batch: Any, shape_key: Any) -> bool:
        return shape_key in self._captured

    def replay(self, shape_key: Any, static_forward_batch: Any, **kwargs: Any) -> Any:
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

        with forward_context(ForwardContext(attn_backend=self._runner.attn_backend)):
            return self._captured[shape_key]()

    def cleanup(self) -> None:
        self._captured.clear()
