"""From checkpoint tensors to this rank's parameters, with an account of every name.

Each module says which checkpoint tensors it takes, as a mapping from name to a function that stores it
(``Loaders``); ``load_checkpoint`` streams the tensors past that mapping once, so that host memory holds one
tensor at a time, and refuses what is missing, unexpected, doubled or of the wrong shape or type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import torch

from sglang_k3.weights.audit import Audit
from sglang_k3.weights.layout import CheckpointLayout

if TYPE_CHECKING:
    from sglang.srt.layers.linear import LinearBase

Loader = Callable[[torch.Tensor], None]
Loaders = dict[str, Loader]

_TYPE_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.uint8: "U8"}


def prefixed(prefix: str, loaders: Mapping[str, Loader]) -> Loaders:
    return {prefix + name: load for name, load in loaders.items()}


def whole(module: LinearBase) -> Loader:
    """The full tensor; the host's parallel layer keeps its rank's slice."""
    return lambda tensor: module.weight_loader(module.weight, tensor)


def column_shard(module: LinearBase, index: int) -> Loader:
    """Part ``index`` of a layer that fuses several outputs."""
    return lambda tensor: module.weight_loader(module.weight, tensor, index)


def leading_rows(parameter: torch.Tensor, rows: slice = slice(None)) -> Loader:
    """Rows ``rows`` of the tensor; what lies beyond them is padding or another rank's."""
    return lambda tensor: _copy(parameter, tensor[rows])


def _copy(parameter: torch.Tensor, tensor: torch.Tensor) -> None:
    parameter.copy_(tensor)


def load_checkpoint(
    tensors: Iterable[tuple[str, torch.Tensor]], loaders: Mapping[str, Loader], layout: CheckpointLayout
) -> Audit:
    """Store every tensor that this rank needs and check all of them.

    Args:
        tensors: ``(name, tensor)`` in any order, each name at most once.
        loaders: for every tensor of this pipeline stage, how to store it.
        layout: all tensors that the checkpoint must have, other stages' and the vision tower's included.

    Raises:
        CheckpointError: names the first offending tensors.
    """
    audit = Audit(layout)
    with torch.no_grad():
        for name, tensor in tensors:
            canonical = audit.see(name, tuple(tensor.shape), _TYPE_NAMES.get(tensor.dtype, str(tensor.dtype)))
            if canonical is None:
                audit.raise_problems()
            elif (load := loaders.get(canonical)) is not None:
                load(tensor)
            del tensor  # or it would be held while the next one is read
    audit.finish()
    return audit
