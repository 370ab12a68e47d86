"""The served model gives the log-probs of the bare sequence, whatever was cached, batched or chunked."""

from __future__ import annotations

import pytest
import torch

from sglang_k3 import report
from sglang_k3.mem.cache_report import as_text
from tests.kit.configurations import Configuration, Served
from tests.kit.parity import assert_parity, generate, generate_together, input_logprobs, prompt_ids

LENGTHS = (1, 2, 63, 64, 65, 130, 300)
NEW_TOKENS = 8

CI = [
    Configuration("default"),
    Configuration(
        "odd-paged-chunk-64",
        preset="odd",
        experts="bf16",
        flags=("--page-size", "16", "--chunked-prefill-size", "64"),
        chunk=64,
    ),
]
FULL = [
    Configuration("bf16-chunk-16", dtype="bfloat16", flags=("--chunked-prefill-size", "16"), chunk=16),
    Configuration("deep", preset="deep"),
    Configuration("deep-bf16", preset="deep", dtype="bfloat16", experts="bf16"),
    Configuration(
        "odd-mxfp4-chunk-16", preset="odd", flags=("--page-size", "16", "--chunked-prefill-size", "16"), chunk=16
    ),
    Configuration("odd-bf16", preset="odd", dtype="bfloat16"),
    Configuration(
        "no-overlap", flags=("--disable-overlap-schedule", "--mamba-radix-cache-strategy", "no_buffer"), grid=1
    ),
    Configuration("pp2", flags=("--pp-size", "2")),
    Configuration("pp3-uneven", flags=("--pp-size", "3"), env={"SGLANG_PP_LAYER_PARTITION": "3,4,2"}),
    Configuration(
        "pp2-odd-paged-chunk-64",
        preset="odd",
        flags=("--pp-size", "2", "--page-size", "16", "--chunked-prefill-size", "64"),
        chunk=64,
    ),
    Configuration("tp2-pp2", flags=("--tp-size", "2", "--ep-size", "2", "--pp-size", "2")),
    # Each rank has a cache of its own, and a prompt that comes again goes to the other.
    Configuration(
        "dp2-ep2",
        flags=("--tp-size", "2", "--ep-size", "2", "--dp-size", "2", "--enable-dp-attention"),
        grid=0,
    ),
    Configuration(
        "dp2-odd-head-chunk-64",
        preset="odd",
        experts="bf16",
        flags=(
            *("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention", "--enable-dp-lm-head"),
            *("--page-size", "16", "--chunked-prefill-size", "128"),  # the host divides the chunk by the ranks
        ),
        grid=0,
    ),
    Configuration("tp2-ep2", flags=("--tp-size", "2", "--ep-size", "2")),
    Configuration("tp2-bf16-experts", experts="bf16", flags=("--tp-size", "2")),
    Configuration("page-64", flags=("--page-size", "64", "--chunked-prefill-size", "128"), chunk=128),
    Configuration("host-tree", flags=("--mamba-radix-cache-strategy", "extra_buffer"), is_host_tree=True),
    Configuration("host-tree-lazy", flags=("--mamba-radix-cache-strategy", "extra_buffer_lazy"), is_host_tree=True),
    Configuration(
        "no-radix", flags=("--disable-radix-cache",), grid=0, says="mla_decode runs as reference (flashmla: "
    ),
    Configuration("chunk-64", flags=("--chunked-prefill-size", "64"), chunk=64),
    Configuration("chunk-16", flags=("--chunked-prefill-size", "16"), chunk=16),
]
# Pools of a size that suits a tiny model: the host would take nearly all memory of the device.
SMALL_POOLS = ("--max-total-tokens", "32768", "--max-running-requests", "16", "--max-mamba-cache-size", "80")
HOST_TREE = ("--mamba-radix-cache-strategy", "extra_buffer")
EAGER = ("--cuda-graph-backend-decode", "disabled")
HEADS = {"preset": "gpu", "dtype": "bfloat16"}
MANY_HEADS = {"preset": "gpu-96-heads", "dtype": "bfloat16", "says": "mla_decode runs as flashmla"}
GPU = [
    Configuration("gpu", flags=SMALL_POOLS),
    Configuration("gpu-host-tree", flags=(*SMALL_POOLS, *HOST_TREE), is_host_tree=True),
    Configuration(
        "gpu-odd-bf16", preset="odd", dtype="bfloat16", flags=(*SMALL_POOLS, "--chunked-prefill-size", "64"), chunk=64
    ),
    Configuration("heads", **HEADS, flags=SMALL_POOLS),
    Configuration("96-heads", **MANY_HEADS, flags=SMALL_POOLS),
    Configuration("heads-host-tree", **HEADS, flags=(*SMALL_POOLS, *HOST_TREE), is_host_tree=True),
    Configuration("heads-eager", **HEADS, flags=(*SMALL_POOLS, *EAGER, "--chunked-prefill-size", "128"), chunk=128),
]
TWO_RANKS = (*SMALL_POOLS, "--tp-size", "2")
NCCL_EAGER = ("--disable-custom-all-reduce", *EAGER)
TWO_GPUS = [
    Configuration("tp2-nccl", flags=(*TWO_RANKS, "--ep-size", "2", *NCCL_EAGER)),
    Configuration("tp2-bf16", dtype="bfloat16", experts="bf16", flags=TWO_RANKS),
    Configuration("tp2-heads", **HEADS, flags=TWO_RANKS),
    Configuration("tp2-heads-eager-nccl", **HEADS, flags=(*TWO_RANKS, *NCCL_EAGER)),
    Configuration(
        "dp2-96-heads",
        **MANY_HEADS,
        flags=(*TWO_RANKS, "--ep-size", "2", "--dp-size", "2", "--enable-dp-attention"),
        grid=0,
    ),
]
pytestmark = [
    pytest.mark.server,
    pytest.mark.covers("flush"),
    pytest.mark.parametrize(
        "served",
        [
            *(pytest.param(c, id=c.name) for c in CI),
            *(pytest.param(c, id=c.name, marks=pytest.mark.full) for c in FULL),
            *(pytest.param(c, id=c.name, marks=pytest.mark.gpu) for c in GPU),
            *(pytest.param(c, id=c.name, marks=pytest.mark.multigpu) for c in TWO_GPUS),
        ],
        indirect=True,
    ),
]


