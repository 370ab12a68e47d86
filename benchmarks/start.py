"""How long it takes a newcomer to get an answer, and what the tests cost; run on an idle machine.

    .venv/bin/python benchmarks/start.py            # make serve twice: time to the answer, peak memory
    .venv/bin/python benchmarks/start.py --tests    # make test as well (minutes)

Rows go to ``benchmarks/results/start.json`` and from there into the README.
"""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
import time

from rows import ROOT, Row, save

from sglang_k3.testing.server import ServerProcess, sglang_command, unwind_on_signals

ANSWER_LIMIT_S = 60.0
MEMORY_LIMIT_GB = 4.0
TESTS_LIMIT_MIN = 20.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", action="store_true", help="time `make test` as well")
    args = parser.parse_args()
    unwind_on_signals()
    seconds_to_answer()  # the first start fills the file cache and writes the tiny model
    rows = [
        Row(
            case="second `make serve`, to the answer",
            metric="answer_s",
            value=round(seconds_to_answer(), 1),
            unit="s",
            baseline=ANSWER_LIMIT_S,
            command="make serve",
        ),
        Row(
            case="memory of the tiny server, all its processes at their peaks, shared pages once",
            metric="peak_gb",
            value=round(peak_memory_gb(), 2),
            unit="GB",
            baseline=MEMORY_LIMIT_GB,
            command="python -m sglang.launch_server --model kimi-k3-tiny",
        ),
    ]
    if args.tests:
        rows.append(
            Row(
                case="`make test`, installed",
                metric="tests_min",
                value=round(minutes_of_tests(), 1),
                unit="min",
                baseline=TESTS_LIMIT_MIN,
                command="make test",
            )
        )
    for row in rows:
        print(f"{row.case}: {row.value:g} {row.unit} (limit {row.baseline:g})")
    print(save("start", rows))


def seconds_to_answer() -> float:
    """One ``make serve`` up to its printed answer, then Ctrl-C."""
    started = time.monotonic()
    child = subprocess.Popen(
        ["make", "serve"], cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True, errors="replace"
    )
    assert child.stdout is not None
    try:
        for line in child.stdout:
            sys.stdout.write(line)
            if re.match(r"answer\b", line):
                return time.monotonic() - started
        raise SystemExit(f"make serve ended with {child.wait()} before it answered")
    finally:
        # As a terminal does: the whole foreground group gets the signal.
        subprocess.run(["kill", f"-{signal.SIGINT}", "--", f"-{child.pid}"], check=False)
        child.communicate()


def peak_memory_gb() -> float:
    with ServerProcess(sglang_command("kimi-k3-tiny"), log_path=ROOT / ".cache" / "memory.log") as server:
        body = {"text": "Hello", "sampling_params": {"max_new_tokens": 64, "ignore_eos": True}}
        server.post_json("/generate", body)
        return server.peak_memory_bytes() / 1e9


def minutes_of_tests() -> float:
    started = time.monotonic()
    subprocess.run(["make", "test"], cwd=ROOT, check=True)
    return (time.monotonic() - started) / 60


if __name__ == "__main__":
    main()
