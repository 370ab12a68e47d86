"""Serve a K3 model with the stock command, ask it one question, and stay up until Ctrl-C.

``make serve`` runs this. What it runs for you is exactly

    python -m sglang.launch_server --model kimi-k3-tiny --port PORT

with a line of progress while the server loads. Ctrl-C (or SIGTERM, or a closed terminal) ends every process that was
started; a second Ctrl-C does not wait for an orderly end. The server's log goes to ``.cache/serve.log``.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
import time
from pathlib import Path

from sglang_k3.testing.server import ServerError, ServerProcess, sglang_command, unwind_on_signals

LOG_PATH = Path(__file__).resolve().parents[1] / ".cache" / "serve.log"
SPINNER = "|/-\\"
QUESTION = "Hello! Who are you?"


def main() -> int:
    args = parse_arguments()
    sys.stdout.reconfigure(errors="backslashreplace", line_buffering=True)  # an answer may not fit the charset
    unwind_on_signals()
    progress = Progress()
    server = ServerProcess(
        sglang_command(args.model, *args.flags), port=args.port or None, log_path=LOG_PATH, on_wait=progress.show
    )
    print("starting ", shlex.join(["python", *server.command[1:]]))
    print("log      ", LOG_PATH)
    up = False
    try:
        with server:
            up = True
            progress.clear()
            print(f"healthy   after {server.startup_s:.0f} s (pid {server.pid})\n")
            ask(server, args.model)
            while True:
                server.check_alive()
                time.sleep(0.5)
    except KeyboardInterrupt:
        progress.clear()
        print("\nstopped, no process is left.")
        return 0 if up else 130
    except ServerError as error:
        progress.clear()
        print(f"\nerror: {error}", file=sys.stderr)
        return 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="kimi-k3-tiny", help="a name, or a checkpoint folder (default: %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="port on 127.0.0.1 (default: a free one)")
    parser.add_argument("flags", nargs="*", help="more flags for the stock command, after `--`")
    return parser.parse_args()


def ask(server: ServerProcess, model: str) -> None:
    """One chat question, its answer, and how to ask the next one by hand."""
    body = {"model": model, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 256, "temperature": 0}
    message = server.post_json("/v1/chat/completions", body)["choices"][0]["message"]
    print("question ", QUESTION)
    for label, field in (("thinking ", "reasoning_content"), ("answer   ", "content")):
        if text := message.get(field):
            print(label, "".join(c if c.isprintable() else " " for c in text))
    print(f"\nURL       {server.url}/v1")
    print("try      ", shlex.join(["curl", "-s", f"{server.url}/v1/chat/completions"]), "\\")
    print("            -H 'Content-Type: application/json' \\")
    print("            -d", shlex.quote(json.dumps(body)))
    print("\nServing until Ctrl-C.")


class Progress:
    """Elapsed time and what the server last said: rewritten in place on a terminal, every ten seconds anywhere else."""

    def __init__(self) -> None:
        self.on_terminal = sys.stdout.isatty()
        self.frame = 0
        self.next_line_s = 0.0

    def show(self, elapsed_s: float, message: str) -> None:
        printable = "".join(c for c in message if c.isprintable()) or "importing SGLang"
        if self.on_terminal:
            self.frame += 1
            line = f"{SPINNER[self.frame % len(SPINNER)]} {elapsed_s:4.0f} s  {printable}"
            width = shutil.get_terminal_size().columns - 1
            sys.stdout.write("\r\x1b[2K" + line[:width])
            sys.stdout.flush()
        elif elapsed_s >= self.next_line_s:
            self.next_line_s = elapsed_s + 10.0
            print(f"{elapsed_s:6.0f} s  {printable[:160]}")

    def clear(self) -> None:
        if self.on_terminal:
            sys.stdout.write("\r\x1b[2K")
            sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
