"""Tiny checkpoints on demand: generated once per cache folder, shared by all processes of a machine."""

from __future__ import annotations

from pathlib import Path

from filelock import FileLock

from sglang_k3.testing.presets import find_preset
from sglang_k3.testing.tiny import GENERATOR_VERSION, ExpertFormat, RunDtype, write_tiny


def ensure_tiny(
    cache_root: str | Path,
    preset: str = "default",
    *,
    seed: int = 0,
    dtype: RunDtype = "float32",
    experts: ExpertFormat = "mxfp4",
    vision: bool = True,
) -> Path:
    """The folder of a tiny checkpoint under ``cache_root``, written now unless it is there already.

    Processes that ask at once wait for the one that writes. The folder's name holds every argument and the generator's
    version, so a newer generator never serves an older file. Arguments and errors are those of ``write_tiny``.
    """
    find_preset(preset)
    parts = (preset, experts, dtype, "vision" if vision else "text", f"seed{seed}", f"v{GENERATOR_VERSION}")
    folder = Path(cache_root) / "-".join(parts)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f".{folder.name}.lock")):
        if not (folder / "config.json").exists():
            write_tiny(folder, preset, seed=seed, dtype=dtype, experts=experts, vision=vision)
    return folder
