"""Thousands of requests against a small server whose pools are too small for them; every answer is checked.

    .venv/bin/python benchmarks/soak.py                         # 1,000 requests, about five minutes
    .venv/bin/python benchmarks/soak.py --count 10000 --save    # rows for benchmarks/results/soak.json
    .venv/bin/python benchmarks/soak.py --url http://127.0.0.1:30000 --log server.log

A server of one's own must serve ``kimi-k3-tiny`` in float32 on this machine, with the flags and the environment of
``sglang_k3/testing/soak.py``, and write to the file that ``--log`` names. Ends with 1 if anything was wrong, or if no
request was ever retracted, for then nothing was tried.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from rows import ROOT, Row, save

from sglang_k3.testing.cache import ensure_tiny
from sglang_k3.testing.client import Client
from sglang_k3.testing.continuations import SequenceSet, ensure_continuations
from sglang_k3.testing.server import ServerProcess, sglang_command, unwind_on_signals
from sglang_k3.testing.soak import EAGER, SMALL_POOLS, Report, plan, soak

CACHE = ROOT / ".cache" / "soak"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000, help="requests (default: %(default)s)")
    parser.add_argument("--concurrency", type=int, default=24, help="requests at a time (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the requests (default: %(default)s)")
    parser.add_argument("--url", help="a running server on this machine, instead of one started for this")
    parser.add_argument("--log", type=Path, help="the log of the server at --url")
    parser.add_argument("--save", action="store_true", help="write rows to benchmarks/results/soak.json")
    args = parser.parse_args()
    if (args.url is None) != (args.log is None):
        parser.error("--url and --log belong together: leaks and retractions are told by the log alone.")
    unwind_on_signals()
    report = run(args)
    for fault in report.faults[:50]:
        print(fault)
    rows = rows_of(report, f"python benchmarks/soak.py --count {args.count} --seed {args.seed}")
    for row in rows:
        print(f"{row.metric}: {row.value:g} {row.unit}")
    if args.save:
        print(save("soak", rows))
    if report.faults:
        raise SystemExit(f"{len(report.faults)} faults")
    if report.retracted_answers == 0:
        raise SystemExit("no finished answer was retracted on its way: use smaller pools or more requests at a time")


def run(args: argparse.Namespace) -> Report:
    folder = ensure_tiny(CACHE)
    requests = plan(ensure_continuations(folder, SequenceSet(), CACHE), args.count, seed=args.seed)
    if args.url is not None:
        return soak(Client(args.url), args.log, requests, concurrency=args.concurrency)
    log = CACHE / f"server-{os.getpid()}.log"
    command = sglang_command(str(folder), *SMALL_POOLS)
    with ServerProcess(command, log_path=log, env=os.environ | EAGER) as server:
        report = soak(server, log, requests, concurrency=args.concurrency)
        server.check_alive()
        return report


def rows_of(report: Report, command: str) -> list[Row]:
    case = f"soak of {report.requests} requests"
    figures = (
        ("finished", report.finished, "requests"),
        ("aborted", report.aborted, "requests"),
        ("retractions", report.retractions, "retractions"),
        ("retractions_for_room", report.for_room, "retractions"),
        ("retracted_answers", report.retracted_answers, "requests"),
        ("wrong_answers", report.wrong, "requests"),
        ("leaked_tokens", report.leaked_tokens, "tokens"),
        ("output_tokens", report.tokens, "tokens"),
        ("requests_per_s", round(report.requests / report.wall_s, 2), "1/s"),
        ("wall_s", round(report.wall_s, 1), "s"),
    )
    return [Row(case=case, metric=metric, value=value, unit=unit, command=command) for metric, value, unit in figures]


if __name__ == "__main__":
    main()
