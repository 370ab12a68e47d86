"""`make serve`: visible progress, one answer, a URL, and nothing left after Ctrl-C. A stand-in plays the host."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from sglang_k3.testing.server import free_port

ROOT = Path(__file__).resolve().parents[2]

# Shadows the real host on PYTHONPATH: the same command line, an answer in the same form, one child process.
FAKE_LAUNCH_SERVER = """
import http.server, json, os, subprocess, sys, time

assert sys.argv[1:3] == ["--model", "kimi-k3-tiny"], sys.argv
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(os.environ["FAKE_PIDS"], "w").write(f"{os.getpid()} {child.pid}")
print("[2026-11-29 12:00:00] Loading safetensors checkpoint shards", flush=True)
if "--broken" in sys.argv:
    sys.exit("sglang-k3: the tensor model.norm.weight is missing")
if "--slow" in sys.argv:
    time.sleep(600)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/v1/chat/completions" and body["model"] == "kimi-k3-tiny"
        asked = body["messages"][-1]["content"]
        message = {"reasoning_content": "Hm.", "content": f"You said:\\x1b[31m {asked} \\u4f60"}
        self.answer({"choices": [{"message": message}]})

    def answer(self, data):
        data = json.dumps(data).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler).serve_forever()
"""


class Demo:
    def __init__(self, folder: Path) -> None:
        (folder / "sglang").mkdir()
        (folder / "sglang" / "__init__.py").touch()
        (folder / "sglang" / "launch_server.py").write_text(FAKE_LAUNCH_SERVER)
        self.pid_file = folder / "pids"
        self.env = {
            **os.environ,
            "PYTHONPATH": f"{folder}:{ROOT}",
            "PYTHONIOENCODING": "ascii",  # a terminal that cannot show every answer
            "FAKE_PIDS": str(self.pid_file),
        }

    def start(self, *argv: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(ROOT / "examples" / "serve_tiny.py"), *argv]
        pipe = subprocess.PIPE
        child = subprocess.Popen(command, env=self.env, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
        self.watchdog = threading.Timer(60.0, child.kill)  # a demo that hangs fails the test instead of hanging it
        self.watchdog.start()
        return child

    def living(self) -> list[str]:
        return [pid for pid in self.pid_file.read_text().split() if _is_running(pid)]


def _is_running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.fixture
def demo(tmp_path: Path):
    demo = Demo(tmp_path)
    yield demo
    demo.watchdog.cancel()
    for pid in demo.living():
        os.kill(int(pid), signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_asks_answers_and_leaves_nothing(demo: Demo, number: signal.Signals):
    port = free_port()
    with demo.start("--port", str(port)) as child:
        assert child.stdout is not None
        lines = []
        while "Serving until Ctrl-C." not in lines:
            line = child.stdout.readline()
            assert line, f"the demo ended too early: {lines}"
            lines.append(line.rstrip())
        assert len(demo.living()) == 2
        child.send_signal(number)
        out, err = child.communicate(timeout=30)
    assert (child.returncode, err) == (0, "")
    assert demo.living() == []
    text = "\n".join(lines)
    assert f"python -m sglang.launch_server --model kimi-k3-tiny --host 127.0.0.1 --port {port}" in text
    assert (
        "question  Hello! Who are you?\nthinking  Hm.\nanswer    You said: [31m Hello! Who are you? \\u4f60\n" in text
    )
    assert f"URL       http://127.0.0.1:{port}/v1\n" in text
    assert f"curl -s http://127.0.0.1:{port}/v1/chat/completions" in text
    assert "stopped, no process is left" in out


def test_a_server_that_dies_is_reported_with_its_last_words(demo: Demo):
    with demo.start("--", "--broken") as child:
        out, err = child.communicate(timeout=60)
    assert child.returncode == 1
    assert "Serving" not in out
    assert "exit code 1" in err
    assert err.rstrip().endswith("sglang-k3: the tensor model.norm.weight is missing")
    assert demo.living() == []


def test_ctrl_c_while_loading_leaves_nothing(demo: Demo):
    with demo.start("--", "--slow") as child:
        assert child.stdout is not None
        while "Loading safetensors" not in (line := child.stdout.readline()):
            assert line, "the demo ended too early"
        child.send_signal(signal.SIGINT)
        child.communicate(timeout=30)
    assert child.returncode == 130
    assert demo.living() == []
