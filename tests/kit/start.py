"""Resolve the arguments of a server as its start does, and spoil the checkpoint that it is given."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file


def edit_config(folder: Path, edit: Callable[[dict], None]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    edit(config)
    path.write_text(json.dumps(config))


def edit_tensor(folder: Path, ending: str, edit: Callable[[dict, str], None]) -> str:
    """Edit the first tensor whose name ends so; returns its name."""
    for shard in sorted(folder.glob("*.safetensors")):
        tensors = load_file(shard)
        for name in tensors:
            if name.endswith(ending):
                edit(tensors, name)
                save_file(tensors, shard)
                return name
    raise AssertionError(f"no tensor ends with {ending}")


def start(folder: Path | str, **arguments: object) -> Any:
    from sglang_k3.integration.server_args import K3ServerArgs

    return K3ServerArgs(model_path=str(folder), **arguments)
