"""A mistake of the user ends the start before any child process, in words that say what to do."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_k3.errors import CheckpointError, K3Error
from sglang_k3.integration.defaults import CPU_KV_BYTES, settle_chunk
from sglang_k3.integration.graphs import set_graph_defaults
from sglang_k3.integration.refusals import REFUSALS
from sglang_k3.testing.presets import PRESETS
from tests.kit.llama import write_llama
from tests.kit.start import edit_tensor, start

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("plugin")]
MILLION = 1_048_576
DP2 = {"tp_size": 2, "ep_size": 2, "dp_size": 2, "enable_dp_attention": True}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"attention_backend": "triton"}, "--attention-backend triton does not work with K3.*k3_mla is used"),
        ({"quantization": "fp8"}, "--quantization fp8 does not work with K3.*Leave the flag out"),
        ({"enable_multimodal": True}, "--enable-multimodal does not.*text only"),
        ({"enable_mixed_chunk": True}, "--enable-mixed-chunk does not.*state snapshots"),
        ({"speculative_algorithm": "NGRAM"}, "--speculative-algorithm NGRAM.*rolled back"),
        ({"tokenizer_worker_num": 2}, "--tokenizer-worker-num 2.*without loading plugins"),
        ({"dp_size": 2}, "--dp-size 2 needs --enable-dp-attention"),
        ({"tp_size": 2, "ep_size": 2, "enable_dp_attention": True}, "give --dp-size 2, as --tp-size, instead of 1"),
        pytest.param(
            {"tp_size": 2, "ep_size": 2, "dp_size": 2, "enable_dp_attention": True, "pp_size": 2},
            "--enable-dp-attention has not been tested with --pp-size",
            marks=pytest.mark.refuses("dp", "pp"),
        ),
        ({"kv_cache_dtype": "fp8_e4m3"}, "--kv-cache-dtype fp8_e4m3.*not quantised"),
        ({"mamba_track_interval": 100}, "--mamba-track-interval 100 is not a multiple of 64.*use 128"),
        ({"page_size": 24}, "--page-size 24 must divide 64"),
        ({"mamba_radix_cache_strategy": "no_buffer"}, "no_buffer needs --disable-overlap-schedule"),
        (
            {"mamba_radix_cache_strategy": "extra_buffer_lazy", "pp_size": 2},
            "extra_buffer_lazy needs the overlap schedule.*use extra_buffer",
        ),
        ({"pp_size": 10}, "--pp-size 10 is more than the model's 9 layers"),
        ({"tp_size": 3}, "--tp-size gives 3 ranks, but .*num_heads = 4 divides over 2 at most"),
        ({"tp_size": 2}, "moe_intermediate_size = 32 divides in parts of 32 over 1 at most"),
        ({"tp_size": 2, "ep_size": 4}, "--ep-size 4 must divide --tp-size 2"),
        ({"json_model_override_args": '{"rms_norm_eps": 1}'}, "no rms_norm_eps at the top.*under text_config"),
        ({"json_model_override_args": '{"text_config": {"hidden_size": 65}}'}, "does not fit its config.json"),
        ({"k3_checkpoints_per_path": 0}, "--k3-checkpoints-per-path 0 keeps no state to restore. Give at least 1"),
        ({"k3_checkpoints_per_path": -2}, "--k3-checkpoints-per-path -2 keeps no state"),
        ({"k3_checkpoint_policy": "lfu"}, "--k3-checkpoint-policy 'lfu' is not one of replay-cost, lru"),
        (
            {"k3_checkpoint_policy": "replay-cost", "disable_radix_cache": True},
            "--k3-checkpoint-policy replay-cost needs K3's own prefix cache, which --disable-radix-cache excludes",
        ),
        (
            {"k3_checkpoint_policy": "lru", "mamba_radix_cache_strategy": "extra_buffer"},
            "--k3-checkpoint-policy lru .* --mamba-radix-cache-strategy extra_buffer excludes. Leave out one of the",
        ),
        (
            {"k3_checkpoints_per_path": 4, "radix_eviction_policy": "lfu"},
            "--k3-checkpoints-per-path 4 .* --radix-eviction-policy lfu excludes",
        ),
        (
            {"enable_streaming_session": True, "disable_radix_cache": True},
            "--enable-streaming-session needs K3's own prefix cache, which --disable-radix-cache excludes",
        ),
        pytest.param(
            {"enable_streaming_session": True, "enable_priority_scheduling": True},
            "--enable-streaming-session needs K3's own prefix cache, which --enable-priority-scheduling excludes",
            marks=pytest.mark.refuses("host", "session"),
        ),
        ({"page_size": 64, "chunked_prefill_size": 100}, "--chunked-prefill-size 100 is not.* --page-size 64: use 128"),
        ({"page_size": 4096, "chunked_prefill_size": 2048}, "--chunked-prefill-size 2048 is not.*4096: use 4096"),
        ({"max_mamba_cache_size": 3}, "--max-mamba-cache-size 3 leaves no room for a request. Ask for 4 at least"),
        (
            {"max_mamba_cache_size": 7, "tp_size": 2, "ep_size": 2, "dp_size": 2, "enable_dp_attention": True},
            "--max-mamba-cache-size 7 leaves no room for a request on 2 data-parallel ranks. Ask for 8 at least",
        ),
        (
            {"max_running_requests": 1, "tp_size": 2, "ep_size": 2, "dp_size": 2, "enable_dp_attention": True},
            "--max-running-requests 1 leaves no room .*Ask for 2 at least",
        ),
        ({"max_running_requests": 0}, "--max-running-requests 0 leaves no room .*Ask for 1 at least, or leave"),
        ({"max_total_tokens": 65}, "--max-total-tokens 65 leaves no room .*Ask for 66 at least"),
        ({"max_mamba_cache_size": 0, "disable_radix_cache": True}, "--max-mamba-cache-size 0 .*Ask for 1 at least"),
        pytest.param(
            {"max_mamba_cache_size": 4, "mamba_radix_cache_strategy": "extra_buffer"},
            "--max-mamba-cache-size 4 leaves no room .*Ask for 5 at least",
            marks=pytest.mark.refuses("host"),
        ),
        ({"max_total_tokens": 128, "page_size": 64}, "--max-total-tokens 128 leaves no room .*Ask for 192 at least"),
        (
            {"cuda_graph_max_bs_decode": 0},
            "--cuda-graph-max-bs-decode 0 .*of 1 request or more.*decode disabled",
        ),
        ({"cuda_graph_bs_decode": [4, 0]}, r"--cuda-graph-bs-decode \[4, 0\] .*of 1 request or more"),
        ({"context_length": 8193}, "--context-length 8193 is longer than the model's 8192 .*Give 8192 or less"),
        (
            {"json_model_override_args": '{"text_config": {"max_position_embeddings": 32}}'},
            r"text_config\.max_position_embeddings = 32 leaves no room for a request: 64 tokens are needed\. Correct",
        ),
        ({"context_length": 1}, "--context-length 1 leaves no room for a request. Ask for 64 at least, or leave the"),
        *(
            ({field: number}, f"--{field.replace('_', '-')} {number} .*counted from one. Give 1 or more")
            for field in ("tp_size", "pp_size", "ep_size", "dp_size", "nnodes", "gpu_id_step")
            for number in (0, -1)
        ),
        ({"nnodes": 2}, "--nnodes 2 must divide the 1 ranks of --tp-size 1 and --pp-size 1"),
        (
            {"nnodes": 4, "pp_size": 3, "tp_size": 4, "ep_size": 4, "dist_init_addr": "a:1"},
            "--nnodes 4 leaves ranks of --pp-size 3 and --tp-size 4 without a machine: give as many whole stages",
        ),
        (
            {"nnodes": 2, "pp_size": 3, "tp_size": 2, "ep_size": 2, "dist_init_addr": "a:1"},
            "--nnodes 2 leaves ranks",
        ),
        ({"nnodes": 4, "pp_size": 2, "tp_size": 3, "dist_init_addr": "a:1"}, "--nnodes 4 must divide the 6 ranks"),
        ({"nnodes": 2, "tp_size": 2, "ep_size": 2}, "--nnodes 2 needs --dist-init-addr HOST:PORT"),
        ({"node_rank": 1}, "--node-rank 1 is none of --nnodes 1.*Give --nnodes, or leave out --node-rank"),
        ({"json_model_override_args": None}, "--json-model-override-args None is not a JSON object"),
        ({"base_gpu_id": -1}, "--base-gpu-id -1 .*numbered from zero. Give 0 or more"),
        ({"mem_fraction_static": 1.5}, "--mem-fraction-static 1.5 .*Give a number between 0 and 1, or leave it out"),
        *(
            ({field: text}, rf"--{field.replace('_', '-')} .* is not a JSON object.*Quote it for the shell, as '{{")
            for field in ("json_model_override_args", "model_loader_extra_config")
            for text in ("{key: 1}", "[1]", "")
        ),
        ({"grammar_backend": "llguidance"}, "--grammar-backend llguidance .*Use xgrammar, or none on a server"),
        ({"grammar_backend": "outlines"}, "--grammar-backend outlines does not work with K3"),
        (
            {"radix_cache_backend": "flexkv"},
            "--radix-cache-backend flexkv does not work.*Use k3, or leave",
        ),
        (
            {"radix_cache_backend": "k3", "radix_eviction_policy": "lfu"},
            "--radix-eviction-policy lfu is of the host's prefix cache",
        ),
        pytest.param(
            {"radix_cache_backend": "k3", "mamba_radix_cache_strategy": "extra_buffer"},
            "--mamba-radix-cache-strategy extra_buffer is of the host's prefix cache.*Leave out one of the two",
            marks=pytest.mark.refuses("k3", "host"),
        ),
        (
            {"radix_cache_backend": "k3", "enable_session_radix_cache": True, "radix_eviction_policy": "lru"},
            "--enable-session-radix-cache is of the host's prefix cache",
        ),
        (
            {"radix_cache_backend": "k3", "enable_priority_scheduling": True},
            "--enable-priority-scheduling is of the host's prefix cache",
        ),
        ({"radix_cache_backend": "k3", "disable_radix_cache": True}, "contradict each other: leave out one"),
        ({"strip_thinking_cache": True}, "--strip-thinking-cache.*the host frees KV behind the prompt"),
        ({"cuda_graph_max_bs_decode": 8}, "--cuda-graph-max-bs-decode 8 needs a GPU"),
        ({"cuda_graph_bs_decode": [1, 2]}, "--cuda-graph-bs-decode 1 2 needs a GPU"),
        ({"cuda_graph_backend_prefill": "full"}, "--cuda-graph-backend-prefill full.*prompts are not captured"),
        ({"cuda_graph_backend_decode": "breakable"}, "--cuda-graph-backend-decode breakable.*captured whole or not"),
        ({"k3_latent_norm_eps": "1e-5"}, "--k3-latent-norm-eps '1e-5' is not one of reference, config"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_flag_that_cannot_be_met_is_refused(checkpoint: Path, arguments: dict[str, object], says: str) -> None:
    with pytest.raises(K3Error, match=says):
        start(checkpoint, device="cpu", **arguments)


@pytest.mark.parametrize(
    ("partition", "says"),
    [
        ("4,3,2", "does not fit --pp-size 2.*Name 2 numbers of layers that add up to 9, or unset it"),
        ("4,4", "does not fit --pp-size 2.*add up to 9"),
        ("four,5", "does not fit --pp-size 2.*add up to 9"),
        ("9,0", r"a stage without a layer: \[9, 0\]"),
    ],
)
def test_stages_that_do_not_make_the_model_are_refused(
    checkpoint: Path, partition: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_PP_LAYER_PARTITION", partition)
    with pytest.raises(K3Error, match=says):
        start(checkpoint, device="cpu", pp_size=2)


def test_tied_embeddings_are_a_head_that_each_rank_has_whole(checkpoint: Path) -> None:
    edit_tensor(checkpoint, "lm_head.weight", lambda tensors, name: tensors.pop(name))
    ranks = {"tp_size": 2, "ep_size": 2, "dp_size": 2, "enable_dp_attention": True}
    tied = '{"text_config": {"tie_word_embeddings": true}}'
    with pytest.raises(K3Error, match="tied ones are the head too: give --enable-dp-lm-head"):
        start(checkpoint, device="cpu", json_model_override_args=tied, **ranks)
    start(checkpoint, device="cpu", json_model_override_args=tied, enable_dp_lm_head=True, **ranks)


@pytest.mark.parametrize(
    ("arguments", "tokens"),
    [
        ({"page_size": MILLION}, MILLION),
        ({"chunked_prefill_size": MILLION}, MILLION),
        ({"chunked_prefill_size": -1}, 16384),
        ({"chunked_prefill_size": MILLION, **DP2}, MILLION),
    ],
)
def test_a_step_that_takes_all_memory_is_refused(
    checkpoint: Path, arguments: dict[str, object], tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang.srt.server_args.get_device_memory_capacity", lambda device: 16 * 1024)
    with pytest.raises(
        K3Error, match=f"for steps of {tokens} tokens .* is more than the memory .*--mem-fraction-static"
    ):
        start(checkpoint, device="cpu", **arguments)
    start(checkpoint, device="cpu", mem_fraction_static=0.5, **arguments)


@pytest.mark.parametrize(
    ("page", "refused", "works"), [(1, 1, 2), (64, 64, 128), (64, 192, 256), (4096, 4096, 8192), (4096, None, 8192)]
)
def test_data_parallel_ranks_share_a_chunk_in_whole_pages(
    checkpoint: Path, page: int, refused: int | None, works: int
) -> None:
    if refused is not None:
        says = rf"size {refused} .*--page-size {page} on each of 2 data-parallel ranks: use {works}\."
        with pytest.raises(K3Error, match=says):
            start(checkpoint, device="cpu", page_size=page, chunked_prefill_size=refused, **DP2)
    given = {} if refused is None else {"chunked_prefill_size": works}
    args = start(checkpoint, device="cpu", page_size=page, **DP2, **given)
    assert args.chunked_prefill_size == works // 2


@pytest.mark.parametrize(
    ("chosen", "page", "settled"), [(1365, 64, 1344), (8192, 64, 8192), (8192, 16384, 16384), (-1, 64, -1)]
)
def test_a_chunk_that_the_host_chose_is_settled_in_whole_pages(chosen: int, page: int, settled: int) -> None:
    args = SimpleNamespace(chunked_prefill_size=chosen, page_size=page, mem_fraction_static=0.9)
    settle_chunk(args)
    assert args.chunked_prefill_size == settled


def test_what_the_host_refuses_is_one_line_too(checkpoint: Path) -> None:
    with pytest.raises(K3Error, match="SGLang refuses these arguments: --mamba-cache-philox-rounds must be non-neg"):
        start(checkpoint, device="cpu", mamba_cache_philox_rounds=-1)


def test_a_context_that_the_host_was_told_to_allow_is_allowed(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "1")
    assert start(checkpoint, device="cpu", context_length=8193).get_model_config().context_len == 8193


def test_what_this_package_refuses_meanwhile_keeps_its_own_words(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang_k3.integration.server_args import K3ServerArgs

    def refuse(_: object) -> None:
        raise CheckpointError("a tensor is missing")

    monkeypatch.setattr(K3ServerArgs.__bases__[0], "__post_init__", refuse)
    with pytest.raises(CheckpointError, match="^a tensor is missing$"):
        start(checkpoint, device="cpu")


def test_an_unknown_kind_of_kernels_is_refused(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3PLUGIN_KERNELS", "fast")
    with pytest.raises(K3Error, match="K3PLUGIN_KERNELS='fast' is not one of auto, triton, reference"):
        start(checkpoint, device="cpu")


def graph_arguments(**given: object) -> SimpleNamespace:
    fields = dict.fromkeys(("cuda_graph_backend_decode", "cuda_graph_max_bs_decode", "cuda_graph_bs_decode"))
    return SimpleNamespace(**{**fields, "max_running_requests": None, "dp_size": 1, **given})


@pytest.mark.parametrize(
    ("given", "largest"),
    [
        ({}, 256),
        ({"max_running_requests": 16}, 16),
        ({"max_running_requests": 16, "dp_size": 2}, 8),
        ({"max_running_requests": 1000}, 256),
        ({"cuda_graph_max_bs_decode": 4, "max_running_requests": 16}, 4),
        ({"cuda_graph_max_bs_decode": 512}, 512),
    ],
)
def test_graphs_up_to_the_requests_that_run_at_once(given: dict[str, object], largest: int) -> None:
    args = graph_arguments(**given)
    set_graph_defaults(args, on_cpu=False)
    assert args.cuda_graph_max_bs_decode == largest
    assert args.disable_prefill_cuda_graph is True


@pytest.mark.parametrize("asked", [{"cuda_graph_max_bs_decode": 17}, {"cuda_graph_bs_decode": [1, 17, 4]}])
def test_a_graph_larger_than_the_pool_is_refused(asked: dict[str, object]) -> None:
    with pytest.raises(K3Error, match=r"graphs of 17 requests, but --max-running-requests .*16 at once. Ask for 16"):
        set_graph_defaults(graph_arguments(max_running_requests=16, **asked), on_cpu=False)


def test_every_refusal_names_a_field_whose_default_works() -> None:
    from sglang.srt.server_args import ServerArgs

    defaults = {field.name: field.default for field in dataclasses.fields(ServerArgs)}
    for refusal in REFUSALS:
        assert refusal.works(defaults[refusal.field]), refusal.field
        assert refusal.why and refusal.remedy


def test_an_override_reaches_the_model(checkpoint: Path) -> None:
    from sglang_k3.integration.server_args import K3ServerArgs

    args = K3ServerArgs(
        model_path=str(checkpoint), json_model_override_args='{"text_config": {"rms_norm_eps": 0.5}}', device="cpu"
    )
    assert args.get_model_config().hf_config.k3.rms_norm_eps == 0.5
    assert args.get_model_config().hf_config.k3.hidden_size == 64


def test_a_large_page_moves_the_default_interval(checkpoint: Path) -> None:

    assert start(checkpoint, page_size=512, device="cpu").mamba_track_interval == 512


def test_a_chunk_has_whole_pages_unless_told_otherwise(checkpoint: Path) -> None:

    assert start(checkpoint, page_size=4096, device="cpu").chunked_prefill_size == 4096


def test_the_environment_of_one_server_does_not_reach_the_next(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    names = (
        "SGLANG_MAMBA_CONV_DTYPE",
        "SGLANG_EXTERNAL_MODEL_PACKAGE",
        "OMP_NUM_THREADS",
        "SGLANG_CPU_OMP_THREADS_BIND",
    )
    for name in names:
        monkeypatch.delenv(name, raising=False)
    alone = start(checkpoint, device="cpu").mem_fraction_static
    start(checkpoint, device="cpu", dtype="bfloat16", **DP2)
    assert os.environ["SGLANG_MAMBA_CONV_DTYPE"] == "bfloat16"
    after = start(checkpoint, device="cpu")
    assert os.environ["SGLANG_MAMBA_CONV_DTYPE"] == "float32"
    assert after.mem_fraction_static == alone, "the host sizes a server whose cores are bound otherwise"
    start(write_llama(tmp_path / "llama"), device="cpu")
    assert not set(names) & os.environ.keys()


def test_of_the_hosts_models_none_is_imported_for_k3(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    for name in ("SGLANG_DISABLED_MODEL_ARCHS", "SGLANG_EXTERNAL_MODEL_PACKAGE"):
        monkeypatch.delenv(name, raising=False)
    start(checkpoint, device="cpu")
    assert "SGLANG_DISABLED_MODEL_ARCHS" not in os.environ, "another model may be started from here"
    program = """
