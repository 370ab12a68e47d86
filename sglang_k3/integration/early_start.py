"""Scheduler processes that import the host while the main process still does.

The host starts its schedulers when its main process has imported everything, and then they import as long again. Here
they are started as soon as the plugin is loaded, on a GPU, where a start is long enough for it to matter. What the
command line says by then is a guess: when the host starts a process for real, one of these takes its place, or none if
what a process reads when it begins has changed since. Nobody who has a mistake to mend waits for them.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import multiprocessing
import multiprocessing.spawn
import os
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import Process
from typing import Any

# Variables that are read before the first line of ours, or once when a library is loaded.
READ_AT_BEGIN = (
    "CUDA_VISIBLE_DEVICES",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "OMP_NUM_THREADS",
    "PROMETHEUS_MULTIPROC_DIR",
    "PYTORCH_CUDA_ALLOC_CONF",
)
_waiting: list[EarlyProcess] = []


class EarlyProcess:
    """A process that has begun and waits for what the host wants of it.

    Args:
        target: called there with a connection, on which comes what ``take`` was given: arguments, keyword arguments and
            the environment. Nothing comes if it is not needed.
    """

    def __init__(self, target: Callable[[Connection], object]) -> None:
        self._began_with = _read_at_begin()
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=target, args=(theirs,))
        self._process.start()
        theirs.close()

    def take(self, process: Any) -> Any:
        """What ``multiprocessing`` needs of the process that runs ``process`` from now on; None if this one cannot."""
        if self._began_with != _read_at_begin() or not self._process.is_alive():
            return None
        try:
            self._connection.send((process._args, process._kwargs, dict(os.environ)))
        except BrokenPipeError:
            return None
        return self._process._popen  # type: ignore[attr-defined]

    def end(self) -> None:
        """At once, whatever it is importing."""
        self._connection.close()
        self._process.kill()
        self._process.join()


def start(argv: Sequence[str], target: Callable[[Connection], object]) -> None:
    """Start a process for each scheduler that the command line ``argv`` will want on this machine."""
    for _ in range(_num_schedulers(argv)):
        _waiting.append(EarlyProcess(target))
    if _waiting:
        atexit.register(end)  # before multiprocessing's own, which would wait for them


def end() -> None:
    """End those that nobody took."""
    while _waiting:
        _waiting.pop().end()


@contextlib.contextmanager
def instead_of(target: Callable[..., object]) -> Iterator[None]:
    """Inside, a process of the host with this ``target`` is one of those that wait, while there are any."""
    original = Process._Popen

    def begin(process: Any) -> Any:
        if process._target is target and _waiting:
            waiting = _waiting.pop(0)
            taken = waiting.take(process)
            if taken is not None:
                return taken
            waiting.end()
        return original(process)

    Process._Popen = staticmethod(begin)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Process._Popen = staticmethod(original)  # type: ignore[method-assign]
        end()


def _num_schedulers(argv: Sequence[str]) -> int:
    """How many schedulers a server of K3 on a GPU will have here; 0 if it is none, or another process starts them."""
    from sglang_k3.integration.names import is_k3

    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--model-path", "--model")
    parser.add_argument("--device")
    for names in (
        ("--tensor-parallel-size", "--tp-size", "--tp"),
        ("--pipeline-parallel-size", "--pp-size", "--pp"),
        ("--data-parallel-size", "--dp-size", "--dp"),
        ("--nnodes",),
    ):
        parser.add_argument(*names, type=int, default=1, dest=names[0].strip("-"))
    try:
        said, _ = parser.parse_known_args(list(argv))
    except (argparse.ArgumentError, SystemExit):
        return 0
    if not said.model_path or not is_k3(said.model_path) or vars(said)["data-parallel-size"] > 1:
        return 0
    if said.device != "cuda" and (said.device is not None or not has_gpu()):
        return 0
    ranks: int = vars(said)["tensor-parallel-size"] * vars(said)["pipeline-parallel-size"]
    return max(0, ranks // max(1, said.nnodes))


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _read_at_begin() -> tuple[str | bytes | None, ...]:
    return multiprocessing.spawn.get_executable(), *(os.environ.get(name) for name in READ_AT_BEGIN)
