"""Which SGLang this package extends, and what to say to any other."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

SUPPORTED = ">=0.5.16,<0.5.17"
REMEDY = 'pip install "sglang==0.5.16"'


def host_version() -> str | None:
    """The installed SGLang, or None."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return None


def host_problem() -> str | None:
    """One line if the installed SGLang is not the one this package extends, else None."""
    installed = host_version()
    if installed is None:
        return f"SGLang is not installed; sglang-k3 extends SGLang {SUPPORTED}. Run: {REMEDY}"
    try:
        supported = SpecifierSet(SUPPORTED).contains(Version(installed), prereleases=True)
    except InvalidVersion:
        supported = False
    if supported:
        return None
    return f"SGLang {installed} is installed, but this sglang-k3 extends SGLang {SUPPORTED}. Run: {REMEDY}"
