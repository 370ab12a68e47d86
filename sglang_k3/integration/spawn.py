"""Entry points of the server's child processes, so that the plugin is there before the host's code runs.

The host loads plugins in its scheduler only after it has imported everything, and in its detokenizer never.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

from sglang_k3.integration.environment import leave_out_host_models
from sglang_k3.integration.verify import require_hooks


def run_scheduler_process(
    server_args: Any, port_args: Any, gpu_id: int, tp_rank: int, *args: Any, **kwargs: Any
) -> Any:
    leave_out_host_models()
    with _without_collections():
        from sglang.srt.plugins import load_plugins

        from sglang_k3.integration.seam_capture import start_farm

        start_farm(server_args, tp_rank)
        load_plugins()
        from sglang_k3.integration.seams import install_for_scheduler

        install_for_scheduler(on_cpu=server_args.device == "cpu")
        require_hooks()
        from sglang.srt.managers.scheduler import run_scheduler_process as host_target

    return host_target(server_args, port_args, gpu_id, tp_rank, *args, **kwargs)


def run_detokenizer_process(*args: Any, **kwargs: Any) -> Any:
    # The tokenizer is found through the model's config class, which only the plugin knows.
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process as host_target

    return host_target(*args, **kwargs)


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Around imports: what they make is hardly ever garbage, and looking for it takes time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
