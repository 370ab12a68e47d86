"""Entry points of the server's child processes, so that the plugin is there before the host's code runs.

The host loads plugins in its scheduler only after it has imported everything, and in its detokenizer never.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from sglang_k3.integration.early_start import has_gpu
from sglang_k3.integration.verify import require_hooks


def run_scheduler_process(
    server_args: Any, port_args: Any, gpu_id: int, tp_rank: int, *args: Any, **kwargs: Any
) -> Any:
    _start_farm(server_args, tp_rank)
    host_target = _host_scheduler(on_cpu=server_args.device == "cpu")
    return host_target(server_args, port_args, gpu_id, tp_rank, *args, **kwargs)


def wait_for_scheduler(connection: Connection) -> None:
    """The same, begun before anybody knows the arguments: for the device that a server takes by itself."""
    host_target = _host_scheduler(on_cpu=not has_gpu())
    try:
        args, kwargs, environ = connection.recv()
    except EOFError:
        return
    os.environ.clear()
    os.environ.update(environ)
    server_args, _, _, tp_rank, *_ = args
    _start_farm(server_args, tp_rank)
    host_target(*args, **kwargs)


def _start_farm(server_args: Any, tp_rank: int) -> None:
    from sglang_k3.integration.seam_capture import start_farm

    start_farm(server_args, tp_rank)


def _host_scheduler(*, on_cpu: bool) -> Callable[..., Any]:
    with without_collections():
        from sglang.srt.plugins import load_plugins

        load_plugins()
        from sglang_k3.integration.seams import install_for_scheduler

        install_for_scheduler(on_cpu=on_cpu)
        require_hooks()
        from sglang.srt.managers.scheduler import run_scheduler_process as host_target

    target: Callable[..., Any] = host_target
    return target


def run_detokenizer_process(*args: Any, **kwargs: Any) -> Any:
    # The tokenizer is found through the model's config class, which only the plugin knows.
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process as host_target

    return host_target(*args, **kwargs)


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Around imports: what they make is hardly ever garbage, and looking for it takes time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
