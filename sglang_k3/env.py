"""The environment variables that the plugin heeds, read here and nowhere else; its own are debugging switches."""

from __future__ import annotations

import os
from pathlib import Path

from sglang_k3.errors import ConfigError

VARIABLES = ("K3PLUGIN_KERNELS",)
KERNEL_MODES = ("auto", "triton", "reference")


def kernel_mode() -> str:
    """Which implementation of each op may run: ``auto`` (the default), ``triton`` or ``reference``.

    Raises:
        ConfigError: ``K3PLUGIN_KERNELS`` holds anything else.
    """
    value = os.environ.get("K3PLUGIN_KERNELS", "auto")
    if value not in KERNEL_MODES:
        raise ConfigError(
            f"K3PLUGIN_KERNELS={value!r} is not one of {', '.join(KERNEL_MODES)}. Set one of these or unset it."
        )
    return value


def triton_interprets() -> bool:
    """Whether Triton runs kernels in its interpreter, which it decides by its own variable ``TRITON_INTERPRET``."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


def cache_root() -> Path:
    """Folder for what the package generates, by the XDG convention."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sglang-k3"
