"""One tiny checkpoint and one reference per preset for the whole session."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_k3.testing.reference import ReferenceModel
from sglang_k3.testing.tiny import write_tiny


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Preset name -> a folder that no test may change."""
    root = tmp_path_factory.mktemp("tiny")
    return functools.cache(lambda preset: write_tiny(root / preset, preset))


@pytest.fixture
def load_reference(tiny_folder: Callable[[str], Path]) -> Callable[..., ReferenceModel]:
    """Preset name (and options) -> a fresh reference that the test may change."""
    return lambda preset, **options: ReferenceModel.from_checkpoint(tiny_folder(preset), **options)
