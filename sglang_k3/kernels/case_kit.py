"""What the ``cases.py`` of every op share: the case itself, its inputs, its cost, and pools that punish stray reads.

Cases feed tests and benchmarks alike. Inputs are drawn on the CPU and moved, so that every device sees the same bits; a
benchmark, for which the bits do not matter but their number does, has them drawn where they are needed.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Inputs(NamedTuple):
    """One call: ``op(*args, **kwargs)``."""

    args: tuple[Tensor, ...]
    kwargs: dict[str, Any]


class Cost(NamedTuple):
    """What one call must at least move and compute: the denominators of a benchmark."""

    num_bytes: int
    num_flops: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaseCase:
    """Sizes are added by each op; ``marks`` are names of pytest markers, e.g. ``("gpu",)``.

    ``timed`` cases are those of a benchmark: drawn on the device, with pools that are aligned as those of a server are.
    """

    dtype: torch.dtype = torch.float32
    seed: int = 0
    marks: tuple[str, ...] = ()
    timed: bool = False

    @property
    def id(self) -> str:
        """A test id, such as ``tokens=5-width=7-float32``."""
        common = {field.name for field in dataclasses.fields(BaseCase)}
        sizes = (field.name for field in dataclasses.fields(self) if field.name not in common)
        parts = [f"{name}={_spell(getattr(self, name))}" for name in sizes]
        return "-".join([*parts, _spell(self.dtype)])


class Draw:
    """Seeded inputs for one case on one device."""

    def __init__(self, case: BaseCase, device: torch.device | str) -> None:
        self.dtype = case.dtype
        self.device = torch.device(device)
        self.generator = torch.Generator(self.device if case.timed else "cpu").manual_seed(case.seed)
        self._source: dict[str, Any] = {"generator": self.generator, "device": self.generator.device}
        self.pool_gap = (0, 64) if case.timed else (2, 3)  # elements before and after each slot

    def normal(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
        values = torch.randn(*shape, **self._source) * scale
        return values.to(self.device, dtype or self.dtype)

    def uniform(self, *shape: int, low: float, high: float, dtype: torch.dtype | None = None) -> Tensor:
        values = torch.rand(*shape, **self._source) * (high - low) + low
        return values.to(self.device, dtype or self.dtype)

    def integers(self, *shape: int, low: int, high: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Uniform in ``low <= n < high``."""
        return torch.randint(low, high, shape, **self._source).to(self.device, dtype)

    def distinct(self, count: int, *, below: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """``count`` different numbers in random order, ``0 <= n < below``."""
        return torch.randperm(below, **self._source)[:count].to(self.device, dtype)

    def pool(self, num_slots: int, *shape: int, used: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A pool ``[num_slots, *shape]`` whose slots lie apart in a larger buffer, as in one byte pool for all layers.

        The slots in ``used`` are drawn; every other slot, and the buffer between the slots, is NaN.
        """
        size = torch.Size(shape).numel()
        before, after = self.pool_gap
        pitch = before + size + after
        buffer = torch.full((num_slots, pitch), torch.nan, dtype=dtype or self.dtype, device=self.device)
        pool = buffer[:, before : before + size].view(num_slots, *shape)
        pool[used.long()] = self.normal(used.numel(), *shape, dtype=pool.dtype)
        return pool


def cu_seqlens(lens: tuple[int, ...], device: torch.device) -> Tensor:
    """Prefix sums ``[B + 1]``, int32."""
    return torch.tensor((0, *lens), dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)


def _spell(value: object) -> str:
    if isinstance(value, tuple):
        return "+".join(map(str, value))
    return str(value).removeprefix("torch.")
