"""One server per configuration: a module is run against each of its configurations in turn."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.configurations import Configuration, Served, start
from tests.kit.parity import Oracle


@pytest.fixture(scope="session")
def tiny_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest, tiny_cache: Path) -> Iterator[Served]:
    configuration: Configuration = request.param
    server, folder = start(configuration, tiny_cache, tiny_cache / "logs")
    with server:
        yield Served(configuration, server, Oracle(folder))
        server.check_alive()
