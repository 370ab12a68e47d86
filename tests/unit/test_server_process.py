"""The process handling behind `make serve` and the server tests leaves nothing behind, whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sglang_k3.testing.server import HOST, ResponseError, ServerError, ServerProcess, free_port

if TYPE_CHECKING:
    from collections.abc import Callable

# A server in small: an HTTP parent with three children: one plain, one that left the session (unless the parent dies
# before anybody can have looked), one that ignores SIGTERM. `mode` decides how the parent behaves.
FAKE_SERVER = """
import http.server, json, os, signal, subprocess, sys, time

mode, pid_file, port = sys.argv[1], sys.argv[2], int(sys.argv[-1])
sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
deaf = [sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"]
escaped = subprocess.Popen(sleeper, start_new_session=mode != "dies")
children = [subprocess.Popen(sleeper), escaped, subprocess.Popen(deaf)]
with open(pid_file + ".part", "w") as f:
    f.write(" ".join(str(pid) for pid in [os.getpid(), *[child.pid for child in children]]))
os.rename(pid_file + ".part", pid_file)
print("[2026-11-29 12:00:00] loading the weights", flush=True)
if mode == "dies":
    time.sleep(0.3)
    print("\\nValueError: the tensor model.norm.weight is missing\\n", flush=True)
    os._exit(7)
if mode == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if mode == "hangs":
    time.sleep(600)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(200, b'{"path": "%s"}' % self.path.encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/stream":
            events = [b'data: {"n": 1}', b': comment', b'data: {"n": 2}', b'data: [DONE]', b'data: {"n": 3}']
            self.answer(200, b"".join(event + b"\\n\\n" for event in events))
        elif self.path == "/die":
            os._exit(3)
        elif "prompt" in body:
            self.answer(200, json.dumps({"echo": body["prompt"]}).encode())
        else:
            self.answer(400, b"no prompt in the request")

    def answer(self, status, data):
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass

http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


class Fake:
    """Makes ``ServerProcess`` objects over the fake server and knows which processes they started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.script = folder / "fake_server.py"
        self.script.write_text(FAKE_SERVER)
        self.pid_file = folder / "pids"
        self.log_path = folder / "logs" / "server.log"

    def command(self, mode: str) -> list[str]:
        return [sys.executable, str(self.script), mode, str(self.pid_file)]

    def server(self, mode: str = "serves", **options: object) -> ServerProcess:
        options = {"start_timeout_s": 30.0, "stop_grace_s": 0.3, **options}
        return ServerProcess(self.command(mode), log_path=self.log_path, **options)

    def pids(self) -> list[int]:
        pids = [int(pid) for pid in self.pid_file.read_text().split()]
        assert len(pids) == 4
        return pids

    def living(self) -> list[int]:
        return [pid for pid in self.pids() if _is_alive(pid)]


@pytest.fixture
def fake(tmp_path: Path):
    fake = Fake(tmp_path)
    yield fake
    for pid in fake.living() if fake.pid_file.exists() else []:  # a failed test must not leave its sleepers
        os.kill(pid, signal.SIGKILL)


def _is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true within 20 s"
        time.sleep(0.02)


def test_serves_and_ends_every_process(fake: Fake):
    with fake.server() as server:
        assert server.startup_s > 0.0
        assert sorted(fake.living()) == sorted(fake.pids())
        assert {p.pid for p in server.processes()} == set(fake.pids())
        assert server.pid == fake.pids()[0]
        assert server.get_json("/model_info") == {"path": "/model_info"}
        assert server.post_json("/generate", {"prompt": "hi"}) == {"echo": "hi"}
    assert fake.living() == []
    server.stop()  # a second time: nothing happens


def test_ends_every_process_when_the_block_raises(fake: Fake):
    with pytest.raises(ZeroDivisionError), fake.server():
        assert len(fake.living()) == 4
        raise ZeroDivisionError
    assert fake.living() == []


def test_a_server_that_ignores_sigterm_is_killed_after_the_grace(fake: Fake):
    with fake.server("deaf"):
        stopping = time.monotonic()
    assert 0.3 <= time.monotonic() - stopping < 5.0
    assert fake.living() == []


def test_early_death_shows_the_last_log_lines_and_leaves_no_child(fake: Fake):
    with (
        pytest.raises(ServerError, match=r"exit code 7[\s\S]*model\.norm\.weight is missing") as caught,
        fake.server("dies"),
    ):
        pass
    assert str(fake.log_path) in str(caught.value)
    assert fake.living() == []


def test_a_start_that_takes_too_long_is_given_up(fake: Fake):
    with (
        pytest.raises(ServerError, match=r"not healthy after[\s\S]*loading the weights"),
        fake.server("hangs", start_timeout_s=2.0),
    ):
        pass
    assert fake.living() == []


def test_an_interrupt_while_loading_ends_every_process(fake: Fake):
    def interrupt_when_loaded(elapsed_s: float, last_log_line: str) -> None:
        if last_log_line == "[2026-11-29 12:00:00] loading the weights":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), fake.server("hangs", on_wait=interrupt_when_loaded):
        pass
    assert fake.living() == []


@pytest.fixture
def interrupt_raises() -> Iterator[None]:
    """As in a program of its own: SGLang, which other tests import, may have installed a handler."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupt_raises")
def test_a_second_interrupt_cuts_the_grace_short(fake: Fake):
    with pytest.raises(KeyboardInterrupt), fake.server("deaf", stop_grace_s=60.0):
        threading.Timer(0.5, signal.raise_signal, [signal.SIGINT]).start()
        stopping = time.monotonic()
    assert time.monotonic() - stopping < 10.0
    assert fake.living() == []


def test_death_while_serving_is_noticed(fake: Fake):
    with pytest.raises(ServerError, match="exit code 3"), fake.server() as server:
        with pytest.raises(OSError):
            server.post_json("/die", {})
        _wait_for(lambda: not _is_alive(server.pid))
        server.check_alive()
    assert fake.living() == []


def test_a_taken_port_is_refused_before_the_start(fake: Fake):
    with fake.server() as first:
        second = fake.server(port=first.port)
        with pytest.raises(ServerError, match=f"port {first.port} cannot be used.*choose another"), second:
            pass
        assert second.pid == 0
        assert len(fake.living()) == 4, "the first server must not notice"


def test_streams_events_up_to_done(fake: Fake):
    with fake.server() as server:
        assert list(server.stream("/stream", {})) == [{"n": 1}, {"n": 2}]


def test_an_http_error_carries_status_and_body(fake: Fake):
    with fake.server() as server, pytest.raises(ResponseError, match="no prompt in the request") as caught:
        server.post_json("/generate", {})
    assert (caught.value.status, caught.value.body) == (400, "no prompt in the request")


def test_requests_do_not_go_through_a_proxy(fake: Fake, monkeypatch: pytest.MonkeyPatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://{HOST}:{free_port()}")  # nobody listens there
    with fake.server() as server:
        assert server.get_json("/x") == {"path": "/x"}


def test_peak_memory_counts_the_whole_tree(fake: Fake):
    with fake.server() as server:
        peaks = [
            int(Path(f"/proc/{process.pid}/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
            for process in server.processes()
        ]
        total = server.peak_memory_bytes()
    assert len(peaks) > 1
    assert max(peaks) < total < sum(peaks), "all processes, but no shared page twice"


def test_the_environment_is_the_one_that_was_given(fake: Fake):
    with fake.server(env={**os.environ, "K3_TEST_MARK": "present"}) as server:
        assert b"K3_TEST_MARK=present" in Path(f"/proc/{server.pid}/environ").read_bytes().split(b"\0")


def test_sigterm_to_the_program_that_serves_ends_every_process(fake: Fake, tmp_path: Path):
    """What `make serve` and the soak rely on, in a process of its own."""
    program = f"""
import time
from pathlib import Path
from sglang_k3.testing.server import ServerProcess, unwind_on_signals
unwind_on_signals()
with ServerProcess({fake.command("serves")!r}, log_path=Path({str(fake.log_path)!r}), stop_grace_s=0.3):
    print("up", flush=True)
    time.sleep(600)
"""
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=root) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        assert len(fake.living()) == 4
        child.terminate()
        assert child.wait(timeout=20) != 0
    assert fake.living() == []
