"""Input checks of the public ops. They read shapes and dtypes only, so they never wait for a device."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FP32 = (torch.float32,)
INTEGERS = (torch.int32, torch.int64)
BOOL = (torch.bool,)
BYTES = (torch.uint8,)

_DIM = re.compile(r"(\d*)([A-Z][a-z]*)(?:/(\d+))?([+-]\d+)?")


def check_shapes(op: str, /, **tensors: tuple[Tensor, str]) -> dict[str, int]:
    """Match each tensor against a shape in letters, such as ``"T H K"``, ``"B+1"``, ``"T 2I"`` or ``"... D"``.

    Returns:
        What each letter stands for; the first tensor that has a letter decides.

    Raises:
        ValueError: a tensor has another rank, or a letter would stand for two sizes.
    """
    sizes: dict[str, int] = {}
    for name, (tensor, pattern) in tensors.items():
        shape, dims = tuple(tensor.shape), pattern.split()
        if dims[0] == "...":
            dims = dims[1:]
            shape = shape[max(len(shape) - len(dims), 0) :]
        known = ", ".join(f"{letter}={size}" for letter, size in sizes.items())
        if len(shape) != len(dims) or not all(_fits(dim, n, sizes) for dim, n in zip(dims, shape, strict=True)):
            raise ValueError(
                f"{op}: {name} has shape {tuple(tensor.shape)}, but [{', '.join(pattern.split())}] is needed"
                + (f" with {known} as in the tensors before it." if known else ".")
            )
    return sizes


def check_dtypes(op: str, allowed: Sequence[torch.dtype], /, **tensors: Tensor | None) -> None:
    """Raise ``ValueError`` for a tensor whose dtype is not one of ``allowed``; ``None`` is an absent option."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype not in allowed:
            names = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
            raise ValueError(f"{op}: {name} is {tensor.dtype}, but {names} is needed. Convert it with .to().")


def check_together(op: str, /, **options: Tensor | None) -> None:
    """Raise ``ValueError`` if only some of the options are given."""
    missing = [name for name, option in options.items() if option is None]
    if missing and len(missing) < len(options):
        raise ValueError(
            f"{op}: {' and '.join(options)} belong together, but {missing[0]} is missing. Pass all or none."
        )


def _fits(dim: str, size: int, sizes: dict[str, int]) -> bool:
    """Whether ``dim`` (letter, times a number, over a number, plus a number) can have ``size``; learns a new letter."""
    match = _DIM.fullmatch(dim)
    assert match is not None, f"{dim!r} is not a dimension"
    factor, letter, divisor, offset = match.groups()
    value, rest = divmod((size - int(offset or 0)) * int(divisor or 1), int(factor or 1))
    return rest == 0 and value >= 0 and sizes.setdefault(letter, value) == value
