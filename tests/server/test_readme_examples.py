"""What the README tells its reader to type works as it says."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
from pathlib import Path

import pytest

from sglang_k3.testing.server import ServerProcess

pytestmark = pytest.mark.server
README = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
ADDRESS = "http://127.0.0.1:30000"
REQUESTS = re.findall(r"^curl .*?}'$", README, re.DOTALL | re.MULTILINE)
(CLIENT,) = (code for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "OpenAI(" in code)


@pytest.mark.parametrize("command", REQUESTS)
def test_curl(tiny_server: ServerProcess, command: str) -> None:
    command = command.replace(ADDRESS, tiny_server.url)
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, check=True)
    if '"stream": true' in command:
        *events, last = [line.removeprefix("data: ") for line in done.stdout.splitlines() if line]
        assert last == "[DONE]"
        deltas = [json.loads(event)["choices"][0]["delta"] for event in events]
        assert "".join(delta.get("content") or "" for delta in deltas)
        return
    message = json.loads(done.stdout)["choices"][0]["message"]
    for field in ("reasoning_content", "content"):
        assert f'"{field}": "{message[field]}"' in README


def test_the_client(tiny_server: ServerProcess) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(CLIENT.replace(ADDRESS, tiny_server.url), {})  # the README's own code
    promised = [line.partition(")  # ")[2] for line in CLIENT.splitlines() if "print(" in line]
    calls, answer = promised
    assert printed.getvalue().splitlines() == [*calls.split(", "), answer]
