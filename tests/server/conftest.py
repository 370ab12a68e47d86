"""One server per configuration: a module is run against each of its configurations in turn."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_k3.testing.server import ServerProcess, sglang_command
from tests.kit.configurations import DEVICE_FLAGS, Configuration, Served, start


@pytest.fixture(scope="session")
def tiny_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="session")
def tiny_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The model that is served by name, with nothing but its name."""
    log = tmp_path_factory.mktemp("logs") / "tiny.log"
    with ServerProcess(sglang_command("kimi-k3-tiny", *DEVICE_FLAGS), log_path=log) as server:
        yield server
        server.check_alive()


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest, tiny_cache: Path) -> Iterator[Served]:
    configuration: Configuration = request.param
    server, folder = start(configuration, tiny_cache, tiny_cache / "logs")
    with server:
        assert configuration.says in server.log_path.read_text()
        yield Served(configuration, server, configuration.oracle(folder))
        server.check_alive()
