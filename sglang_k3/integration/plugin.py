"""Entry point of the plugin: SGLang calls ``register`` in every process that loads plugins."""

from __future__ import annotations

import sys
from typing import Any

from sglang_k3.integration.compat import host_problem


def register() -> None:
    """Install the seams, or, on a host that this package does not extend, only the check that says so."""
    problem = host_problem()
    if problem is not None:
        _refuse_k3(problem)
        return
    from sglang_k3.integration.seams import install_for_this_process

    install_for_this_process()


def _refuse_k3(problem: str) -> None:
    """Other models go on undisturbed; a K3 model is answered with one line instead of the host's own attempt."""
    import sglang.srt.server_args as host

    from sglang_k3.integration.names import is_k3

    original = host.ServerArgs.__post_init__

    def checked(self: Any) -> None:
        if is_k3(self.model_path, self.revision):
            sys.exit(f"sglang-k3: {problem}")
        original(self)

    host.ServerArgs.__post_init__ = checked
