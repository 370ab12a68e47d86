"""A pytest plugin that writes what a run has shown of features together, into ``tests/pairs.json``.

    .venv/bin/python -m pytest -p tests.kit.record_pairs tests/server -m "not gpu and not multigpu"

A test has the features of its marks ``covers``, of its server's flags, and of its parameters. What earlier runs have
shown stays, so that runs on a CPU and on a GPU add up; a test that fails loses what it had shown. To begin anew, remove
the file.
"""

from __future__ import annotations

import collections
import datetime
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kit.configurations import ON_GPU, Configuration
from tests.kit.pairs import ROOT, Row, Where, in_order, load, merged, save

SHORT_CHUNK = 128  # tokens; the prompts of served tests are longer
DEFAULT_PAGE = "64" if ON_GPU else "1"  # the plugin's, as a flag

_passed: collections.Counter[tuple[str, tuple[str, ...], Where]] = collections.Counter()
_failed: set[tuple[str, tuple[str, ...], Where]] = set()


def features_of(configuration: Configuration) -> set[str]:
    """What a server has that runs with these flags, and with the plugin's defaults on this device."""
    flags, found = configuration.flags, set()
    page = flags[flags.index("--page-size") + 1] if "--page-size" in flags else DEFAULT_PAGE
    if page != "1":
        found.add("pages")
    for flag, name in (
        ("--tp-size", "tp"),
        ("--ep-size", "ep"),
        ("--pp-size", "pp"),
    ):
        if flag in flags and flags[flags.index(flag) + 1] != "1":
            found.add(name)
    if "--chunked-prefill-size" in flags:
        chunk = int(flags[flags.index("--chunked-prefill-size") + 1])
        found |= {"chunks"} if chunk <= SHORT_CHUNK else set()
    if "--enable-dp-attention" in flags:
        found.add("dp")
    if "--disable-overlap-schedule" not in flags and "pp" not in found:
        found.add("overlap")
    if configuration.dtype == "bfloat16":
        found.add("bf16")
    if ON_GPU and "disabled" not in flags:
        found.add("graphs")
    if "--disable-radix-cache" not in flags:
        found.add("host" if "--mamba-radix-cache-strategy" in flags else "k3")
    return found


def features(item: pytest.Item) -> set[str]:
    """What a test exercises."""
    found = {name for mark in item.iter_markers("covers") for name in mark.args}
    params = item.callspec.params if hasattr(item, "callspec") else {}
    for value in params.values():
        if isinstance(value, Configuration):
            found |= features_of(value)
    if "tiny_server" in getattr(item, "fixturenames", ()):
        found |= features_of(Configuration("the model by name"))
    if params.get("stream") is True:
        found.add("stream")
    return found


def keys(item: pytest.Item) -> Iterator[tuple[str, tuple[str, ...], Where]]:
    test = f"{item.path.relative_to(ROOT)}::{getattr(item, 'originalname', item.name)}"
    where: Where = "in process"
    if item.get_closest_marker("server") is not None:
        where = "served on a GPU" if ON_GPU else "served on a CPU"
    if len(together := in_order(features(item))) > 1:
        yield test, together, where
    for mark in item.iter_markers("refuses"):
        yield test, in_order(mark.args), "refused"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Iterator[Any]:
    report = yield
    if report.failed:
        _failed.update(keys(item))
    elif report.when == "call" and report.passed:
        _passed.update(keys(item))
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    date = datetime.date.today().isoformat()
    commit = _commit()
    passed = [Row(*key, count, date, commit) for key, count in _passed.items()]
    failed = [Row(*key, 0, date, commit) for key in _failed]
    save(merged(load(), passed, failed))


def _commit() -> str:
    """Of the tree that is tested; a GPU host may have no repository, nor git."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
