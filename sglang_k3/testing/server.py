"""A server under test: started on a free loopback port, waited for until healthy, always ended.

``ServerProcess`` is a context manager around one command line. Whatever happens inside the ``with`` block, or
while the server is still loading, no process of it is left when the block is over: SGLang starts a scheduler and
a detokenizer of its own, so the whole session of the child is followed through ``/proc`` (Linux only), not just
its first process.

    with ServerProcess(sglang_command("kimi-k3-tiny"), log_path=Path("server.log")) as server:
        answer = server.post_json("/generate", {"text": "Hello", "sampling_params": {"max_new_tokens": 8}})

Standard library only: nothing here imports SGLang or torch, so the process that asks stays small.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_k3.testing.client import Client, ResponseError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
HOST = "127.0.0.1"
POLL_S = 0.2
KILL_LIMIT_S = 20.0  # a GPU process gives its memory back first
TAIL_LINES = 25


class ServerError(RuntimeError):
    """The server did not start, died, or refused to end; the message ends with the last lines of its log."""


def sglang_command(model: str, *flags: str) -> list[str]:
    """The stock command that serves ``model``, run by this interpreter; ``ServerProcess`` adds host and port."""
    return [sys.executable, "-m", "sglang.launch_server", "--model", model, *flags]


def unwind_on_signals() -> None:
    """Let every signal that asks this program to end unwind it, as Ctrl-C does, so that its servers end too.

    Python leaves SIGTERM and SIGHUP deadly, and SIGINT ignored in a background job.
    """
    for number in ENDING_SIGNALS:
        signal.signal(number, _interrupt)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


class ServerProcess(Client):
    """One server, from start to end. Enter it to start, leave it to end; see the module docstring.

    Args:
        command: the command line without host and port; ``--host 127.0.0.1 --port N`` is appended.
        log_path: file that receives stdout and stderr; its folder is made, an older log is overwritten.
        port: port to listen on; ``None`` takes a free one.
        env: the whole environment of the server; ``None`` inherits this process's.
        start_timeout_s: seconds until ``/health`` must have answered 200.
        stop_grace_s: seconds from SIGTERM to SIGKILL. SGLang looks at its SIGTERM every five seconds.
        on_wait: called a few times per second while the server loads, with the seconds so far and its last message.

    Attributes:
        pid: process id of the server's first process (0 before the start); also the id of its session and group.
        startup_s: seconds from start to healthy (0.0 before).
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        log_path: Path,
        port: int | None = None,
        env: Mapping[str, str] | None = None,
        start_timeout_s: float = 300.0,
        stop_grace_s: float = 8.0,
        on_wait: Callable[[float, str], None] | None = None,
    ) -> None:
        self.port = free_port() if port is None else port
        self.command = [*command, "--host", HOST, "--port", str(self.port)]
        super().__init__(f"http://{HOST}:{self.port}")
        self.log_path = log_path
        self.pid = 0
        self.startup_s = 0.0
        self._env = env
        self._start_timeout_s = start_timeout_s
        self._stop_grace_s = stop_grace_s
        self._on_wait = on_wait
        self._child: subprocess.Popen[bytes] | None = None
        # Every process ever seen: one that left the session cannot be found any more once its parent is dead.
        self._seen: set[ProcessId] = set()

    def __enter__(self) -> ServerProcess:
        _refuse_taken_port(self.port)
        try:
            self._start()
            self._wait_until_healthy()
        except BaseException:  # also Ctrl-C: nothing may survive it
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _start(self) -> None:
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("wb") as log:
            self._child = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=None if self._env is None else dict(self._env),
                start_new_session=True,  # Ctrl-C in the terminal reaches us alone, and we end the server in order
            )
        self.pid = self._child.pid

    def _wait_until_healthy(self) -> None:
        started = time.monotonic()
        while not self._healthy():
            waited = time.monotonic() - started
            self.check_alive()
            if waited > self._start_timeout_s:
                raise ServerError(f"the server was not healthy after {waited:.0f} s. {self._log_report()}")
            if self._on_wait is not None:
                self._on_wait(waited, self._last_message())
            time.sleep(POLL_S)
        self.startup_s = time.monotonic() - started
        self.check_alive()

    def _healthy(self) -> bool:
        try:
            with self._open("/health", timeout_s=30.0):
                return True
        except (OSError, http.client.HTTPException, ResponseError):  # not there, gone again, or 503 while it warms up
            return False

    def check_alive(self) -> None:
        """Raise ``ServerError`` if the server has ended by itself."""
        assert self._child is not None, "the server was never started: use it in a with statement"
        self._seen.update(self.processes())
        code = self._child.poll()
        if code is not None:
            raise ServerError(f"the server ended by itself with exit code {code}. {self._log_report()}")

    def stop(self) -> None:
        """End every process of the server; safe to call twice. A Ctrl-C during the grace period kills at once.

        SIGTERM goes to the first process only: SGLang takes a scheduler that ends by itself for a crash, and would
        spend a minute on a post-mortem.

        Raises:
            ServerError: a process is still there ``KILL_LIMIT_S`` after SIGKILL.
        """
        if self._child is None:
            return
        self._seen.update(self.processes())
        try:
            self._child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(self._stop_grace_s)
        finally:
            self._kill()
        self._child = None

    def _kill(self) -> None:
        deadline = time.monotonic() + KILL_LIMIT_S
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
        try:
            while left := self._left():
                if time.monotonic() > deadline:
                    pids = sorted(process.pid for process in left)
                    raise ServerError(f"processes {pids} survived SIGKILL for {KILL_LIMIT_S:.0f} s; end them by hand.")
                for process in left:
                    process.kill()
                time.sleep(0.02)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _left(self) -> list[ProcessId]:
        """Every process of the server that still runs, those that left the session included."""
        assert self._child is not None
        self._child.poll()  # reap it, or it stays as a zombie
        self._seen.update(self.processes())
        return [process for process in self._seen if process.alive()]

    def processes(self) -> list[ProcessId]:
        """The live processes of the server: its session, and descendants that left the session."""
        return [] if self._child is None else _session_and_descendants(self.pid)

    def peak_memory_bytes(self) -> int:
        """What the live processes held at their peaks, a page that several of them share counted once.

        The peaks need not have fallen together, so this is an upper bound.
        """
        return sum(process.peak_memory_bytes() for process in self.processes())

    def log_tail(self, lines: int = TAIL_LINES) -> str:
        """The last non-empty lines of the log, at most 64 KB of it."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(0, os.SEEK_END)
                log.seek(max(0, log.tell() - 65536))
                text = log.read().decode("utf-8", errors="replace")
        except FileNotFoundError:
            return ""
        return "\n".join([line for line in text.splitlines() if line.strip()][-lines:])

    def _last_message(self) -> str:
        """What SGLang last said, empty before its first line, which begins with a bracketed time as all of them do."""
        return next((line for line in reversed(self.log_tail().splitlines()) if line.startswith("[")), "")

    def _log_report(self) -> str:
        return f"Log: {self.log_path}, its last lines:\n{self.log_tail()}"


def free_port() -> int:
    """A loopback port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
    return port


