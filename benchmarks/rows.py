"""Measured figures: one JSON file per topic in ``benchmarks/results``, one row per figure."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("sglang", "torch", "triton", "transformers")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One figure.

    Attributes:
        case: what was measured, also the text of its line in the README.
        baseline: what it is held against, for example a limit; ``ratio`` is ``value / baseline``.
    """

    case: str
    metric: str
    value: float
    unit: str
    command: str
    baseline: float | None = None
    hardware: str = dataclasses.field(default_factory=lambda: hardware())
    versions: dict[str, str] = dataclasses.field(default_factory=lambda: versions())
    date: str = dataclasses.field(default_factory=lambda: datetime.date.today().isoformat())

    def as_json(self) -> dict[str, object]:
        ratio = None if self.baseline is None else round(self.value / self.baseline, 4)
        return {**dataclasses.asdict(self), "ratio": ratio}


def versions() -> dict[str, str]:
    """Of the installed ones of ``PACKAGES``; kernels are timed on machines without the host."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def hardware() -> str:
    """This machine in a few words; the accelerator's name if there is one."""
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return f"{len(os.sched_getaffinity(0))} x {platform.machine()} CPU cores, no accelerator"


def save(topic: str, rows: list[Row]) -> Path:
    """Add rows to a topic; a row of the same case and metric is replaced."""
    path = RESULTS / f"{topic}.json"
    kept = load(topic)
    for row in rows:
        entry = row.as_json()
        kept = [old for old in kept if (old["case"], old["metric"]) != (entry["case"], entry["metric"])] + [entry]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return path


def load(topic: str) -> list[dict[str, object]]:
    path = RESULTS / f"{topic}.json"
    rows: list[dict[str, object]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    return rows
