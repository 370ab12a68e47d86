"""What a K3 server needs and its user should not have to say.

Only fields that are still unset are filled, before the host resolves its own defaults; what cannot be split or
paged as asked is refused here, before a process is started.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.distributed.utils import get_pp_indices
from sglang.srt.environ import envs
from sglang.srt.utils import get_device

from sglang_k3.chat.tiktoken_file import FILE_NAME
from sglang_k3.config import MXFP4_GROUP_SIZE, K3Config, with_overrides
from sglang_k3.errors import ConfigError
from sglang_k3.integration.graphs import set_graph_defaults
from sglang_k3.integration.names import config_folder, resolve
from sglang_k3.integration.refusals import ATTENTION_BACKEND, PARSER, PREFIX_CACHE, refuse_unsupported
from sglang_k3.mem.limits import SLOTS_PER_REQUEST
from sglang_k3.planner import STATES_PER_REQUEST
from sglang_k3.weights.audit import audit_folder, read_config

if TYPE_CHECKING:
    from sglang_k3.integration.server_args import K3ServerArgs

STATE_CHUNK = 64  # tokens between the depths at which the host keeps a state in prefill
TRACK_INTERVAL = 256  # the least number of tokens between two states of one answer
LEAST_TOKENS = 64  # of a context or a pool: the host's own first request has 36 with the tiny model's tokenizer
CPU_RUNNING_REQUESTS = 16
CPU_STATE_BYTES = 1 << 30
CPU_KV_BYTES = 512 << 20
CPU_CHUNKED_PREFILL_TOKENS = 2048


def prepare_model(args: K3ServerArgs) -> None:
    """Follow the model's alias, hold a local checkpoint against its config, and look for a tokenizer.

    Raises:
        K3Error: the checkpoint or its config cannot be served.
    """
    source = resolve(args.model_path)
    if source.path != args.model_path:
        args.served_model_name = args.served_model_name or args.model_path
        args.model_path = source.path
        args.revision = args.revision or source.revision
    overrides = _overrides(args)
    if Path(args.model_path).is_dir():
        audit_folder(Path(args.model_path), overrides)
    tokenizer = Path(args.tokenizer_path or args.model_path)
    is_there = any((tokenizer / name).exists() for name in ("tokenizer.json", FILE_NAME))
    if tokenizer.is_dir() and not is_there and not args.skip_tokenizer_init:
        raise ConfigError(
            f"{tokenizer} has neither tokenizer.json nor {FILE_NAME}: add one of them, or name another folder with "
            "--tokenizer-path."
        )


def fill_defaults(args: K3ServerArgs) -> None:
    """Set what the user left open.

    Raises:
        ConfigError: an option does not work with K3, or not with this model's sizes.
    """
    refuse_unsupported(args)
    _check_nodes(args)
    _check_data_parallel(args)
    if args.device is None:
        args.device = _device_of_this_machine()
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda needs a GPU, and torch finds none. Leave it out, or give --device cpu.")
    on_cpu = args.device == "cpu"
    args.attention_backend = ATTENTION_BACKEND
    args.reasoning_parser = args.tool_call_parser = PARSER
    if args.dtype == "auto":
        # The host would serve a float32 checkpoint in half precision.
        args.dtype = _config_dtype(args)
    if args.page_size is None:
        args.page_size = 1 if on_cpu else 64
    _fit_grid(args)
    _choose_prefix_cache(args)
    _refuse_empty_pools(args)
    if args.enable_multimodal is None:
        args.enable_multimodal = False
    # One tensor of host memory at a time: the host's threaded reader holds several shards.
    extra = _json_object(args, "model_loader_extra_config")
    if not {"enable_multithread_load", "num_threads"} & extra.keys():
        args.model_loader_extra_config = json.dumps({**extra, "enable_multithread_load": False})
    if args.sampling_backend is None:
        # The other one is compiled by nvcc when the first request asks for top-k or top-p.
        args.sampling_backend = "pytorch"
    set_graph_defaults(args, on_cpu=on_cpu)
    # The host's scheduler asks for work without a pause; on a CPU it would take a core from whoever has some.
    args.sleep_on_idle |= on_cpu
    if (folder := config_folder(args.model_path, args.revision)) is not None:
        config = K3Config.from_dict(with_overrides(read_config(folder), _overrides(args)))
        check_splits(config, tp_size=args.tp_size, ep_size=args.ep_size, dp_size=args.dp_size)
        if args.enable_dp_attention and config.tie_word_embeddings and not args.enable_dp_lm_head:
            raise ConfigError(
                "--enable-dp-attention keeps all embeddings on each rank, and tied ones are the head too: "
                "give --enable-dp-lm-head."
            )
        check_stages(config.num_hidden_layers, args.pp_size)
        _check_context(args, config)
        if on_cpu:
            _size_cpu_pools(args, config)


def settle_chunk(args: K3ServerArgs) -> None:
    """Whole pages in the chunk that the host has chosen, or divided over data-parallel ranks, by now.

    Raises:
        ConfigError: what the host sets aside for such steps leaves no memory to the weights.
    """
    chunk, page = args.chunked_prefill_size, args.page_size
    if args.mem_fraction_static <= 0:  # what the user gave has been checked, so it is the host's own
        tokens = chunk * args.dp_size if chunk > 0 else args.max_prefill_tokens
        raise ConfigError(
            f"What SGLang sets aside for steps of {tokens} tokens and their CUDA graphs is more than the memory that "
            "there is. Give --mem-fraction-static, or less of --chunked-prefill-size, --max-prefill-tokens or "
            "--cuda-graph-max-bs-decode."
        )
    if chunk > 0 and chunk % page:
        args.chunked_prefill_size = max(page, chunk - chunk % page)


def _check_nodes(args: K3ServerArgs) -> None:
    """Each machine has as many ranks, and a number.

    Raises:
        ConfigError: the ranks do not divide over the machines, or this one's number is none of theirs.
    """
    ranks = args.tp_size * args.pp_size
    if ranks % args.nnodes:
        raise ConfigError(
            f"--nnodes {args.nnodes} must divide the {ranks} ranks of --tp-size {args.tp_size} and --pp-size "
            f"{args.pp_size}."
        )
    if max(args.nnodes, args.pp_size) % min(args.nnodes, args.pp_size):
        raise ConfigError(
            f"--nnodes {args.nnodes} leaves ranks of --pp-size {args.pp_size} and --tp-size {args.tp_size} without a "
            "machine: give as many whole stages to each machine, or as many ranks of one stage."
        )
    if args.nnodes > 1 and args.dist_init_addr is None:
        raise ConfigError(f"--nnodes {args.nnodes} needs --dist-init-addr HOST:PORT, the same on each machine.")
    if args.node_rank >= args.nnodes:
        raise ConfigError(
            f"--node-rank {args.node_rank} is none of --nnodes {args.nnodes}: they are numbered from zero. Give "
            "--nnodes, or leave out --node-rank."
        )


def _check_data_parallel(args: K3ServerArgs) -> None:
    if args.dp_size > 1 and not args.enable_dp_attention:
        raise ConfigError(f"--dp-size {args.dp_size} needs --enable-dp-attention with K3, or one server per replica.")
    if args.enable_dp_attention and args.dp_size != args.tp_size:
        raise ConfigError(
            f"--enable-dp-attention splits requests over all ranks of K3: give --dp-size {args.tp_size}, "
            f"as --tp-size, instead of {args.dp_size}."
        )
    if args.enable_dp_attention and args.pp_size > 1:
        raise ConfigError("--enable-dp-attention has not been tested with --pp-size. Leave one of them out.")


def check_splits(config: K3Config, *, tp_size: int, ep_size: int, dp_size: int) -> None:
    """Whether every width of a model divides over the ranks.

    Raises:
        ConfigError: names the size, the number of ranks, and a number that works.
    """
    if tp_size % ep_size:
        raise ConfigError(
            f"--ep-size {ep_size} must divide --tp-size {tp_size}: experts are split over the same ranks."
        )
    moe_tp, attn_tp = tp_size // ep_size, tp_size // dp_size
    sizes = (
        ("linear_attn_config.num_heads", config.kda.num_heads, attn_tp, "--tp-size", 1),
        ("num_attention_heads", config.mla.num_heads, attn_tp, "--tp-size", 1),
        ("intermediate_size", config.intermediate_size, tp_size, "--tp-size", 1),
        ("shared expert width", config.moe.shared_intermediate_size, tp_size, "--tp-size", 1),
        ("num_experts", config.moe.num_experts, ep_size, "--ep-size", 1),
        (
            "moe_intermediate_size",
            config.moe.intermediate_size,
            moe_tp,
            "--tp-size over --ep-size",
            MXFP4_GROUP_SIZE if config.mxfp4_experts else 1,
        ),
    )
    for name, size, ranks, flag, unit in sizes:
        if size % (ranks * unit):
            works = max(n for n in range(1, ranks + 1) if size % (n * unit) == 0)
            of_unit = f" in parts of {unit}" if unit > 1 else ""
            raise ConfigError(f"{flag} gives {ranks} ranks, but {name} = {size} divides{of_unit} over {works} at most.")


def check_stages(num_layers: int, pp_size: int) -> None:
    """Whether every pipeline stage gets a layer, by the host's rule or by ``SGLANG_PP_LAYER_PARTITION``.

    Raises:
        ConfigError: says what is wrong, and what works.
    """
    if pp_size > num_layers:
        raise ConfigError(f"--pp-size {pp_size} is more than the model's {num_layers} layers. Use fewer stages.")
    remedy = f"Name {pp_size} numbers of layers that add up to {num_layers}, or unset it."
    try:
        sizes = [end - first for first, end in (get_pp_indices(num_layers, rank, pp_size) for rank in range(pp_size))]
    except ValueError as error:
        raise ConfigError(f"SGLANG_PP_LAYER_PARTITION does not fit --pp-size {pp_size}: {error} {remedy}") from None
    if min(sizes) < 1:
        raise ConfigError(f"SGLANG_PP_LAYER_PARTITION leaves a stage without a layer: {sizes}. {remedy}")


def _overrides(args: K3ServerArgs) -> dict[str, Any]:
    return _json_object(args, "json_model_override_args")


def _json_object(args: K3ServerArgs, field: str) -> dict[str, Any]:
    """The value of a flag that takes JSON.

    Raises:
        ConfigError: it is none, or no object.
    """
    text, why = getattr(args, field), ""
    try:
        value = json.loads(text)
    except (json.JSONDecodeError, TypeError) as error:
        value, why = None, f" ({error})"
    if not isinstance(value, dict):
        flag = f"--{field.replace('_', '-')} {text}"
        raise ConfigError(f"{flag} is not a JSON object{why}. Quote it for the shell, as '{{\"key\": 1}}'.")
    return value


def _device_of_this_machine() -> str:
    try:
        return get_device()
    except RuntimeError:  # the host's way of saying that there is no accelerator
        return "cpu"


def _config_dtype(args: K3ServerArgs) -> str:
    """The run dtype that ``config.json`` names, or the host's choice where it is not here yet."""
    folder = config_folder(args.model_path, args.revision)
    if folder is None:
        return "auto"
    config = with_overrides(read_config(folder), _overrides(args))
    for values in (config, config["text_config"]):
        name = values.get("dtype") or values.get("torch_dtype")
        if name:
            return str(name).removeprefix("torch.")
    return "bfloat16"


