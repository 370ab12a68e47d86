"""`sglang-k3 cache-report` shows what a server tells of its cache, and says in one line what stands in its way."""

from __future__ import annotations

import http.server
import json
import threading
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_k3 import cli
from sglang_k3.mem.cache_report import ENDPOINT, describe
from sglang_k3.testing.cache_contest import K3_COST
from sglang_k3.testing.server import free_port
from tests.kit.mem_scheduler import small_server

ANSWERS: dict[str, tuple[int, Any]] = {
    "/host-tree": (409, {"object": "error", "message": "this server's prefix cache is the host's (ChunkCache)"}),
    "/broken": (500, "Internal Server Error"),
    "/other-model": (404, {"detail": "Not Found"}),
    "/another-program": (200, ["hello"]),
    "/no-ranks": (200, {"ranks": []}),
    "/another-kind": (200, {"ranks": 5}),
    "/another-version": (200, {"ranks": [{"policy": "lru"}]}),
    "/without-policy": (200, {"ranks": [{}]}),
    "/text": (200, {"ranks": ["lru"]}),
}


class Handler(http.server.BaseHTTPRequestHandler):
    """A server whose first part of the path chooses its answer; ``/keyed`` wants a key."""

    ranks: list[dict[str, Any]] = []

    def do_GET(self) -> None:
        place = self.path.removesuffix(ENDPOINT)
        status, body = ANSWERS.get(place, (200, {"ranks": self.ranks}))
        if place == "/keyed" and self.headers["Authorization"] != "Bearer open sesame":
            status, body = 401, {"error": "Unauthorized"}
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    cache = small_server()
    cache.serve([*range(300)])
    description = {"dp_rank": 0, "policy": "replay-cost", **describe(cache.engine, K3_COST)}
    monkeypatch.setattr(Handler, "ranks", [description])
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # must not be asked about this machine
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = cli.main(["cache-report", *argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_report_is_printed_and_drawn(capsys: pytest.CaptureFixture[str], url: str, tmp_path: Path) -> None:
    code, out, err = run(capsys, f"{url}/", "--svg", str(tmp_path / "cache.svg"))
    assert (code, err) == (0, "")
    assert out.startswith(
        "policy replay-cost: 4 of 64 state slots and 256 tokens of KV are cached, 60 slots are free\n"
    )
    assert "began 1 request, 0 of them from a state" in out and f"wrote {tmp_path / 'cache.svg'}" in out
    ET.parse(tmp_path / "cache.svg")


def test_each_data_parallel_rank_has_its_own(capsys: pytest.CaptureFixture[str], url: str, tmp_path: Path) -> None:
    Handler.ranks *= 2
    code, out, _ = run(capsys, url, "--svg", str(tmp_path / "cache.svg"))
    assert code == 0 and "rank 0 of 2, policy" in out and "rank 1 of 2, policy" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache-0.svg", "cache-1.svg"]


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("/host-tree", "answers 409: this server's prefix cache is the host's (ChunkCache)"),
        ("/broken", "answers 500: "),
        ("/other-model", "serves no K3 model with this plugin: it has no /k3/cache_report. Ask a server of"),
        ("/another-program", "something else than a cache report: no K3 server is there"),
        ("/no-ranks", "something else than a cache report"),
        ("/another-kind", "something else than a cache report"),
        ("/another-version", "otherwise than this sglang-k3 reads it (KeyError('nodes')): use the one that is"),
        ("/without-policy", "otherwise than this sglang-k3 reads it (KeyError('policy'))"),
        ("/text", "otherwise than this sglang-k3 reads it (TypeError("),
        ("/keyed", "wants a key: give the one that its server was started with, --api-key KEY"),
    ],
)
def test_what_stands_in_its_way_is_one_line(
    capsys: pytest.CaptureFixture[str], url: str, place: str, says: str
) -> None:
    code, out, err = run(capsys, url + place)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith(f"error: {url}{place} ") and says in err


def test_the_key_is_shown_to_the_server(capsys: pytest.CaptureFixture[str], url: str) -> None:
    assert run(capsys, f"{url}/keyed", "--api-key", "open sesame")[0] == 0


def test_the_address_of_its_api_will_do(capsys: pytest.CaptureFixture[str], url: str) -> None:
    assert run(capsys, f"{url}/v1") == run(capsys, url)
    assert run(capsys, f"{url}/v1/")[0] == 0


@pytest.mark.parametrize("key", ["a\nb", "ключ"])
def test_a_key_that_cannot_be_sent_is_told(capsys: pytest.CaptureFixture[str], url: str, key: str) -> None:
    code, _, err = run(capsys, url, "--api-key", key)
    assert code == 1 and err == f"error: --api-key {key!r} has characters that no HTTP header carries.\n"


@pytest.mark.parametrize("address", ["localhost:30000", "ftp://localhost", "http://", "http://localhost/ü"])
def test_what_is_no_address_is_told(capsys: pytest.CaptureFixture[str], address: str) -> None:
    code, _, err = run(capsys, address)
    assert code == 1 and err == f"error: {address!r} is no address of a server: give it as http://HOST:PORT.\n"


def test_a_server_that_is_not_there_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    code, _, err = run(capsys, url)
    assert code == 1 and err.startswith(f"error: no server answers at {url} (") and err.count("\n") == 1
