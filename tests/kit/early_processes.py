"""Targets of processes in the tests of ``early_start``, in a module that such a process imports quickly."""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection


def host_target(answers: Connection, value: int = 0) -> None:
    """What the host would run: says who answered and what it was given."""
    answers.send((os.getpid(), value, os.environ.get("SET_LATER")))


def wait_for_work(connection: Connection) -> None:
    try:
        args, kwargs, environ = connection.recv()
    except EOFError:
        return
    os.environ.update(environ)
    host_target(*args, **kwargs)


def wait_for_ever(_: Connection) -> None:
    time.sleep(3600)


def die(_: Connection) -> None:
    os._exit(3)