import sys
from sglang_k3.integration.environment import leave_out_host_models
leave_out_host_models()
from sglang.srt.models.registry import ModelRegistry
print(*ModelRegistry.models)
print(*(name for name in sys.modules if name.startswith("sglang.srt.models.")))
"""
    told = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=True)
    assert told.stdout.splitlines()[-2:] == ["KimiK3ForConditionalGeneration", "sglang.srt.models.registry"]


def test_stages_on_a_cpu_share_the_cores_and_open_no_nccl(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    names = ("OMP_NUM_THREADS", "SGLANG_CPU_OMP_THREADS_BIND", "SGLANG_NCCL_SO_PATH")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(9)))
    start(checkpoint, device="cpu", pp_size=2)
    assert [os.environ.get(name) for name in names] == ["4", None, "/nonexistent"]
    start(checkpoint, device="cpu", tp_size=2, ep_size=2, pp_size=2)
    assert [os.environ.get(name) for name in names] == ["2", "0,1,2,3|4,5,6,7", "/nonexistent"]


def test_no_communicator_is_compiled_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.environ import envs

    from sglang_k3.integration import environment

    monkeypatch.delenv("SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2", raising=False)
    environment.set_for_k3(run_dtype="bfloat16", device="cuda", tp_size=2, pp_size=1)
    assert envs.SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2.get() is False
    environment.clear()
    assert envs.SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2.get() is True


def test_another_model_package_is_refused(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_EXTERNAL_MODEL_PACKAGE", "other.models")
    with pytest.raises(K3Error, match=r"is 'other.models', but .* Unset it"):
        start(checkpoint, device="cpu")


def test_on_the_command_line_it_is_one_line(checkpoint: Path) -> None:
    edit_tensor(checkpoint, "lm_head.weight", lambda tensors, name: tensors.pop(name))
    done = subprocess.run(
        [sys.executable, "-m", "sglang.launch_server", "--model-path", str(checkpoint)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith(
        "sglang-k3: The checkpoint does not fit its config.json: language_model."
    )


def test_the_whole_command_line_of_a_good_start_resolves(checkpoint: Path) -> None:
    """The counterpart: with nothing but a path, everything open is filled in."""

    args = start(checkpoint)
    assert args.is_k3
    assert (args.dtype, args.attention_backend) == ("float32", "k3_mla")
    assert args.max_running_requests and args.max_mamba_cache_size and args.max_total_tokens


def test_a_context_of_a_million_asks_for_bounded_pools(checkpoint: Path) -> None:
    from sglang.srt.configs.model_config import ModelConfig

    override = json.dumps({"text_config": {"max_position_embeddings": MILLION}})
    args = start(checkpoint, device="cpu", json_model_override_args=override)
    assert ModelConfig.from_server_args(args).context_len == MILLION
    sizes = PRESETS["default"]
    row_bytes = 4 * len(sizes.full_attention_layers) * (sizes.kv_lora_rank + sizes.qk_rope_head_dim)
    assert MILLION <= args.max_total_tokens <= CPU_KV_BYTES // row_bytes
    assert 4 * args.max_running_requests * MILLION < 2**30  # the host's table of positions
