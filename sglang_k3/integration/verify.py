"""Do the seams still fit the installed host? Asked by ``doctor``, by a test, and before a K3 is served."""

from __future__ import annotations

import pkgutil

from sglang_k3.errors import HostError
from sglang_k3.integration.compat import SUPPORTED, host_problem
from sglang_k3.integration.seams import SEAMS


def check_seams() -> list[str]:
    """One line for every target that the installed SGLang does not have."""
    if (problem := host_problem()) is not None:
        return [problem]
    problems = []
    for seam in SEAMS:
        for target in seam.targets:
            try:
                pkgutil.resolve_name(target)
            except (ImportError, AttributeError) as error:
                problems.append(f"seam {seam.name!r}: {target} is not there ({error}).")
    return problems


def require_hooks() -> None:
    """Refuse to serve K3 if the host recorded a hook of this package but failed to apply it.

    The host logs such a failure and goes on, which would be a half-patched server.

    Raises:
        HostError: names the targets.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    failed = [
        target
        for target, hooks in HookRegistry._hooks.items()
        if target not in HookRegistry._patched and any(_is_ours(hook) for _, hook, _ in hooks)
    ]
    if failed:
        raise HostError(
            f"SGLang did not apply the hooks on {', '.join(failed)}: the reason is in its log above. "
            f"sglang-k3 extends SGLang {SUPPORTED}; run `sglang-k3 doctor`."
        )


def _is_ours(hook: object) -> bool:
    return (getattr(hook, "__module__", None) or "").startswith("sglang_k3.")
