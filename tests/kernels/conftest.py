"""Kernel tests also run as ``TRITON_INTERPRET=1 pytest tests/kernels``, with Triton's kernels on the CPU."""

import pytest

from sglang_k3.env import triton_interprets
from tests.kit import interpreter


@pytest.fixture(autouse=True)
def mended_interpreter(monkeypatch):
    if triton_interprets():
        interpreter.mend(monkeypatch)