def _fit_grid(args: K3ServerArgs) -> None:
    """States are kept at multiples of the grid; the interval between them while decoding must be one."""
    page = args.page_size
    assert page is not None
    if page < 1 or max(page, STATE_CHUNK) % min(page, STATE_CHUNK):
        raise ConfigError(
            f"--page-size {page} must divide {STATE_CHUNK} or be a multiple of it: states are kept at pages."
        )
    _check_chunk(args)
    grid = max(page, STATE_CHUNK)
    if args.mamba_track_interval == _default(args, "mamba_track_interval"):
        args.mamba_track_interval = _round_up(TRACK_INTERVAL, grid)
    elif args.mamba_track_interval < 1 or args.mamba_track_interval % grid:
        raise ConfigError(
            f"--mamba-track-interval {args.mamba_track_interval} is not a multiple of {grid}, the grid on which states "
            f"are kept: use {max(1, round(args.mamba_track_interval / grid)) * grid}."
        )
    # The host schedules pipeline stages without overlap.
    overlaps = not args.disable_overlap_schedule and args.pp_size == 1
    if args.mamba_radix_cache_strategy == "extra_buffer_lazy" and not overlaps:
        raise ConfigError(
            "--mamba-radix-cache-strategy extra_buffer_lazy needs the overlap schedule, which "
            "--disable-overlap-schedule and --pp-size above 1 switch off: use extra_buffer, which then takes as little."
        )
    if args.mamba_radix_cache_strategy == "no_buffer" and (overlaps or page > 1):
        raise ConfigError(
            "--mamba-radix-cache-strategy no_buffer needs --disable-overlap-schedule and --page-size 1. "
            "Give both, or leave the strategy out."
        )


