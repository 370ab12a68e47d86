"""What every test gets: fixed seeds, and NaN in whatever the package allocates without filling it.

A run that a signal ends, ends its servers.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sglang_k3.testing.server import unwind_on_signals

# The reference works on tensors so small that a second thread only waits for the first.
torch.set_num_threads(1)

WILD_INTEGER = 0x5A  # fits every integer dtype, and as an index it is out of range for the toy sizes of the tests


def pytest_configure() -> None:
    unwind_on_signals()


@pytest.fixture(autouse=True)
def seeds() -> None:
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernel tests run: the accelerator if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what ``torch.empty*`` returns to code of ``sglang_k3``: an element that nobody writes shows itself.

    The host and the libraries below it are left alone: they may rely on what they allocate being cheap.
    """
    for owner, names in (
        (torch, ("empty", "empty_like", "empty_strided")),
        (torch.Tensor, ("new_empty", "new_empty_strided")),
    ):
        for name in names:
            monkeypatch.setattr(owner, name, _poisoned(getattr(owner, name)))


def _poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = allocate(*args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if not caller.startswith("sglang_k3") or made.is_meta or made.dtype == torch.bool:
            return made
        return made.fill_(torch.nan if made.is_floating_point() else WILD_INTEGER)

    return poisoned
