"""How much of each prompt the prefix cache saves: our checkpoint policy and four others on eight traces, no model.

    .venv/bin/python benchmarks/cache_traces.py                          # everything, prints tables, saves nothing
    .venv/bin/python benchmarks/cache_traces.py --save                   # and rows to results/cache_traces.json
    .venv/bin/python benchmarks/cache_traces.py --traces T4 --pools 0.25 # one cell
    .venv/bin/python benchmarks/cache_traces.py --ablations --save       # one mechanism of ours switched off at a time
    .venv/bin/python benchmarks/cache_traces.py --policy-time --save     # what the policy itself takes, 100,000 nodes

traces    T1 chat  T2 agents  T3 single turns behind a jittering prefix  T4 long trunks and their branches
          T5 shared-prefix groups  T6 nothing shared  T7 bursts of equal prompts  T8 mixture, aborts, retractions
          (sglang_k3/testing/cache_traces.py; seeded; one id stands for 16 tokens)
policies  ours, every_chunk_lru, sglang, marconi, oracle (sglang_k3/testing/cache_rivals.py)
pools     multiples of the working set: the peak bytes of states and KV when nothing is evicted

A *token hit rate* is the share of all prompt tokens that a request did not have to compute, since it started from a
state behind them. States and KV share the pool; a state takes as many bytes as the KV of 2,032 tokens (TP=8, fp32).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import os
import sys
import time
from collections.abc import Iterator

from cache_policy_time import policy_time
from rows import Row, save
from tqdm import tqdm

from sglang_k3.testing.cache_contest import ABLATIONS, NAMES, POOLS, Cell, working_set
from sglang_k3.testing.cache_future import Future
from sglang_k3.testing.cache_simulator import Outcome
from sglang_k3.testing.cache_traces import TRACES, UNIT

SCRIPT = "python benchmarks/cache_traces.py"
RIVALS = ("every_chunk_lru", "sglang", "marconi")
ABLATED_POOLS = (0.1, 0.25)  # where there is something to decide
Task = tuple[str, float, str]
Rates = dict[Task, Outcome]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", nargs="+", choices=TRACES, default=[*TRACES], metavar="T", help="default: all")
    parser.add_argument("--pools", nargs="+", type=float, metavar="X", help="default: 0.25 0.5 1 2")
    parser.add_argument("--policies", nargs="+", choices=NAMES, default=[*NAMES], metavar="P", help="default: all")
    parser.add_argument("--ablations", action="store_true", help="ours with one mechanism off, instead of the others")
    parser.add_argument("--policy-time", action="store_true", help="only what the policy itself takes")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: %(default)s)")
    parser.add_argument("--save", action="store_true", help="write rows to benchmarks/results/cache_traces.json")
    args = parser.parse_args()
    if args.policy_time:
        rows = policy_time(f"{SCRIPT} --policy-time")
        for row in rows:
            print(f"{row.case}: {row.metric} {row.value:g} {row.unit}")
    else:
        rows = contest(args)
    if args.save:
        print(save("cache_traces", rows))


def contest(args: argparse.Namespace) -> list[Row]:
    names = ["ours", *(one.name for one in ABLATIONS)] if args.ablations else args.policies
    pools = args.pools or (ABLATED_POOLS if args.ablations else POOLS)
    tasks = [(trace, pool, name) for trace in args.traces for pool in pools for name in names]
    rates: Rates = {}
    start = time.monotonic()
    with tqdm(total=len(tasks), unit="run", file=sys.stderr) as bar:
        for task, outcome in _run_all(tasks, args.jobs):
            rates[task] = outcome
            bar.update()
            bar.set_postfix_str(f"{task[0]} x{task[1]:g} {task[2]}: {outcome.token_hit_rate:.3f}")
    print_table(rates, names)
    print(f"{len(tasks)} runs in {time.monotonic() - start:.0f} s")
    command = SCRIPT + (" --ablations" if args.ablations else "")
    pools_given = "" if not args.pools else " --pools " + " ".join(f"{pool:g}" for pool in args.pools)
    return rows_of(rates, names, command + pools_given)


def _run_all(tasks: list[Task], jobs: int) -> Iterator[tuple[Task, Outcome]]:
    if jobs == 1:
        yield from ((task, _run(task)) for task in tasks)
        return
    with concurrent.futures.ProcessPoolExecutor(jobs, initializer=os.nice, initargs=(5,)) as workers:
        running = {workers.submit(_run, task): task for task in tasks}
        for done in concurrent.futures.as_completed(running):
            yield running[done], done.result()


def _run(task: Task) -> Outcome:
    name, pool, policy = task
    trace, future, num_bytes = _prepared(name)
    future.arrived(-1)
    return Cell(trace, num_bytes, pool).run_named(policy, future)


@functools.lru_cache(maxsize=2)
def _prepared(name: str) -> tuple:
    trace = TRACES[name]()
    return trace, Future(trace), working_set(trace)


def print_table(rates: Rates, names: list[str]) -> None:
    width = max(map(len, names))
    cells = list(dict.fromkeys(task[:2] for task in rates))
    print(" " * width, *(f"{trace:>4}x{pool:<4g}" for trace, pool in cells), "    mean", sep=" ")
    for name in names:
        values = [rates[(*cell, name)].token_hit_rate for cell in cells]
        print(f"{name:{width}}", *(f"{value:9.4f}" for value in values), f"{_mean(values):9.4f}", sep=" ")


def rows_of(rates: Rates, names: list[str], command: str) -> list[Row]:
    """A row per cell and policy, held against the oracle where it ran; what else ours did; and, of a whole contest, the
    means and what was to be shown."""
    rows = []
    for (trace, pool, name), outcome in rates.items():
        oracle = rates.get((trace, pool, "oracle"))
        baseline = None if oracle is None else _rate(oracle) or None
        row = functools.partial(Row, case=f"{trace}/pool{pool:g}/{name}", command=command)
        rows.append(row(metric="token_hit_rate", value=_rate(outcome), unit="", baseline=baseline))
        if name == "ours" and oracle is not None:
            counts = outcome.counts
            rows.append(row(metric="replayed_tokens", value=outcome.replayed_units * UNIT, unit="tokens"))
            rows.append(row(metric="states_planted", value=counts.planted, unit="states"))
            rows.append(row(metric="states_skipped", value=counts.skipped.total(), unit="states"))
            rows.append(row(metric="states_evicted", value=counts.evicted.total(), unit="states"))
    cells = {task[:2] for task in rates}
    if cells >= {(trace, pool) for trace in TRACES for pool in POOLS} and {*NAMES} <= {*names}:
        rows += _shown(rates, command)
    elif names[1:] == [one.name for one in ABLATIONS] and {trace for trace, _ in cells} == {*TRACES}:
        for name in names:
            mean = round(_mean([outcome.token_hit_rate for task, outcome in rates.items() if task[2] == name]), 4)
            rows.append(Row(case=f"ablation/{name}", metric="token_hit_rate", value=mean, unit="", command=command))
    return rows


def _shown(rates: Rates, command: str) -> list[Row]:
    """Of the four pools of the issue."""
    cells = [(trace, pool) for trace in TRACES for pool in POOLS]
    of = {name: [rates[(*cell, name)].token_hit_rate for cell in cells] for name in NAMES}
    row = functools.partial(Row, command=command)
    rows = [
        row(case=f"mean/{name}", metric="token_hit_rate", value=round(_mean(of[name]), 4), unit="") for name in NAMES
    ]
    best = [max(of[name][i] for name in RIVALS) for i in range(len(cells))]
    worst = max(100 * (rival - ours) for rival, ours in zip(best, of["ours"], strict=True))
    shares = [ours / oracle for ours, oracle in zip(of["ours"], of["oracle"], strict=True) if oracle >= 0.02]
    rows.append(
        row(case="furthest below the best rival", metric="gap", value=round(worst, 2), unit="points", baseline=0.5)
    )
    rows.append(row(case="share of the oracle", metric="mean", value=round(_mean(shares), 4), unit="", baseline=0.9))
    rows.append(row(case="smallest share of the oracle", metric="least", value=round(min(shares), 4), unit=""))
    return rows


def _rate(outcome: Outcome) -> float:
    return round(outcome.token_hit_rate, 4)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    main()
