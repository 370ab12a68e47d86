"""Entry points of the server's child processes, so that the plugin is there before the host's code runs.

The host loads plugins in its scheduler only after it has imported everything, and in its detokenizer never.
"""

from __future__ import annotations

from typing import Any

from sglang_k3.integration.verify import require_hooks


def run_scheduler_process(server_args: Any, *args: Any, **kwargs: Any) -> Any:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang_k3.integration import seam_data_parallel, seam_parsers, seam_pools, seam_snapshots, seam_stream

    seam_parsers.install_scheduler()
    seam_pools.install()
    seam_data_parallel.install()
    seam_snapshots.install()
    seam_stream.install()
    if server_args.device == "cpu":
        from sglang_k3.integration import seam_cpu

        seam_cpu.install()
    require_hooks()
    from sglang.srt.managers.scheduler import run_scheduler_process as host_target

    return host_target(server_args, *args, **kwargs)


def run_detokenizer_process(*args: Any, **kwargs: Any) -> Any:
    # The tokenizer is found through the model's config class, which only the plugin knows.
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process as host_target

    return host_target(*args, **kwargs)
