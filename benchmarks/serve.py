"""Throughput and latency of a K3 server on a GPU, its cold start, and what the host adds to a decode step.

    python benchmarks/serve.py                                    # everything, on the GPU preset; a few minutes
    python benchmarks/serve.py --only random-1024-1024 --quick    # some loads, fewer requests
    python benchmarks/serve.py --start --step                     # only the cold start and the step

The load is the host's own, ``python -m sglang.benchmark.serving`` (formerly ``sglang.bench_serving``), against a server
that this program starts on loopback; random tokens, so that nothing is downloaded. Rows go to
``benchmarks/results/serve_h200.json``, but for those of another ``--model`` and with ``--no-save``.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from rows import Row, save
from step_profile import StepProfile, profile_of, read_trace

from sglang_k3.env import cache_root
from sglang_k3.testing.cache import ensure_tiny
from sglang_k3.testing.server import ServerProcess, sglang_command, unwind_on_signals

TOPIC = "serve_h200"
COLD_START_LIMIT_S = 60.0
HOST_OVERHEAD_LIMIT_MS = 1.5
STEP_BATCH = 64
STEPS_SEEN_S = 2.0  # without a profiler
PROFILED_STEPS = 40
NO_COMPILERS = ("nvcc", "ninja")
LOG_EVERY = 10  # decode steps between two lines of the server's log
# The host would size its pools, and the buffers beside them, for all of a GPU's memory.
POOLS = ("--max-total-tokens", "2097152", "--max-running-requests", "256", "--max-mamba-cache-size", "1280")


@dataclasses.dataclass(frozen=True)
class Load:
    """One run of the host's load generator; ``waves`` times as many requests as run at once."""

    name: str
    concurrency: int
    flags: tuple[str, ...]
    waves: int = 3

    @property
    def case(self) -> str:
        return f"{self.name}, {self.concurrency} at a time"


def _random(prompt: int, answer: int) -> tuple[str, ...]:
    lengths = ("--random-input-len", str(prompt), "--random-output-len", str(answer), "--random-range-ratio", "1.0")
    return ("--dataset-name", "random-ids", "--tokenize-prompt", *lengths)


def _shared_prefix(groups: int, each: int) -> tuple[str, ...]:
    numbers = {"num-groups": groups, "prompts-per-group": each, "system-prompt-len": 2048, "question-len": 128}
    flags = [flag for name, n in (*numbers.items(), ("output-len", 256)) for flag in (f"--gsp-{name}", str(n))]
    return ("--dataset-name", "generated-shared-prefix", *flags)