def _check_chunk(args: K3ServerArgs) -> None:
    """Each data-parallel rank gets its part of a chunk, in whole pages.

    Raises:
        ConfigError: names the chunk that the user gave and the next one that works.
    """
    chunk, of = args.chunked_prefill_size, f"--page-size {args.page_size}"
    if args.dp_size > 1:
        of += f" on each of {args.dp_size} data-parallel ranks"
    works = _round_up(chunk or 0, args.page_size * args.dp_size)
    if chunk is not None and 0 < chunk < works:
        raise ConfigError(f"--chunked-prefill-size {chunk} is not a multiple of {of}: use {works}.")


def _check_context(args: K3ServerArgs, config: K3Config) -> None:
    """A request has room in what the model was trained on, and is given no more of it than there is.

    Raises:
        ConfigError: says how long a context may be.
    """
    longest = config.max_position_embeddings
    if longest < LEAST_TOKENS:
        raise ConfigError(
            f"text_config.max_position_embeddings = {longest} leaves no room for a request: {LEAST_TOKENS} tokens are "
            "needed. Correct config.json or --json-model-override-args."
        )
    if (args.context_length or 0) > longest and not envs.SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN.get():
        raise ConfigError(
            f"--context-length {args.context_length} is longer than the model's {longest} (max_position_embeddings). "
            f"Give {longest} or less."
        )


