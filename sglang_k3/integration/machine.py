"""Whether this machine can serve a model, asked before anything is loaded: its GPUs, their kernels, and its memory."""

from __future__ import annotations

import importlib
import math
import os
from typing import TYPE_CHECKING

import torch
from sglang.srt.distributed.utils import get_pp_indices
from sglang.srt.utils import get_device_memory_capacity

from sglang_k3.config import K3Config
from sglang_k3.env import kernel_mode
from sglang_k3.errors import ConfigError
from sglang_k3.integration.defaults import CPU_CHUNKED_PREFILL_TOKENS, states_per_request
from sglang_k3.kernels import OPS, OpContext
from sglang_k3.planner import Ranks, plan_memory

if TYPE_CHECKING:
    from sglang_k3.integration.server_args import K3ServerArgs


def refuse_what_it_cannot_serve(args: K3ServerArgs, config: K3Config) -> None:
    """Check what a server is to run against what this machine has.

    Raises:
        ConfigError: says what is missing, and what would help.
    """
    refuse_without_kernels(args, config)
    refuse_what_does_not_fit(args, config, _device_bytes(args.device))


def _device_bytes(device: str) -> float | None:
    if device == "cpu":  # where there is a GPU as well, the host speaks of that
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    memory = get_device_memory_capacity(device)
    return None if memory is None else memory * 2**20


def refuse_without_kernels(args: K3ServerArgs, config: K3Config) -> None:
    """On a GPU an op without a kernel would run by its reference, which is for a bisection, not for service.

    Raises:
        ConfigError: a GPU that a rank would take is not there, or has no kernel of an op, or the model's head sizes
            have none.
    """
    mode = kernel_mode()
    if args.device != "cuda":
        return
    gpus, found = _gpus(args), torch.cuda.device_count()
    if gpus[-1] >= found:
        raise ConfigError(
            f"The ranks of this machine take GPUs {', '.join(map(str, gpus))}, but torch finds {found}, numbered from "
            "zero. Give less of --tp-size, --pp-size or --base-gpu-id, or spread them over more machines with --nnodes."
        )
    if mode == "reference":
        return
    kda, mla = config.kda, config.mla
    of_kda = {"K": kda.head_dim, "V": kda.head_dim}
    of_mla = {
        "K": mla.qk_nope_head_dim,
        "R": mla.qk_rope_head_dim,
        "V": mla.v_head_dim,
        "D": mla.latent_dim,
        "L": mla.kv_lora_rank,
    }
    for gpu in gpus:
        for op, module in OPS.items():
            context = OpContext(torch.device("cuda", gpu), sizes=of_mla if op.startswith("mla") else of_kda)
            *kernels, _ = importlib.import_module(module).IMPLS
            reasons = [kernel.supports(context) for kernel in kernels]
            if None not in reasons:
                raise ConfigError(
                    f"On GPU {gpu} there is no kernel for {op}, which {reasons[-1]}. Use another GPU or model, "
                    "--device cpu, or K3PLUGIN_KERNELS=reference for a slow run by the plain PyTorch references."
                )


def _gpus(args: K3ServerArgs) -> list[int]:
    """Those that the ranks of this machine take, as the host deals them out."""
    from sglang.srt.entrypoints.engine import _calculate_rank_ranges  # of the main process alone

    stages, ranks, stages_here, ranks_here = _calculate_rank_ranges(
        args.nnodes, args.pp_size, args.tp_size, args.node_rank
    )
    dealt = {
        args.base_gpu_id + stage % stages_here * ranks_here + rank % ranks_here * args.gpu_id_step
        for stage in stages
        for rank in ranks
    }
    return sorted(dealt)


def refuse_what_does_not_fit(args: K3ServerArgs, config: K3Config, device_bytes: float | None) -> None:
    """Predict, before anything is loaded, that the weights and the least that one request needs have no room.

    Args:
        device_bytes: memory of the smallest GPU, or of a machine whose ranks are all on the CPU; None if nobody knows.

    Raises:
        ConfigError: says what is needed, what there is, and what would help.
    """
    if device_bytes is None:
        return
    on_cpu, num_ranks = args.device == "cpu", args.tp_size * args.pp_size
    stages = [get_pp_indices(config.num_hidden_layers, rank, args.pp_size) for rank in range(args.pp_size)]
    sizes = {
        "num_states": args.max_mamba_cache_size or states_per_request(args),
        "num_tokens": args.max_total_tokens or max(args.chunked_prefill_size or 0, 0) or CPU_CHUNKED_PREFILL_TOKENS,
        "itemsize": 4 if args.dtype == "float32" else 2,
        "state_itemsize": 2 if args.mamba_ssm_dtype in ("bfloat16", "float16") else 4,
    }
    plan = plan_memory(config, Ranks(args.tp_size, args.dp_size, tuple(stages)), **sizes)
    room = device_bytes / num_ranks if on_cpu else device_bytes * (args.mem_fraction_static or 1.0)
    if plan.total <= room:
        return
    if plan.total - plan.weights >= room:
        remedy = "Ask for fewer with --max-mamba-cache-size and --max-total-tokens"
    elif on_cpu:
        remedy = "Take a machine with more memory, or a smaller model"
    else:
        least = -(-num_ranks * plan.weights // max(1, int(room) - plan.total + plan.weights))
        heads = math.gcd(config.kda.num_heads, config.mla.num_heads)
        least = next((ranks for ranks in range(least, heads + 1) if heads % ranks == 0), least)
        remedy = f"Spread it over {least} GPUs or more with --tp-size and --pp-size"
    part = (
        f"this machine's {device_bytes / 1e9:.1f} GB, divided by the ranks,"
        if on_cpu
        else f"--mem-fraction-static {args.mem_fraction_static} of this GPU's {device_bytes / 1e9:.1f} GB"
    )
    raise ConfigError(f"The model does not fit: it needs {plan}, but {part} is {room / 1e9:.1f}. {remedy}.")
