"""Write a tiny K3 checkpoint in the published layout: same names, same dtypes, toy sizes.

The weights are random, or, where the preset says so, fitted (see ``fit``) and read from the package.
"""

from __future__ import annotations

import json
import shutil
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from safetensors.torch import save_file

from sglang_k3.testing import fitted
from sglang_k3.testing.presets import PRESETS, TinyPreset, find_preset, published_config
from sglang_k3.testing.random_weights import RandomWeights
from sglang_k3.testing.tokenizer import build_tokenizer

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["GENERATOR_VERSION", "PRESETS", "TinyPreset", "write_tiny"]

GENERATOR_VERSION = 2  # raise it whenever the bytes of a checkpoint change
NUM_SHARDS = 2

RunDtype = Literal["float32", "bfloat16"]
ExpertFormat = Literal["mxfp4", "bf16"]


def write_tiny(
    folder: str | Path,
    preset: str = "default",
    *,
    seed: int = 0,
    dtype: RunDtype = "float32",
    experts: ExpertFormat = "mxfp4",
    vision: bool = True,
) -> Path:
    """Write ``config.json``, ``tokenizer.json``, two safetensors shards and their index; the same bytes for a seed.

    The folder appears complete or not at all: everything is written beside it and renamed.

    Args:
        folder: must not exist, or be empty.
        preset: a name in ``PRESETS`` or ``GPU_PRESETS``.
        seed: of random weights; a fitted preset knows only seed 0.
        dtype: what ``config.json`` names as the run dtype; the tensors on disk have the published dtypes either way.
        experts: MXFP4 pairs, or the very same values unpacked to bf16.
        vision: with tower and projector, or text only.
    Returns:
        ``folder`` as a ``Path``.
    Raises:
        ValueError: an argument has no such choice, or the folder is in use.
    """
    folder = Path(folder)
    sizes = find_preset(preset)
    _check_choice("dtype", dtype, ("float32", "bfloat16"))
    _check_choice("experts", experts, ("mxfp4", "bf16"))
    if sizes.fitted is not None and seed != 0:
        raise ValueError(f"seed={seed}: the weights of preset {preset!r} are fitted, not drawn; leave the seed at 0.")
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty: a tiny checkpoint is never mixed with other files; name a new one.")
    packed = experts == "mxfp4"
    config = published_config(sizes, dtype=dtype, packed_experts=packed, vision=vision)
    weights = RandomWeights(sizes, seed=seed, packed_experts=packed)
    tensors = weights.text() if sizes.fitted is None else fitted.load(sizes.fitted, packed_experts=packed)
    if vision:
        tensors |= weights.vision(config["vision_config"])
    tokenizer = build_tokenizer(sizes.vocab_size, sizes.learned_merges)

    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.parent / f".{folder.name}.{uuid.uuid4().hex}"
    unfinished.mkdir()
    try:
        _write_json(unfinished / "config.json", config)
        (unfinished / "tokenizer.json").write_text(tokenizer.to_str(pretty=True) + "\n")
        _write_shards(unfinished, tensors)
        unfinished.replace(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _write_shards(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Split in the order of generation, so that layers stay together and both shards hold text tensors."""
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(fitted.split_by_bytes(tensors, NUM_SHARDS), start=1):
        file = f"model-{i:05d}-of-{NUM_SHARDS:05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    total_bytes = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(folder / "model.safetensors.index.json", index)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r} is not a choice: use one of {', '.join(choices)}.")
