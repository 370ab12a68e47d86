"""The ledger: every place where this package touches SGLang, why, and when it can go."""

from __future__ import annotations

import dataclasses
import multiprocessing
import sys
from collections.abc import Callable
from typing import Literal

Scope = Literal["every process", "main process", "scheduler", "scheduler on CPU"]


@dataclasses.dataclass(frozen=True)
class Seam:
    """One touch point.

    Attributes:
        name: what it is called in ``doctor`` and in errors.
        targets: dotted paths of the host that must exist for it to work.
        why: what the host cannot do by itself.
        until: what would make it superfluous.
        scope: in which processes it is installed.
        module: the module of this package that installs it, with the name of its function.
    """

    name: str
    targets: tuple[str, ...]
    why: str
    until: str
    scope: Scope
    module: str
    function: str = "install"

    @property
    def install(self) -> Callable[[], None]:
        from importlib import import_module

        function: Callable[[], None] = getattr(import_module(f"{__package__}.{self.module}"), self.function)
        return function


SEAMS: tuple[Seam, ...] = (
    Seam(
        name="config",
        targets=(
            "sglang.srt.utils.hf_transformers.common._CONFIG_REGISTRY",
            "sglang.srt.configs.linear_attn_model_registry.register_linear_attn_model",
            "sglang.srt.arg_groups.overrides._MAMBA_EXTRA_BUFFER_ARCHS",
            "sglang.srt.configs.model_config.ModelConfig._derive_model_shapes",
            "sglang.srt.utils.hf_transformers.tokenizer._auto_tokenizer_from_pretrained",
        ),
        why="the host does not know the K3 config and tokenizer, nor that it is a hybrid of KDA and MLA",
        until="host registries for tokenizers and MLA shapes, and one that reads support_mamba_cache_extra_buffer",
        scope="every process",
        module="seam_config",
    ),
    Seam(
        name="attention backend",
        targets=(
            "sglang.srt.layers.attention.attention_registry.register_attention_backend",
            "sglang.srt.server_args.add_attention_backend_choices",
        ),
        why="no MLA backend of the host runs without positions on a CPU, or takes strided pools and owner masks",
        until="never: a registration",
        scope="every process",
        module="seam_attention",
    ),
    Seam(
        name="server arguments",
        targets=("sglang.srt.server_args.ServerArgs", "sglang.srt.arg_groups.arg_utils.Arg"),
        why="own flags, model aliases, and defaults that must be set before the host resolves its own",
        until="a host hook for defaults by model that runs before the device is resolved",
        scope="every process",
        module="seam_server",
        function="install_arguments",
    ),
    Seam(
        name="server start",
        targets=(
            "sglang.srt.server_args.prepare_server_args",
            "sglang.srt.entrypoints.engine.Engine._launch_subprocesses",
            "sglang.srt.managers.scheduler.run_scheduler_process",
            "sglang.srt.managers.detokenizer_manager.run_detokenizer_process",
        ),
        why="the host loads plugins too late in its scheduler and never in its detokenizer",
        until="load_plugins first in every child process",
        scope="main process",
        module="seam_server",
        function="install_main",
    ),
    Seam(
        name="chat encoding",
        targets=(
            "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat._resolve_chat_encoding_spec",
            "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat._apply_jinja_template",
            "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat.wrap_reasoning_history",
            "sglang.srt.entrypoints.anthropic.serving.AnthropicServing._convert_to_chat_completion_request",
        ),
        why="XTML is tokenised segment by segment, which a Jinja template cannot express",
        until="a registry of chat encoders",
        scope="main process",
        module="seam_chat",
    ),
    Seam(
        name="parser names",
        targets=(
            "sglang.srt.parser.reasoning_parser.ReasoningParser.DetectorMap",
            "sglang.srt.function_call.function_call_parser.FunctionCallParser.ToolCallParserEnum",
        ),
        why="XTML has channels, which none of the host's formats has",
        until="never: a registration",
        scope="every process",
        module="seam_parsers",
    ),
    Seam(
        name="parsers and constraints",
        targets=(
            "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat._process_messages",
            "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat._get_reasoning_from_request",
            "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat._process_tool_call_id",
            "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat._build_chat_response",
            "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat._process_reasoning_stream",
            "sglang.srt.parser.reasoning_parser.ReasoningParser.__init__",
        ),
        why="the host parses reasoning without knowing of tools, and constrains answers without knowing of channels",
        until="detectors that see the request, and constraints by detector",
        scope="main process",
        module="seam_parsers",
        function="install_main",
    ),
    Seam(
        name="responses",
        targets=(
            "sglang.srt.entrypoints.openai.serving_responses.OpenAIServingResponses.create_responses",
            "sglang.srt.entrypoints.openai.serving_responses.OpenAIServingResponses._generate_with_builtin_tools",
        ),
        why="/v1/responses parses a text without its control tokens, and drops text.format",
        until="special tokens kept there for a parser that reads them, and a field for text.format",
        scope="main process",
        module="seam_responses",
    ),
    Seam(
        name="request limits",
        targets=("sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request",),
        why="one token id outside the vocabulary, or a number that no message can carry, ends the scheduler",
        until="checks of the host where every endpoint passes",
        scope="main process",
        module="seam_requests",
        function="install_main",
    ),
    Seam(
        name="end of a waiting answer",
        targets=("sglang.srt.managers.tokenizer_manager.TokenizerManager._handle_abort_req",),
        why="the host ends the stream of a request that is aborted after a retraction with its last token alone",
        until="outputs there as those of a running request",
        scope="main process",
        module="seam_stream",
        function="install_main",
    ),
    Seam(
        name="sampling",
        targets=(
            "sglang.srt.layers.sampler.Sampler.forward",
            "sglang.srt.managers.scheduler.Scheduler._relay_forward_payload",
            "sglang.srt.managers.schedule_batch.Req.update_finish_state",
            "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.cache_finished_req",
            "sglang.srt.layers.logprob_processor.get_token_ids_logprobs",
            "sglang.srt.sampling.penaltylib.repetition_penalty.apply_scaling_penalties",
        ),
        why="the host dies of a row of NaN, or of one that a grammar leaves empty, and caches prompts before it looks; "
        "it dies of log-probs of token ids beside a request that asks for none; "
        "its first repetition penalty waits half a minute for a compiler",
        until="a check of logits per request",
        scope="scheduler",
        module="seam_requests",
        function="install_scheduler",
    ),
    Seam(
        name="whole-turn grammar",
        targets=(
            "sglang.srt.constrained.base_grammar_backend.create_grammar_backend",
            "sglang.srt.constrained.xgrammar_backend.XGrammarGrammarBackend",
        ),
        why="the host holds a grammar back until one token ends the thinking, ours begins with the thinking; "
        "and it lets a control token stand for the text that it spells",
        until="an end of thinking of several tokens, and control tokens that xgrammar does not read as text",
        scope="scheduler",
        module="seam_parsers",
        function="install_scheduler",
    ),
    Seam(
        name="pools of a stage",
        targets=("sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator._compute_cell_size",),
        why="the host divides by the bytes of a token's rows, which are none in a pipeline stage without an MLA layer",
        until="a check for zero there",
        scope="scheduler",
        module="seam_pools",
    ),
    Seam(
        name="prefix cache",
        targets=("sglang.srt.mem_cache.registry.register_radix_cache_backend",),
        why="the host's tree keeps a state per chunk, takes slots before admission, and evicts without order",
        until="never: a registration",
        scope="every process",
        module="seam_prefix_cache",
    ),
    Seam(
        name="prefix cache in the scheduler",
        targets=(
            "sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req",
            "sglang.srt.managers.scheduler.Scheduler.run_batch",
            "sglang.srt.managers.scheduler.Scheduler.init_metrics_reporter",
            "sglang.srt.model_executor.model_runner.ModelRunner.forward",
            "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._calculate_mamba_ratio",
        ),
        why="a registered cache does not learn when a request is admitted, nor when a forward pass is launched, nor "
        "the labels of its rank's metrics",
        until="calls of the cache at admission and around a launch, and the labels in what it is built from",
        scope="scheduler",
        module="seam_prefix_cache",
        function="install_scheduler",
    ),
    Seam(
        name="cache report",
        targets=("sglang.srt.entrypoints.http_server._setup_and_run_http_server",),
        why="the host has no endpoint that shows a prefix cache",
        until="such an endpoint, or a registry of endpoints",
        scope="main process",
        module="seam_cache_report",
        function="install_main",
    ),
    Seam(
        name="cache report of a rank",
        targets=(
            "sglang.srt.managers.scheduler.Scheduler.get_internal_state",
            "sglang.srt.managers.io_struct.GetInternalStateReq",
        ),
        why="a scheduler tells of its state what the host has put there",
        until="as above",
        scope="scheduler",
        module="seam_cache_report",
        function="install_scheduler",
    ),
    Seam(
        name="open session",
        targets=("sglang.srt.managers.tokenizer_manager.TokenizerManager.open_session",),
        why="data-parallel ranks know only their own turns of a session, and other ranks end it by clocks of their own",
        until="turns that go where the session is, and one clock for all ranks",
        scope="main process",
        module="seam_sessions",
        function="install_main",
    ),
    Seam(
        name="turns of a session",
        targets=(
            "sglang.srt.session.session_controller.Session.create_req",
            "sglang.srt.session.session_controller.SessionReqNode.clear",
            "sglang.srt.managers.scheduler.Scheduler.abort_request",
            "sglang.srt.managers.scheduler.Scheduler._abort_on_waiting_timeout",
            "sglang.srt.managers.scheduler.Scheduler._abort_on_queued_limit",
        ),
        why="the host waits for ever for a turn that is aborted in the queue, takes the end of a refused one for the "
        "end of the one that runs, and dies of replace without a rid",
        until="an end of the turn wherever a request ends, and a copy to iterate over",
        scope="scheduler",
        module="seam_sessions",
        function="install_scheduler",
    ),
    Seam(
        name="depth of snapshots",
        targets=(
            "sglang.srt.managers.scheduler_components.batch_result_processor"
            ".SchedulerBatchResultProcessor._mamba_check_track_boundary",
            "sglang.srt.mem_cache.memory_pool.HybridReqToTokenPool.get_mamba_ping_pong_keep_idx",
        ),
        why="the host takes an older state for the snapshot of a decode step that a prefill follows or precedes",
        until="a check there by the length that the step itself had",
        scope="scheduler",
        module="seam_snapshots",
    ),
    Seam(
        name="begin of an answer",
        targets=("sglang.srt.managers.scheduler_components.output_streamer._GenerationStreamAccumulator.accept",),
        why="the host takes the first log-prob for sent when a request is retracted before its first token, and dies "
        "of the mark of a broken row among log-probs",
        until="a check for tokens there",
        scope="scheduler",
        module="seam_stream",
        function="install_scheduler",
    ),
    Seam(
        name="no compiler",
        targets=(
            "sglang.srt.model_executor.forward_batch_info.clamp_position",
            "sglang.srt.model_executor.forward_batch_info._clamp_position_native",
            "sglang.srt.layers.vocab_parallel_embedding.get_masked_input_and_mask",
            "sglang.srt.layers.sampler.multinomial_with_seed",
        ),
        why="the host's first decode step waits for nvcc, its first step of two ranks for torch.compile",
        until="binaries of these in the host",
        scope="scheduler",
        module="seam_compilers",
    ),
    Seam(
        name="before the capture",
        targets=("sglang.srt.model_executor.model_runner_components.cuda_graph_setup.capture_cuda_graphs",),
        why="Triton compiles one kernel after the other, each when it is first launched; and the host drops graphs of "
        "batches that are too large in silence",
        until="a place of the host for work before the capture",
        scope="scheduler",
        module="seam_capture",
    ),
    Seam(
        name="padding of data-parallel ranks",
        targets=("sglang.srt.layers.dp_attention.DpPaddingMode.get_dp_padding_mode",),
        why="the host pads the ranks to one length, with tokens that belong to no request",
        until="a flag for the padding mode, or ops that take padded batches",
        scope="scheduler",
        module="seam_data_parallel",
    ),
    Seam(
        name="CPU",
        targets=(
            "sglang.srt.utils.common.support_triton",
            "sglang.srt.mem_cache.allocation.get_last_loc",
            "sglang.srt.mem_cache.allocation.get_last_loc_torch",
            "sglang.srt.managers.schedule_batch.set_mamba_track_indices_from_reqs",
            "sglang.srt.configs.update_config.adjust_config_with_unaligned_cpu_tp",
            "sglang.srt.constrained.xgrammar_backend.XGrammarGrammar.apply_vocab_mask",
            "sglang.srt.layers.dp_attention.memcpy_triton",
            "sglang.srt.mem_cache.allocator.paged.alloc_extend_kernel",
            "sglang.srt.mem_cache.allocator.paged.alloc_decode_kernel",
        ),
        why="the host launches Triton kernels and pins memory on a device that has neither",
        until="device checks in those places",
        scope="scheduler on CPU",
        module="seam_cpu",
    ),
)


def install_for_this_process() -> None:
    """Install the seams whose scope holds in this process; a scheduler adds its own."""
    # A program may run the engine in a child process of its own; the host's workers never import the engine.
    is_main = multiprocessing.parent_process() is None or "sglang.srt.entrypoints.engine" in sys.modules
    for seam in SEAMS:
        if seam.scope == "every process" or (seam.scope == "main process" and is_main):
            seam.install()


def install_for_scheduler(*, on_cpu: bool) -> None:
    """Install what only a scheduler process needs."""
    for seam in SEAMS:
        if seam.scope == "scheduler" or (seam.scope == "scheduler on CPU" and on_cpu):
            seam.install()