def ask(served: Served, prompt: list[int], num_tokens: int = NEW_TOKENS) -> int:
    """Check one answer; returns the tokens that came from the cache."""
    answer = generate(served.server, prompt, num_tokens, served.oracle.vocab_size)
    assert len(answer.tokens) == num_tokens
    assert_parity(answer, served.oracle, served.configuration.tolerance)
    return answer.cached_tokens


def random_prompt(served: Served, length: int, seed: int) -> list[int]:
    return prompt_ids(length, seed=seed, vocab_size=served.oracle.vocab_size)


def flush(served: Served) -> None:
    served.server.post_text("/flush_cache?timeout=30", {})


@pytest.mark.parametrize("length", LENGTHS)
def test_a_prompt_cold_and_warm(served: Served, length: int) -> None:
    flush(served)
    prompt = random_prompt(served, length, seed=length)
    assert ask(served, prompt) == 0
    cached = ask(served, prompt)
    if served.configuration.grid == 64:
        assert cached == (length - 1) // 64 * 64


def test_every_position_of_a_prompt(served: Served) -> None:
    flush(served)
    prompt = random_prompt(served, 130, seed=7)
    expected = torch.stack([served.oracle.after(prompt[:n])[prompt[n]] for n in range(1, len(prompt))])
    error = (input_logprobs(served.server, prompt) - expected).abs()
    assert error.max() <= served.configuration.tolerance.max_error


def test_a_branch_in_the_middle_is_reused_from_the_second_time_on(served: Served) -> None:
    flush(served)
    grid = served.configuration.grid
    trunk = random_prompt(served, 200, seed=1)
    branches = [trunk + random_prompt(served, 60, seed=seed) for seed in (2, 3, 4)]
    cached = [ask(served, branch) for branch in branches]
    fork = len(trunk) // 64 * 64
    if grid == 64 and served.configuration.chunk <= 64:
        # Each chunk of the first has left a state.
        assert cached == [0, fork, fork]
    elif grid == 64:
        # The second request replays up to the fork and leaves a state there; the third starts from it.
        assert cached == [0, 128 if served.configuration.chunk == 128 else 0, fork]


