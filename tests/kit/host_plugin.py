"""Plugins for the host that are of the tests: a module with a ``register``, found by its entry point as ours is."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def install_into(folder: Path, module: str) -> dict[str, str]:
    """Make ``folder`` a place where the host finds the plugin ``module``; the environment in which it looks there."""
    name = module.rpartition(".")[2]
    info = folder / f"{name}-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = {module}:register\n")
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])}
