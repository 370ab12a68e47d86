"""CUDA graphs of a K3 server: decode steps are captured, prompts run as they come.

The host captures a graph for each of a list of batch sizes and pads a batch to the next of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_k3.errors import ConfigError

if TYPE_CHECKING:
    from sglang_k3.integration.server_args import K3ServerArgs

LARGEST_BATCH = 256  # that is captured when nobody asks for another
ASKED = ("cuda_graph_backend_decode", "cuda_graph_max_bs_decode", "cuda_graph_bs_decode")


def set_graph_defaults(args: K3ServerArgs, *, on_cpu: bool) -> None:
    """Settle which steps are captured, before the host resolves its own defaults.

    Raises:
        ConfigError: graphs are asked for on a CPU, or for more requests than the server takes at once.
    """
    if on_cpu:
        for field in ASKED:
            value = getattr(args, field)
            if value not in (None, "disabled"):
                shown = " ".join(map(str, value)) if isinstance(value, list) else value
                raise ConfigError(f"--{field.replace('_', '-')} {shown} needs a GPU: leave it out on a CPU.")
        args.disable_cuda_graph = True
        return
    args.disable_prefill_cuda_graph = True
    running, largest = args.max_running_requests, largest_asked(args)
    if running is not None:
        running //= args.dp_size
        refuse_larger_than_pool(largest, running, "--max-running-requests leaves a rank")
    if largest is None:
        args.cuda_graph_max_bs_decode = LARGEST_BATCH if running is None else min(LARGEST_BATCH, running)


def largest_asked(args: Any) -> int | None:
    """The largest batch that the user wants captured; None if that is left to us."""
    if args.cuda_graph_bs_decode:
        return int(max(args.cuda_graph_bs_decode))
    largest: int | None = args.cuda_graph_max_bs_decode
    return largest


def refuse_larger_than_pool(largest: int | None, room: int, why: str) -> None:
    """Raise if a batch is to be captured that can never be: the host would drop it in silence.

    Args:
        largest: what ``largest_asked`` said.
        room: requests that run at once on a rank.
        why: what leaves no more room, the begin of a sentence.
    """
    if largest is not None and largest > room:
        raise ConfigError(
            f"--cuda-graph-max-bs-decode or --cuda-graph-bs-decode asks for graphs of {largest} requests, but {why} "
            f"room for {room} at once. Ask for {room} at most, or leave it out."
        )
