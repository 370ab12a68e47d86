"""The command ``sglang-k3``: ``doctor``, ``tiny``, ``cache-report``. Each imports what it needs when it runs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import sglang_k3

if TYPE_CHECKING:
    from collections.abc import Sequence

DESCRIPTION = """\
Kimi K3 on stock SGLang, as a plugin. Serving needs no command of ours; SGLang finds the plugin by itself:

  python -m sglang.launch_server --model kimi-k3-tiny     a small K3 that can chat, made on first use
  python -m sglang.launch_server --model kimi-k3          the published moonshotai/Kimi-K3
  python -m sglang.launch_server --model DIR              a checkpoint in the published layout
"""

TINY = """\
Write a small K3 checkpoint in the published layout: config.json, tokenizer.json and safetensors.
The weights are random unless the preset has fitted ones.
The same arguments give the same bytes. Unless the preset says more, it takes seconds and a few MB. It serves with

  python -m sglang.launch_server --model DIR
"""

TINY_EPILOG = """\
presets:
{presets}

examples:
  sglang-k3 tiny ./k3
  sglang-k3 tiny ./k3-bf16 --dtype bfloat16 --experts bf16
  sglang-k3 tiny ./k3-odd --preset odd --seed 7 --text-only
"""

DOCTOR = """\
Look at the installed SGLang, the devices, the kernels that would run, and every place of SGLang that the plugin
touches; say what is wrong and what to do about it. Exit code 0: nothing is wrong; 1: something is. Nothing is started
and nothing is changed.
"""

DOCTOR_EPILOG = """\
examples:
  sglang-k3 doctor
  K3PLUGIN_KERNELS=reference sglang-k3 doctor      what would run with every op by its reference
"""

CACHE_REPORT = """\
Ask a running K3 server what its prefix cache holds: how many recurrent states and tokens of KV, what the memory is
spent on, how often requests started from a state, what was planted, skipped and evicted and why, and the tree itself,
a line per branch. With --svg the tree is drawn, too: bars are KV, dots are states, a ring is a place without one.
With data-parallel attention there is a report per rank, and a picture each: FILE-0.svg, FILE-1.svg, ...
"""

CACHE_REPORT_EPILOG = """\
examples:
  sglang-k3 cache-report http://localhost:30000
  sglang-k3 cache-report http://localhost:30000 --svg cache.svg
  sglang-k3 cache-report https://k3.example --api-key KEY

The same figures over time: start the server with --enable-metrics and look at the sglang:k3_* series of /metrics.
The scheduler stands still while it describes its cache: some 5 ms per thousand branches.
"""

# One line for each of PRESETS and GPU_PRESETS of sglang_k3.testing.presets, kept here because to import those costs
# seconds (tests compare).
PRESETS = {
    "default": "9 layers, attention residual blocks of 4: every structural feature of K3",
    "odd": "13 layers; head counts and widths that are no powers of two",
    "deep": "25 layers, attention residual blocks of 12 as in the published model",
    "chat": "5 layers with fitted weights, not random ones: holds a small conversation and calls tools",
    "gpu": "8 layers with heads of K3's sizes, 16 of them, for a GPU; 248 MB",
    "gpu-96-heads": "the same with 96 heads of MLA, as a rank has under data-parallel attention; 397 MB",
}


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        code: int = args.run(args)
    except (ValueError, OSError) as error:  # what a person can put right; anything else is a bug and shows its trace
        print(f"error: {error}", file=sys.stderr)
        return 1
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sglang-k3", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"sglang-k3 {sglang_k3.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_tiny(commands)
    _add_doctor(commands)
    _add_cache_report(commands)
    return parser


def _add_tiny(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    presets = "\n".join(f"  {name:<13} {text}" for name, text in PRESETS.items())
    tiny = commands.add_parser(
        "tiny",
        help="write a small random K3 checkpoint in the published layout",
        description=TINY,
        epilog=TINY_EPILOG.format(presets=presets),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    tiny.add_argument("folder", metavar="DIR", help="folder to write: new, or empty")
    tiny.add_argument("--preset", default="default", metavar="NAME", help="sizes, see below (default: %(default)s)")
    tiny.add_argument(
        "--dtype",
        default="float32",
        choices=("float32", "bfloat16"),
        help="run dtype that config.json asks for; the tensors are the same (default: %(default)s)",
    )
    tiny.add_argument(
        "--experts",
        default="mxfp4",
        choices=("mxfp4", "bf16"),
        help="format of the routed experts; the values are the same (default: %(default)s)",
    )
    tiny.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the weights (default: %(default)s)")
    tiny.add_argument("--text-only", action="store_true", help="leave the vision tower out")
    tiny.set_defaults(run=_tiny)


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="check SGLang, devices, kernels and seams, and say what to do",
        description=DOCTOR,
        epilog=DOCTOR_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    doctor.set_defaults(run=_doctor)


def _add_cache_report(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    report = commands.add_parser(
        "cache-report",
        help="show what the prefix cache of a running server holds",
        description=CACHE_REPORT,
        epilog=CACHE_REPORT_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    report.add_argument("url", metavar="URL", help="of the server: http://HOST:PORT")
    report.add_argument("--svg", type=Path, metavar="FILE", help="draw it, too")
    report.add_argument("--api-key", metavar="KEY", help="the server's --api-key, if it has one")
    report.set_defaults(run=_cache_report)


def _tiny(args: argparse.Namespace) -> int:
    from sglang_k3.testing.tiny import write_tiny

    folder = write_tiny(
        args.folder, args.preset, seed=args.seed, dtype=args.dtype, experts=args.experts, vision=not args.text_only
    )
    megabytes = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
    print(f"wrote {folder} ({megabytes:.1f} MB). Serve it: python -m sglang.launch_server --model {folder}")
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from sglang_k3.doctor import run

    return 1 if run(print) else 0


def _cache_report(args: argparse.Namespace) -> int:
    from sglang_k3.report import run

    run(args.url, args.svg, args.api_key, print)
    return 0


if __name__ == "__main__":
    sys.exit(main())
