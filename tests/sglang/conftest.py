"""What tests of a start share: the plugin as a server has it, and a checkpoint to spoil."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_k3.testing.tiny import write_tiny


@pytest.fixture(scope="module")
def plugin() -> None:
    """As at the start of a server."""
    from sglang.srt.plugins import load_plugins

    load_plugins()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "k3")