def _choose_prefix_cache(args: K3ServerArgs) -> None:
    """K3's own, unless there is to be none, or something is asked for that only the host's tree has.

    Raises:
        ConfigError: both are asked for, or the pool of states is too small for one request.
    """
    if args.disable_radix_cache:
        if args.radix_cache_backend is not None:
            raise ConfigError(
                f"--disable-radix-cache and --radix-cache-backend {args.radix_cache_backend} contradict each other: "
                "leave out one of the two."
            )
        _refuse_options_without_cache(args, "--disable-radix-cache")
        return
    of_the_host = {
        f"--mamba-radix-cache-strategy {args.mamba_radix_cache_strategy}": args.mamba_radix_cache_strategy != "auto",
        f"--radix-eviction-policy {args.radix_eviction_policy}": args.radix_eviction_policy != "lru",
        f"--kv-events-config {args.kv_events_config}": bool(args.kv_events_config),
        "--enable-session-radix-cache": args.enable_session_radix_cache,
        # It would preempt for a request that then waits for its prefix.
        "--enable-priority-scheduling": args.enable_priority_scheduling and not args.disable_priority_preemption,
    }
    for flag in (flag for flag, is_given in of_the_host.items() if is_given):
        if args.radix_cache_backend is None:
            _refuse_options_without_cache(args, flag)
            return
        raise ConfigError(
            f"{flag} is of the host's prefix cache, --radix-cache-backend {PREFIX_CACHE} is K3's own. "
            "Leave out one of the two."
        )
    args.radix_cache_backend = PREFIX_CACHE