LOADS = (
    *(Load("random-1024-1024", n, _random(1024, 1024)) for n in (1, 16, 64)),
    *(Load("random-8192-1024", n, _random(8192, 1024)) for n in (1, 16, 64)),
    Load("shared-prefix-2048", 16, _shared_prefix(8, 16)),
)
# What the host's load generator calls a figure, what it is here, and its unit.
FIGURES = (
    ("output_throughput", "output_tokens_per_s", "1/s"),
    ("total_throughput", "tokens_per_s", "1/s"),
    ("median_ttft_ms", "first_token_median_ms", "ms"),
    ("p99_ttft_ms", "first_token_p99_ms", "ms"),
    ("median_tpot_ms", "per_token_median_ms", "ms"),
    ("p99_itl_ms", "between_tokens_p99_ms", "ms"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or name (default: the 8-layer preset with K3's head sizes)")
    parser.add_argument("--flags", default="", help="further flags of the server, in one argument")
    parser.add_argument(
        "--only", nargs="*", help="loads whose name begins so; the cold start and the step are left out"
    )
    parser.add_argument("--start", action="store_true", help="the cold start, and nothing else that is not named")
    parser.add_argument("--step", action="store_true", help="the decode step, and nothing else that is not named")
    parser.add_argument("--quick", action="store_true", help="fewer requests")
    parser.add_argument("--no-save", action="store_true", help="print the rows and keep the old ones")
    args = parser.parse_args()
    everything = args.only is None and not args.start and not args.step
    unwind_on_signals()
    model = args.model or str(ensure_tiny(cache_root(), "gpu", dtype="bfloat16"))
    flags = (*(() if args.model else POOLS), *shlex.split(args.flags))
    loads = LOADS if everything else [load for load in LOADS if load.name.startswith(tuple(args.only or ("?",)))]
    command = shlex.join(["python", "benchmarks/serve.py", *sys.argv[1:]])
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(model, flags, Path(folder), quick=args.quick, saves=not (args.model or args.no_save))
        if everything or args.start:
            bench.record(bench.cold_start(command))
        if loads or everything or args.step:
            with bench.generator, bench.serve() as server:
                if everything or args.step:
                    bench.record(bench.step(server, command))
                for load in loads:
                    bench.record(bench.load(server, load))


class Bench:
    """Measurements of one model; what they print and what they write."""

    def __init__(self, model: str, flags: tuple[str, ...], folder: Path, *, quick: bool, saves: bool) -> None:
        self.model, self.flags, self.folder = model, flags, folder
        self.quick, self.saves = quick, saves
        self.generator = LoadGenerator()

    def record(self, rows: list[Row]) -> None:
        for row in rows:
            limit = "" if row.baseline is None else f" (limit {row.baseline:g})"
            print(f"{row.case}: {row.metric} {row.value:g} {row.unit}{limit}", flush=True)
        if self.saves:
            save(TOPIC, rows)

    @contextlib.contextmanager
    def serve(self, env: dict[str, str] | None = None) -> Iterator[ServerProcess]:
        command = sglang_command(self.model, "--decode-log-interval", str(LOG_EVERY), *self.flags)
        server = ServerProcess(
            command, log_path=self.folder / "server.log", env=env, start_timeout_s=400.0, on_wait=Waiting()
        )
        try:
            with server:
                print(f"\nthe server is up after {server.startup_s:.1f} s", flush=True)
                yield server
        finally:
            _keep(server.log_path)

    def cold_start(self, command: str) -> list[Row]:
        """From the start of the process to the first answered token: no kernel is cached, no CUDA compiler is there.

        Whether the files are in the machine's memory is for whoever calls: a second run finds them there.
        """
        caches = self.folder / "empty"
        env = os.environ | {
            "PATH": str(without_compilers(self.folder / "bin")),
            "TRITON_CACHE_DIR": str(caches / "triton"),
            "TVM_FFI_CACHE_DIR": str(caches / "tvm-ffi"),
            "FLASHINFER_WORKSPACE_BASE": str(caches),
            "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        }
        begin = time.monotonic()
        with self.serve(env) as server:
            body = {"input_ids": list(range(2, 34)), "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
            server.post_json("/generate", body, timeout_s=300.0)
            seconds = time.monotonic() - begin
        case = "cold start: empty kernel caches, no nvcc, no ninja, to the first answered token"
        limit = COLD_START_LIMIT_S
        answer = Row(case=case, metric="answer_s", value=round(seconds, 1), unit="s", baseline=limit, command=command)
        imports = Row(case=case, metric="imports_s", value=round(host_imports_s(), 1), unit="s", command=command)
        return [answer, imports]

    def load(self, server: ServerProcess, load: Load) -> list[Row]:
        print(f"== {load.case}", flush=True)
        result = self.folder / "load.jsonl"
        result.unlink(missing_ok=True)
        count = load.concurrency * (1 if self.quick else load.waves) + (2 if load.concurrency == 1 else 0)
        server.post_text("/flush_cache?timeout=30", {})
        arguments = [
            *("-m", "sglang.benchmark.serving", "--backend", "sglang", "--base-url", server.url),
            *("--num-prompts", str(count), "--max-concurrency", str(load.concurrency), *load.flags),
            *("--tokenizer", str(self.tokenizer()), "--output-file", str(result)),
        ]
        self.generator.run(arguments[2:])
        server.check_alive()
        figures = json.loads(result.read_text().splitlines()[-1])
        if figures["completed"] < 1:
            raise SystemExit(f"{load.case}: no request was answered; see the server's log")
        told = ("python", *arguments[: arguments.index("--base-url")], *arguments[arguments.index("--num-prompts") :])
        command = shlex.join(told).replace(str(self.folder), "DIR").replace(self.model, "MODEL")
        return [
            Row(case=load.case, metric=name, value=round(figures[theirs], 2), unit=unit, command=command)
            for theirs, name, unit in FIGURES
        ]

    def tokenizer(self) -> Path:
        """The model's tokenizer as a folder that transformers reads without knowing K3."""
        folder = self.folder / "tokenizer"
        if not folder.exists():
            folder.mkdir()
            shutil.copy(Path(self.model) / "tokenizer.json", folder)
            (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
        return folder

    def step(self, server: ServerProcess, command: str) -> list[Row]:
        """Decode steps of a full batch: their time without a profiler, and the GPU's share of it with one.

        Beside them, how fast the host's cores are then, with which goes what a step takes beside the GPU.
        """
        body = {"sampling_params": {"max_new_tokens": 4000, "temperature": 0, "ignore_eos": True}}
        with ThreadPoolExecutor(STEP_BATCH) as pool:
            asked = [
                pool.submit(server.post_json, "/generate", {**body, "input_ids": [2 + n] * 512}, timeout_s=300.0)
                for n in range(STEP_BATCH)
            ]
            marked = _wait_for_full_batch(server.log_path)
            loops_ms = [python_loop_ms()]
            time.sleep(STEPS_SEEN_S)
            loops_ms.append(python_loop_ms())
            plain = server.log_path.read_bytes()[marked:].decode(errors="replace")
            quiet = self._trace(server, "quiet", with_stack=False)
            told = self._trace(server, "told", with_stack=True)
            for answer in as_completed(asked):
                answer.result()
        step_ms = _step_ms(plain)
        print(_description(step_ms, quiet, told), flush=True)
        case = f"decode step, {STEP_BATCH} requests of 512 tokens and more"
        figures = (
            ("step_ms", step_ms, "ms", None),
            ("gpu_ms", quiet.gpu_ms, "ms", None),
            ("host_ms", step_ms - quiet.gpu_ms, "ms", HOST_OVERHEAD_LIMIT_MS),
            ("plugin_percent", 100 * told.plugin, "%", None),
            ("python_loop_ms", max(loops_ms), "ms", None),
        )
        return [
            Row(case=case, metric=name, value=round(value, 3), unit=unit, baseline=limit, command=command)
            for name, value, unit, limit in figures
        ]

    def _trace(self, server: ServerProcess, name: str, *, with_stack: bool) -> StepProfile:
        folder = self.folder / name
        request = {
            "output_dir": str(folder),
            "num_steps": PROFILED_STEPS,
            "activities": ["CPU", "GPU"],
            "with_stack": with_stack,
            "record_shapes": False,
        }
        threading.Thread(target=server.post_text, args=("/start_profile", request), daemon=True).start()
        deadline = time.monotonic() + 60.0
        while f"Traces are saved to: {folder}" not in server.log_path.read_text(errors="replace"):
            if time.monotonic() > deadline:
                raise SystemExit("the server wrote no trace within a minute; see its log")
            time.sleep(0.2)
        (trace,) = folder.glob("*.trace.json.gz")
        return profile_of(read_trace(trace))


class LoadGenerator:
    """The host's load generator as one process for all loads: to import it takes longer than some of them."""

    PROGRAM = """
import json, sys
from sglang.benchmark import serving
for line in sys.stdin:
    sys.argv = ["sglang.benchmark.serving", *json.loads(line)]
    serving.cli_main()
    print("\\nthis load is done", flush=True)
"""

    def __enter__(self) -> LoadGenerator:
        self._process = subprocess.Popen(
            [sys.executable, "-c", self.PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def run(self, arguments: list[str]) -> None:
        """One load, its progress on stderr."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(arguments) + "\n")
        self._process.stdin.flush()
        said = []
        for line in self._process.stdout:
            if line == "this load is done\n":
                return
            said.append(line)
        raise SystemExit(f"the host's load generator ended by itself:\n{''.join(said[-20:])}")


class Waiting:
    """One line for each new thing that a starting server says."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, waited: float, message: str) -> None:
        if message != self._last and "/health" not in message:
            self._last = message
            print(f"{waited:5.0f} s  {message[:150]}", flush=True)


def without_compilers(folder: Path) -> Path:
    """A folder that stands in for ``PATH`` and has everything but the CUDA compiler and its build tool."""
    folder.mkdir(exist_ok=True)
    for entry in os.environ["PATH"].split(os.pathsep):
        for file in sorted(Path(entry).glob("*")) if Path(entry).is_dir() else ():
            link = folder / file.name
            if file.name not in NO_COMPILERS and not link.is_symlink():
                link.symlink_to(file)
    return folder


def host_imports_s() -> float:
    """What SGLang itself takes to be imported, without this package: by the server's process, then by its scheduler."""
    begin = time.monotonic()
    for module in ("sglang.srt.entrypoints.http_server", "sglang.srt.managers.scheduler"):
        program = f"import sglang.launch_server, {module}"
        subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, stderr=subprocess.DEVNULL)
    return time.monotonic() - begin


def python_loop_ms() -> float:
    """What a million rounds of an empty loop take on an idle core here and now, the median of five times."""

    def once() -> float:
        begin = time.perf_counter()
        for _ in range(1_000_000):
            pass
        return 1000 * (time.perf_counter() - begin)

    return statistics.median(once() for _ in range(5))


def _keep(log: Path) -> None:
    """The log of the last server, for whoever wants to know why."""
    kept = cache_root() / "serve.log"
    kept.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        shutil.copy(log, kept)


def _wait_for_full_batch(log: Path) -> int:
    """Where the log ends once all requests are decoding."""
    deadline = time.monotonic() + 60.0
    while f"Decode batch, #running-req: {STEP_BATCH}," not in log.read_text(errors="replace"):
        if time.monotonic() > deadline:
            raise SystemExit(f"{STEP_BATCH} requests never ran at once; see {cache_root() / 'serve.log'}")
        time.sleep(0.1)
    return log.stat().st_size


def _step_ms(log: str) -> float:
    """Median time of a step of a full batch, from the throughput that the server reports every few steps."""
    lines = [line for line in log.splitlines() if f"Decode batch, #running-req: {STEP_BATCH}," in line]
    rates = [float(line.split("gen throughput (token/s): ")[1].split(",")[0]) for line in lines]
    if not rates:
        raise SystemExit("the server reported no full batch between the first one and the profiler")
    return 1000 * STEP_BATCH / statistics.median(rates)


def _description(step_ms: float, quiet: StepProfile, told: StepProfile) -> str:
    lines = [
        f"a step takes {step_ms:.3f} ms ({quiet.step_ms:.3f} under the profiler), the GPU works {quiet.gpu_ms:.3f} of "
        f"it; {quiet.launches:.0f} calls beside the replay start work on it",
        f"this package takes {told.plugin:.1%} of the time of all Python functions, waiting included",
        "of the step, by function without its callees (under the profiler):",
        *(f"  {share:6.1%}  {name}" for share, name in told.functions),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