def _refuse_taken_port(port: int) -> None:
    """Another server's ``/health`` must not be mistaken for ours."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            message = f"port {port} cannot be used ({error.strerror}): choose another, or leave it out for a free one."
            raise ServerError(message) from None


@dataclasses.dataclass(frozen=True)
class ProcessId:
    """A process by id and start time, so that a recycled id is never taken for it."""

    pid: int
    start_time: int

    def alive(self) -> bool:
        stat = _read_stat(self.pid)
        return stat is not None and stat.process == self

    def kill(self) -> None:
        if self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def peak_memory_bytes(self) -> int:
        """The share of the process in what it has resident now, and what it has given back since its peak."""
        try:
            status = Path(f"/proc/{self.pid}/status").read_text()
            shares = Path(f"/proc/{self.pid}/smaps_rollup").read_text()
        except OSError:  # gone meanwhile
            return 0
        peak, now, share = (
            int(found[1]) * 1024 if (found := re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)) else 0
            for name, text in (("VmHWM", status), ("VmRSS", status), ("Pss", shares))
        )
        return share + peak - now


@dataclasses.dataclass(frozen=True)
class _Stat:
    process: ProcessId
    parent: int
    session: int


def _read_stat(pid: int) -> _Stat | None:
    """``/proc/PID/stat``, or ``None`` for a process that is gone or only waits to be reaped."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The second field is the command in parentheses and may hold spaces and parentheses itself.
    state, parent, _, session, *rest = text.rpartition(")")[2].split()
    if state in "ZX":
        return None
    return _Stat(ProcessId(pid, start_time=int(rest[15])), parent=int(parent), session=int(session))


def _session_and_descendants(leader: int) -> list[ProcessId]:
    stats = [stat for name in os.listdir("/proc") if name.isdigit() and (stat := _read_stat(int(name)))]
    found = {stat.process.pid for stat in stats if stat.session == leader}
    while more := {stat.process.pid for stat in stats if stat.parent in found} - found:
        found |= more
    return [stat.process for stat in stats if stat.process.pid in found]
