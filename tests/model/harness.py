"""Tiny checkpoints in memory, modules filled from them, and ranks that exist one after the other in one process."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from sglang.srt.runtime_context import get_parallel
from torch import Tensor, nn

from sglang_k3.config import K3Config
from sglang_k3.host.hf_config import K3HFConfig
from sglang_k3.models.kimi_k3 import KimiK3ForConditionalGeneration
from sglang_k3.models.text.weights import Loaders
from sglang_k3.testing.presets import PRESETS, TinyPreset, published_config
from sglang_k3.testing.random_weights import RandomWeights
from sglang_k3.weights.layout import CheckpointLayout


class Loadable(Protocol):
    def loaders(self) -> Loaders: ...


@dataclasses.dataclass(frozen=True)
class TinyK3:
    """A tiny checkpoint that is on no disk: ``config.json``, parsed, and every tensor that it describes."""

    json: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @property
    def config(self) -> K3Config:
        return K3Config.from_dict(self.json)

    @property
    def layout(self) -> CheckpointLayout:
        return CheckpointLayout(self.config)

    def build(self) -> KimiK3ForConditionalGeneration:
        """The model as the host builds it, nothing loaded."""
        return KimiK3ForConditionalGeneration(K3HFConfig(**self.json))

    def load_into(self, module: Loadable, prefix: str) -> None:
        """Fill one sub-module with the tensors under ``language_model.model.`` + ``prefix``."""
        prefix = f"language_model.model.{prefix}"
        with torch.no_grad():
            for name, load in module.loaders().items():
                if prefix + name in self.tensors:
                    load(self.tensors[prefix + name])


def tiny_k3(preset: TinyPreset | str = "default", *, experts: str = "mxfp4", **text_config: Any) -> TinyK3:
    """A tiny checkpoint; ``text_config`` changes keys of its config, and tensors that are then not described go."""
    sizes = PRESETS[preset] if isinstance(preset, str) else preset
    json, tensors = _generate(sizes, experts == "mxfp4")
    if not text_config:
        return TinyK3(json, tensors)
    json = {**json, "text_config": json["text_config"] | text_config}
    layout = CheckpointLayout(K3Config.from_dict(json))
    return TinyK3(json, {name: tensor for name, tensor in tensors.items() if layout.find(name) is not None})


@functools.lru_cache(maxsize=8)
def _generate(sizes: TinyPreset, packed: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
    json = published_config(sizes, dtype="float32", packed_experts=packed, vision=True)
    weights = RandomWeights(sizes, seed=0, packed_experts=packed)
    return json, weights.text() | weights.vision(json["vision_config"])


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer by name, those that the host never saves included."""
    return dict(module.named_parameters()) | dict(module.named_buffers())


def poison(model: nn.Module, value: float, byte: int) -> None:
    """Overwrite everything that a checkpoint may fill."""
    for tensor in state_of(model).values():
        tensor.data.fill_(byte if tensor.dtype == torch.uint8 else value)


def all_names(layout: CheckpointLayout) -> set[str]:
    """Every name that a text tensor of the checkpoint may have, experts in both forms."""
    suffixes = ("weight", "weight_packed", "weight_scale")
    return {*layout.required, *(f"{stem}.{suffix}" for stem in layout.experts for suffix in suffixes)}


@contextlib.contextmanager
def run_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Build models as the host does for ``--dtype``."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@dataclasses.dataclass(frozen=True)
class Rank:
    """A place in a tensor-parallel group whose MoE part is split by expert first, as the host does it."""

    rank: int
    tp_size: int
    ep_size: int = 1

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Modules that are built inside take the slices of this rank."""
        moe_tp_size = self.tp_size // self.ep_size
        with get_parallel().override(
            tp_size=self.tp_size,
            tp_rank=self.rank,
            attn_tp_size=self.tp_size,
            attn_tp_rank=self.rank,
            moe_ep_size=self.ep_size,
            moe_ep_rank=self.rank // moe_tp_size,
            moe_tp_size=moe_tp_size,
            moe_tp_rank=self.rank % moe_tp_size,
        ):
            yield


def ranks(tp_size: int, ep_size: int = 1) -> list[Rank]:
    return [Rank(rank, tp_size, ep_size) for rank in range(tp_size)]