def _refuse_empty_pools(args: K3ServerArgs) -> None:
    """Data-parallel ranks share requests and states evenly, and tokens come in whole pages.

    Raises:
        ConfigError: a pool would be empty on a rank, or hold no prompt; names the flag and the least that works.
    """
    least = {
        "context_length": LEAST_TOKENS,
        "max_running_requests": args.dp_size,
        "max_total_tokens": _least_pool(args.page_size),
        "max_mamba_cache_size": args.dp_size * _least_states(args),
    }
    for field, number in least.items():
        asked = getattr(args, field)
        if asked is not None and asked < number:
            ranks = f" on {args.dp_size} data-parallel ranks" if args.dp_size > 1 else ""
            raise ConfigError(
                f"--{field.replace('_', '-')} {asked} leaves no room for a request{ranks}. Ask for {number} at least, "
                "or leave the flag out."
            )


def _least_pool(page: int) -> int:
    """Tokens of a pool that was seen to answer: of two pages of 64, a request got none, and a third is enough."""
    return _round_up(LEAST_TOKENS, page) + 2 * page


def _least_states(args: K3ServerArgs) -> int:
    """How many states the prefix cache, or the host without one, counts for each running request."""
    if args.radix_cache_backend == PREFIX_CACHE:
        return SLOTS_PER_REQUEST
    if args.disable_radix_cache:
        return 1
    of_the_host = {"no_buffer": 3, "extra_buffer_lazy": 4}
    return of_the_host.get(args.mamba_radix_cache_strategy, 4 if args.disable_overlap_schedule else 5)


def _refuse_options_without_cache(args: K3ServerArgs, excluded_by: str) -> None:
    """What needs K3's own prefix cache on a server that has another or none.

    Raises:
        ConfigError: names the option and the flag that it does not go with.
    """
    is_capped = args.k3_checkpoints_per_path != _default(args, "k3_checkpoints_per_path")
    given = {
        f"--k3-checkpoint-policy {args.k3_checkpoint_policy}": args.k3_checkpoint_policy is not None,
        f"--k3-checkpoints-per-path {args.k3_checkpoints_per_path}": is_capped,
        # Idle sessions of the host's keep their places among the running requests, until nobody gets one any more.
        "--enable-streaming-session": args.enable_streaming_session,
    }
    for flag in (flag for flag, is_given in given.items() if is_given):
        raise ConfigError(
            f"{flag} needs K3's own prefix cache, which {excluded_by} excludes. Leave out one of the two."
        )


def _default(args: K3ServerArgs, name: str) -> Any:
    return next(field.default for field in dataclasses.fields(args) if field.name == name)


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step


def states_per_request(args: K3ServerArgs) -> int:
    return SLOTS_PER_REQUEST if args.radix_cache_backend == PREFIX_CACHE else STATES_PER_REQUEST


def _size_cpu_pools(args: K3ServerArgs, config: K3Config) -> None:
    """Pools for a machine without an accelerator, bounded in bytes whatever the model's size."""
    kda, mla = config.kda, config.mla
    if args.max_running_requests is None:
        args.max_running_requests = CPU_RUNNING_REQUESTS
    if args.max_mamba_cache_size is None:
        conv = 3 * kda.width * (kda.short_conv_kernel_size - 1)
        state_bytes = 4 * len(config.kda_layers) * (conv + kda.width * kda.head_dim)
        per_request = states_per_request(args)
        wanted = per_request * args.max_running_requests
        args.max_mamba_cache_size = max(per_request, min(wanted, CPU_STATE_BYTES // state_bytes))
    if args.max_total_tokens is None:
        row_bytes = 4 * len(config.full_attention_layers) * mla.latent_dim
        wanted = args.max_running_requests * config.max_position_embeddings
        args.max_total_tokens = max(_least_pool(args.page_size), min(wanted, CPU_KV_BYTES // row_bytes))
    if args.chunked_prefill_size is None:
        args.chunked_prefill_size = _round_up(CPU_CHUNKED_PREFILL_TOKENS, args.page_size * args.dp_size)
