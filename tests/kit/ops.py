"""Running an op on its cases."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_k3.kernels.case_kit import BaseCase, Inputs


def over_cases(cases: Sequence[BaseCase]) -> pytest.MarkDecorator:
    """Parametrise a test by ``case``."""
    params = [pytest.param(c, id=c.id, marks=[getattr(pytest.mark, mark) for mark in c.marks]) for c in cases]
    return pytest.mark.parametrize("case", params)


def numerics_of(cases: ModuleType, case: BaseCase) -> str:
    """The class of the output of an op for ``case``; an op that rounds 16-bit operands on the way declares its own."""
    tight: str = cases.TOLERANCE
    return tight if case.dtype == torch.float32 else getattr(cases, "TOLERANCE_16_BIT", tight)


def clone_pool(pool: Tensor) -> Tensor:
    """A pool of the same values and strides in storage of its own: what an in-place op may be compared on."""
    storage = torch.empty(0, dtype=pool.dtype, device=pool.device).set_(pool.untyped_storage().clone())
    return storage.as_strided(pool.shape, pool.stride(), pool.storage_offset())


def call_on_copy(op: Any, inputs: Inputs, pool_name: str, **changed: Any) -> tuple[Any, Tensor]:
    """Call ``op`` with some keywords changed and its pool cloned; returns the result and the pool afterwards."""
    kwargs = {**inputs.kwargs, **changed}
    kwargs[pool_name] = clone_pool(kwargs[pool_name])
    return op(*inputs.args, **kwargs), kwargs[pool_name]


def fp64(*tensors: Tensor) -> tuple[Tensor, ...]:
    """For oracles: on the CPU, in fp64."""
    return tuple(t.cpu().double() for t in tensors)
