"""Seams of the main process: the command line, clear errors, and the child processes' entry points."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_k3.errors import K3Error


def install_arguments() -> None:
    from sglang_k3.integration.server_args import K3ServerArgs

    HookRegistry.register("sglang.srt.server_args.ServerArgs", K3ServerArgs, HookType.REPLACE)


def install_main() -> None:
    from sglang.srt.entrypoints.engine import Engine

    from sglang_k3.integration.server_args import K3ServerArgs

    # Captured by value when the class was made, so that replacing the class above does not reach it.
    Engine.server_args_class = K3ServerArgs
    HookRegistry.register("sglang.srt.server_args.prepare_server_args", _one_line_errors, HookType.AROUND)
    HookRegistry.register("sglang.srt.entrypoints.engine.Engine._launch_subprocesses", _launch, HookType.AROUND)


def _one_line_errors(original: Callable[..., Any], argv: list[str]) -> Any:
    """On the command line, a mistake of the user is one line, not a traceback."""
    try:
        return original(argv)
    except K3Error as error:
        sys.exit(f"sglang-k3: {error}")


def _launch(
    original: Callable[..., Any],
    cls: type,
    server_args: Any,
    init_tokenizer_manager_func: Callable[..., Any],
    run_scheduler_process_func: Callable[..., Any],
    run_detokenizer_process_func: Callable[..., Any],
    port_args: Any = None,
) -> Any:
    if getattr(server_args, "is_k3", False):
        from sglang_k3.integration import spawn, verify

        verify.require_hooks()
        run_scheduler_process_func = spawn.run_scheduler_process
        run_detokenizer_process_func = spawn.run_detokenizer_process
    return original(
        cls,
        server_args,
        init_tokenizer_manager_func,
        run_scheduler_process_func,
        run_detokenizer_process_func,
        port_args,
    )