def test_an_aligned_prompt_is_reused_up_to_the_boundary_before_and_continued_from_its_end(served: Served) -> None:
    flush(served)
    prompt = random_prompt(served, 192, seed=11)
    cached = [ask(served, prompt), ask(served, prompt), ask(served, [*prompt, 1])]
    if served.configuration.is_k3_tree:
        assert cached == [0, 128, 192]


@pytest.mark.parametrize("count", [2, 8])
def test_identical_prompts_that_arrive_together_are_computed_once(served: Served, count: int) -> None:
    """The others wait for the state of the first, and compute what lies behind it."""
    flush(served)
    prompt = random_prompt(served, 8 * 64 + 37, seed=12 + count)
    answers = generate_together(served.server, [prompt] * count, 2, served.oracle.vocab_size)
    for answer in answers:
        assert_parity(answer, served.oracle, served.configuration.tolerance)
    if served.configuration.is_k3_tree:
        assert sorted(answer.cached_tokens for answer in answers) == [0] + [512] * (count - 1)
        assert sum(len(prompt) - answer.cached_tokens for answer in answers) <= 2 * len(prompt)


@pytest.mark.covers("salt")
def test_salted_prompts_share_nothing(served: Served) -> None:
    flush(served)
    prompt = random_prompt(served, 130, seed=13)
    bodies = [
        {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1, "temperature": 0}, "extra_key": salt}
        for salt in ("a", "b", "a")
    ]
    cached = [served.server.post_json("/generate", body)["meta_info"]["cached_tokens"] for body in bodies]
    if served.configuration.is_k3_tree:
        assert cached == [0, 0, 128]


def test_an_earlier_answer_is_continued(served: Served) -> None:
    flush(served)
    prompt = random_prompt(served, 100, seed=5)
    first = generate(served.server, prompt, 40, served.oracle.vocab_size)
    assert_parity(first, served.oracle, served.configuration.tolerance)
    cached = ask(served, prompt + first.tokens + random_prompt(served, 33, seed=6))
    if served.configuration.grid == 64:
        assert cached == 64


def test_a_batch_of_mixed_lengths_equals_one_by_one(served: Served) -> None:
    flush(served)
    prompts = [random_prompt(served, length, seed=50 + length) for length in (1, 17, 64, 90, 3, 129)]
    for answer in generate_together(served.server, prompts, NEW_TOKENS, served.oracle.vocab_size):
        assert_parity(answer, served.oracle, served.configuration.tolerance)


def test_decoding_across_a_track_boundary(served: Served) -> None:
    """A state is kept in the middle of an answer, and the next turn starts from it."""
    flush(served)
    prompt = random_prompt(served, 240, seed=8)
    first = generate(served.server, prompt, 24, served.oracle.vocab_size)
    assert_parity(first, served.oracle, served.configuration.tolerance)
    cached = ask(served, prompt + first.tokens + [1, 2, 3])
    if served.configuration.grid == 64:
        assert cached == 256


def test_the_cache_of_each_rank_describes_itself_or_says_that_it_is_the_host_s(served: Served) -> None:
    flags = served.configuration.flags
    if served.configuration.is_host_tree or "--disable-radix-cache" in flags or "no_buffer" in flags:
        with pytest.raises(ValueError, match=r"answers 409: this server's prefix cache is the host's"):
            report.fetch(served.server.url, None)
        return
    ask(served, random_prompt(served, 130, seed=9))
    ranks = report.fetch(served.server.url, None)
    assert [rank["dp_rank"] for rank in ranks] == [*range(2 if "--dp-size" in flags else 1)]
    assert sum(rank["counts"]["planted"] for rank in ranks) > 0
    assert all("state slots" in as_text(rank) for rank in ranks)
