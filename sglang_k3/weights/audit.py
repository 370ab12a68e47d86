"""Hold the tensors of a checkpoint against its layout, from file headers or as they stream past.

The header audit reads a few kilobytes per shard, so that a wrong checkpoint is refused in seconds, before a
process is started or a byte is loaded. The same account runs again over the tensors that are really loaded.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sglang_k3.config import K3Config, with_overrides
from sglang_k3.errors import CheckpointError, ConfigError
from sglang_k3.weights.layout import VISION_PREFIXES, CheckpointLayout, canonical_name

INDEX_NAME = "model.safetensors.index.json"
FLOAT_TYPES = frozenset({"BF16", "F16", "F32"})
PACKED_TYPE = "U8"
_MAX_LISTED = 8


class Audit:
    """A running account of tensors; nothing is accepted twice and nothing is forgotten."""

    def __init__(self, layout: CheckpointLayout) -> None:
        self.layout = layout
        self.problems: list[str] = []
        self._seen: set[str] = set()
        self._packed_layers: dict[str, bool] = {}

    @property
    def num_vision_tensors(self) -> int:
        return sum(name.startswith(VISION_PREFIXES) for name in self._seen)

    def see(self, name: str, shape: tuple[int, ...], dtype: str) -> str | None:
        """Enter one tensor.

        Args:
            dtype: as safetensors writes it, for example ``BF16``.

        Returns:
            The tensor's canonical name, or None if it is not acceptable; ``problems`` then says why.
        """
        canonical = canonical_name(name)
        spec = self.layout.find(canonical)
        layer, is_expert, _ = canonical.partition(".experts.")
        if spec is None:
            problem = "unexpected: config.json describes no such tensor"
        elif canonical in self._seen:
            problem = "stored twice"
        elif not spec.accepts(shape):
            problem = f"shape {list(shape)}, expected {list(spec.shape)}"
        elif spec.packed and dtype != PACKED_TYPE:
            problem = f"type {dtype}, expected {PACKED_TYPE} (packed bytes)"
        elif not spec.packed and dtype not in FLOAT_TYPES:
            problem = f"type {dtype}, expected one of {', '.join(sorted(FLOAT_TYPES))}"
        elif is_expert and self._packed_layers.setdefault(layer, spec.packed) != spec.packed:
            problem = "MXFP4 and plain experts in one layer: all of a layer must be stored the same way"
        else:
            self._seen.add(canonical)
            return canonical
        # A bad tensor is reported once, as bad, not a second time as missing.
        self._seen.add(canonical)
        self.problems.append(f"{name}: {problem}")
        return None

    def finish(self) -> None:
        """Enter what is missing, and raise if there was any problem.

        Raises:
            CheckpointError: names the first few offending tensors and counts the rest.
        """
        self.problems += [f"{name}: missing" for name in self._missing()]
        self.raise_problems()

    def raise_problems(self) -> None:
        if self.problems:
            listed = "; ".join(self.problems[:_MAX_LISTED])
            more = f"; and {len(self.problems) - _MAX_LISTED} more" if len(self.problems) > _MAX_LISTED else ""
            raise CheckpointError(
                f"The checkpoint does not fit its config.json: {listed}{more}. "
                "Download it again, or check that config.json and the tensors come from the same release."
            )

    def _missing(self) -> Iterator[str]:
        seen = self._seen
        yield from (name for name in self.layout.required if name not in seen)
        for stem in self.layout.experts:
            if f"{stem}.weight" in seen:
                continue
            packed, scale = f"{stem}.weight_packed" in seen, f"{stem}.weight_scale" in seen
            if not packed:
                yield f"{stem}.weight_packed (or {stem}.weight)" if not scale else f"{stem}.weight_packed"
            elif not scale:
                yield f"{stem}.weight_scale"
        if self.num_vision_tensors:
            yield from (name for name in self.layout.vision if name not in seen)


def audit_folder(folder: Path, overrides: Mapping[str, Any] | None = None) -> K3Config:
    """Check ``config.json`` and the safetensors headers of a local checkpoint against each other.

    Args:
        overrides: values that take the place of those in the file, objects merged key by key.

    Raises:
        ConfigError: ``config.json`` is missing, unreadable or not a K3 this package can run.
        CheckpointError: a shard or tensor is missing, unexpected, doubled, or of the wrong shape or type.
    """
    config = K3Config.from_dict(with_overrides(read_config(folder), overrides or {}))
    audit = Audit(CheckpointLayout(config))
    for shard in shard_files(folder):
        for name, shape, dtype in read_header(shard):
            audit.see(name, shape, dtype)
    audit.finish()
    return config


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{folder} has no config.json: it is not a checkpoint folder.") from None
    except (ValueError, RecursionError) as error:  # also of bytes that are no text, and of endless numbers
        raise ConfigError(f"{path} is not valid JSON: {error}.") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds a {type(config).__name__}, expected an object.")
    return config


def shard_files(folder: Path) -> list[Path]:
    """The shards that the index names, or every safetensors file where there is no index."""
    index = folder / INDEX_NAME
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise CheckpointError(f"{index} is not a safetensors index: {error!r}.") from None
        shards = [folder / name for name in names]
    else:
        shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        raise CheckpointError(f"{folder} has no *.safetensors file: only safetensors checkpoints are read.")
    absent = [shard.name for shard in shards if not shard.exists()]
    if absent:
        raise CheckpointError(
            f"{INDEX_NAME} names {len(absent)} shard(s) that are not in {folder}: {', '.join(absent[:_MAX_LISTED])}. "
            "Download them again."
        )
    return shards


def read_header(shard: Path) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """``(name, shape, dtype)`` of every tensor in one safetensors file, without reading the data."""
    try:
        with shard.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > shard.stat().st_size:
                raise ValueError(f"header of {length} bytes in a file of {shard.stat().st_size}")
            header = json.loads(file.read(length))
        entries = {
            name: (tuple(entry["shape"]), entry["dtype"], entry["data_offsets"][1])
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(
            f"{shard} is not a safetensors file or is cut short: {error}. Download it again."
        ) from None
    for name, (shape, dtype, _) in entries.items():
        yield name, shape, dtype
    end = max((end for _, _, end in entries.values()), default=0)
    if 8 + length + end > shard.stat().st_size:
        raise CheckpointError(f"{shard} is cut short: its header promises {8 + length + end} bytes. Download it again.")
