"""Fitted weights as package data: how they are stored in a few hundred kB, and read back as published tensors.

A matrix is stored as one signed byte per element and one power-of-two exponent per row; such a product has at most
seven significant bits, so bf16 holds it exactly. Experts are stored as MXFP4. The few vectors that a K3 checkpoint has
in float32 stay float32; those that it has in bf16 are stored as bf16.

Nothing here draws or trains anything: ``fit`` writes the files, ``tiny`` reads them.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sglang_k3.testing import mxfp4

DATA = Path(__file__).with_name("data")
NUM_FILES = 2  # each under the 500 kB that a file in this repository may have

LARGEST_CODE = 127
_FLOAT32_NAMES = ("conv1d.weight", ".A_log", ".dt_bias", ".o_norm.weight", ".e_score_correction_bias")
_EXPONENT = "/exponent"  # suffix of the per-row exponents; no published name has a slash


def round_trip(name: str, weight: Tensor) -> Tensor:
    """What is read back after storing this tensor (not an expert), float32."""
    if name.endswith(_FLOAT32_NAMES):
        return weight
    if weight.ndim == 1:
        return weight.bfloat16().float()
    codes, exponent = _encode_rows(weight)
    return _decode_rows(codes, exponent)


def save(name: str, weights: Mapping[str, Tensor], folder: Path = DATA) -> list[Path]:
    """Write ``weights`` (published names without ``language_model.``, experts unpacked) as ``{name}-{i}.safetensors``.

    Returns:
        The files.
    """
    stored: dict[str, Tensor] = {}
    for key, weight in weights.items():
        if ".experts." in key:
            base = key.removesuffix(".weight")
            stored[f"{base}.weight_packed"], stored[f"{base}.weight_scale"] = mxfp4.encode(weight)
        elif key.endswith(_FLOAT32_NAMES):
            stored[key] = weight.float()
        elif weight.ndim == 1:
            stored[key] = weight.bfloat16()
        else:
            stored[key], stored[key + _EXPONENT] = _encode_rows(weight)
    folder.mkdir(parents=True, exist_ok=True)
    paths = _paths(name, folder)
    for path, tensors in zip(paths, split_by_bytes(stored, NUM_FILES), strict=True):
        save_file(tensors, path)
    return paths


def split_by_bytes(tensors: Mapping[str, Tensor], num_parts: int) -> list[dict[str, Tensor]]:
    """Parts of about the same size, in the order of ``tensors``, each tensor contiguous."""
    total_bytes = sum(tensor.nbytes for tensor in tensors.values())
    parts: list[dict[str, Tensor]] = [{} for _ in range(num_parts)]
    written_bytes = 0
    for name, tensor in tensors.items():
        parts[written_bytes * num_parts // total_bytes][name] = tensor.contiguous()
        written_bytes += tensor.nbytes
    return parts


def load(name: str, *, packed_experts: bool, folder: Path = DATA) -> dict[str, Tensor]:
    """The tensors of the language model by published name, in their dtypes on disk.

    Args:
        packed_experts: MXFP4 pairs, or the same values unpacked to bf16.
    """
    stored: dict[str, Tensor] = {}
    for path in _paths(name, folder):
        stored |= load_file(path)
    tensors: dict[str, Tensor] = {}
    for key, tensor in sorted(stored.items()):
        if key.endswith((_EXPONENT, ".weight_scale")):
            continue
        if key + _EXPONENT in stored:
            tensors[key] = _decode_rows(tensor, stored[key + _EXPONENT]).bfloat16()
        elif not key.endswith(".weight_packed"):
            tensors[key] = tensor
        else:
            base, scale = key.removesuffix("_packed"), stored[key.replace("_packed", "_scale")]
            if packed_experts:
                tensors |= {key: tensor, f"{base}_scale": scale}
            else:
                tensors[base] = mxfp4.decode(tensor, scale, dtype=torch.bfloat16)
    return {f"language_model.{key}": tensor for key, tensor in tensors.items()}


def save_merges(name: str, merges: list[tuple[str, str]], folder: Path = DATA) -> Path:
    """Write the byte-pair merges that a fitted model's tokenizer has on top of the usual ones, best first."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-merges.json"
    lines = ",\n".join(json.dumps(pair) for pair in merges)
    path.write_text(f"[\n{lines}\n]\n")
    return path


@functools.cache
def load_merges(name: str) -> tuple[tuple[str, str], ...]:
    """The pairs that ``save_merges`` wrote into the package."""
    return tuple((left, right) for left, right in json.loads((DATA / f"{name}-merges.json").read_text()))


def _paths(name: str, folder: Path) -> list[Path]:
    return [folder / f"{name}-{i}.safetensors" for i in range(1, NUM_FILES + 1)]


def _encode_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """``[R, C]`` -> codes int8 ``[R, C]`` and exponent int8 ``[R, 1]``, the smallest that lets no code overflow."""
    largest = weight.abs().amax(dim=1, keepdim=True) / LARGEST_CODE
    exponent = torch.frexp(largest).exponent.clamp(-126, 127)  # largest <= 2^exponent
    codes = torch.round(weight / torch.exp2(exponent.float()))
    return codes.to(torch.int8), exponent.to(torch.int8)


def _decode_rows(codes: Tensor, exponent: Tensor) -> Tensor:
    return codes.float() * torch.exp2(exponent.float())
