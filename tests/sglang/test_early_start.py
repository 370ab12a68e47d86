"""Schedulers that begin before the host asks for them take the place of those that it starts, or none does."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_k3.integration import early_start
from sglang_k3.testing.server import ServerProcess, sglang_command
from tests.kit.early_processes import die, host_target, wait_for_ever, wait_for_work

ARGV = ["--model", "kimi-k3", "--port", "30000"]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    early_start.end()
    assert not multiprocessing.active_children()


def waiting(target: object = wait_for_work) -> early_start.EarlyProcess:
    early = early_start.EarlyProcess(target)
    early_start._waiting.append(early)
    return early


def ask(target: object = host_target, value: int = 7) -> tuple[int | None, tuple[int, int, str | None]]:
    """Pid of a process that the host starts, and what it answers."""
    answers, theirs = multiprocessing.get_context("spawn").Pipe(duplex=False)
    process = multiprocessing.Process(target=target, args=(theirs,), kwargs={"value": value})
    process.start()
    pid = process.pid
    assert answers.poll(60.0)
    answer = answers.recv()
    process.join(60.0)
    assert process.exitcode == 0
    return pid, answer


@pytest.fixture
def spawns(monkeypatch: pytest.MonkeyPatch) -> None:
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("spawn", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


@pytest.mark.usefixtures("spawns")
def test_a_process_of_the_host_is_one_that_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its arguments, a pipe among them, and what the host has set since."""
    first, second = waiting(), waiting()
    pids = [early._process.pid for early in (first, second)]
    monkeypatch.setenv("SET_LATER", "yes")
    with early_start.instead_of(host_target):
        for expected in pids:
            pid, answer = ask()
            assert pid == expected and answer == (expected, 7, "yes")
        pid, answer = ask(value=8)  # more than were started
        assert pid not in pids and answer == (pid, 8, "yes")


@pytest.mark.usefixtures("spawns")
def test_other_processes_are_their_own() -> None:
    early = waiting()
    with early_start.instead_of(wait_for_ever):
        pid, answer = ask()
    assert pid == answer[0] != early._process.pid
    assert not early_start._waiting and not early._process.is_alive(), "nobody took it"
    assert ask()[0] is not None


@pytest.mark.usefixtures("spawns")
@pytest.mark.parametrize("name", early_start.READ_AT_BEGIN)
def test_a_process_that_began_under_other_conditions_is_not_taken(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    early = waiting(wait_for_ever)
    monkeypatch.setenv(name, "/nonexistent")
    with early_start.instead_of(host_target):
        pid, answer = ask()
    assert pid == answer[0] != early._process.pid and not early._process.is_alive()


@pytest.mark.usefixtures("spawns")
def test_a_process_that_has_died_is_not_taken() -> None:
    early = waiting(die)
    early._process.join(60.0)
    with early_start.instead_of(host_target):
        pid, answer = ask()
    assert pid == answer[0] != early._process.pid


def test_who_is_not_needed_ends_at_once() -> None:
    waiting(wait_for_ever)
    begin = time.monotonic()
    early_start.end()
    assert time.monotonic() - begin < 5.0 and not early_start._waiting


@pytest.mark.parametrize(
    ("argv", "number"),
    [
        (ARGV, 1),
        (["--model-path=kimi-k3", "--tp", "2"], 2),
        ([*ARGV, "--tp-size", "2", "--pp-size", "3"], 6),
        ([*ARGV, "--tp-size", "8", "--nnodes", "2"], 4),
        ([*ARGV, "--device", "cuda"], 1),
        ([*ARGV, "--device", "cpu"], 0),
        ([*ARGV, "--dp-size", "2"], 0),
        ([*ARGV, "--tp-size", "two"], 0),
        (["--model", "somebody/else"], 0),
        (["doctor"], 0),
        ([], 0),
    ],
)
def test_as_many_are_started_as_the_command_line_wants(
    monkeypatch: pytest.MonkeyPatch, argv: list[str], number: int
) -> None:
    monkeypatch.setattr(early_start, "has_gpu", lambda: True)
    assert early_start._num_schedulers(argv) == number


def test_on_a_cpu_the_host_starts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_start, "has_gpu", lambda: False)
    assert early_start._num_schedulers(ARGV) == 0


PROGRAM = """
import runpy, sys
from sglang_k3.integration import early_start
early_start.has_gpu = lambda: True
take = early_start.EarlyProcess.take
def told(self, process):
    taken = take(self, process)
    print("taken:", taken is not None and taken.pid == self._process.pid, flush=True)
    return taken
early_start.EarlyProcess.take = told
runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
"""


def test_a_server_answers_from_a_scheduler_that_began_early(tmp_path: Path) -> None:
    """Here on a CPU, as if there were a GPU, and with the threads set that the plugin would set later."""
    command = sglang_command("kimi-k3-tiny")
    at = command.index("-m")
    command = [*command[:at], "-c", PROGRAM, *command[at + 2 :]]
    log = tmp_path / "server.log"
    with ServerProcess(command, log_path=log, env=os.environ | {"OMP_NUM_THREADS": "1"}) as server:
        body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 2, "temperature": 0}}
        assert len(server.post_json("/generate", body)["output_ids"]) == 2
    assert log.read_text(errors="replace").count("taken: True") == 1
