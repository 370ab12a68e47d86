"""Pipeline stages in one process: whatever the boundaries, the chain is the whole model, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import PPProxyTensors
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.model_executor.pool_configurator import DefaultPoolConfigurator
from torch import Tensor

from sglang_k3.integration import seam_pools
from sglang_k3.testing.presets import PRESETS
from tests.kit.compare import assert_bitwise
from tests.model.fakes import FakeRunner, Request, hybrid_backend
from tests.model.harness import TinyK3, all_names, poison, run_dtype, state_of, tiny_k3

pytestmark = pytest.mark.sglang

NUM_LAYERS = PRESETS["odd"].num_layers
BLOCK = PRESETS["odd"].attn_res_block_size
BOUNDARIES = range(1, NUM_LAYERS)
STEPS: tuple[list[int] | None, ...] = ([5, 1], [1, 7], None, [3, 2], None)  # tokens per request; None decodes one

SplitAs = Callable[..., Iterator[SimpleNamespace]]


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> SplitAs:
    """Puts the process into each stage of a pipeline in turn: ``for stage in stages(5, 8): ...``."""

    def split(*num_layers: int) -> Iterator[SimpleNamespace]:
        monkeypatch.setenv("SGLANG_PP_LAYER_PARTITION", ",".join(map(str, num_layers)))
        last = len(num_layers) - 1
        for rank in range(len(num_layers)):
            stage = SimpleNamespace(
                is_first_rank=rank == 0, is_last_rank=rank == last, rank_in_group=rank, world_size=last + 1
            )
            monkeypatch.setattr("sglang_k3.models.kimi_k3.get_pp_group", lambda stage=stage: stage)
            yield stage

    return split


class Stage:
    """One stage, loaded, over pools of its own."""

    def __init__(self, tiny: TinyK3) -> None:
        model = tiny.build()
        poison(model, torch.nan, 255)
        model.load_weights(tiny.tensors.items())
        self.model, self.head = model.model, model.lm_head
        self.runner = FakeRunner(tiny.config)
        self.backend = hybrid_backend(self.runner, tiny.config)
        self.requests: list[Request] = [self.runner.new_request() for _ in range(2)]

    def step(self, lens: list[int] | None, ids: Tensor, received: PPProxyTensors | None) -> Tensor | PPProxyTensors:
        batch = self.runner.decode(self.requests) if lens is None else self.runner.extend(self.requests, lens)
        self.backend.init_forward_metadata(batch)
        with forward_context(ForwardContext(attn_backend=self.backend)), torch.no_grad():
            return self.model(ids, batch, pp_proxy_tensors=received)


def run(chain: list[Stage], vocab_size: int) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Logits of every step, and what was handed over at each boundary in it."""
    generator = torch.Generator().manual_seed(3)
    logits, handed_over = [], []
    for lens in STEPS:
        ids = torch.randint(vocab_size, (sum(lens or [1, 1]),), generator=generator)
        packets, out = [], None
        for stage in chain:
            out = stage.step(lens, ids, out)
            if isinstance(out, PPProxyTensors):
                (packet,) = out.tensors.values()
                packets.append(packet)
        logits.append(out @ chain[-1].head.weight[:vocab_size].T)
        handed_over.append(packets)
    return logits, handed_over


@pytest.fixture(scope="module")
def unsplit() -> list[Tensor]:
    tiny = tiny_k3("odd")
    return run([Stage(tiny)], tiny.config.vocab_size)[0]


@pytest.mark.parametrize(
    "split",
    [*((b, NUM_LAYERS - b) for b in BOUNDARIES), (1,) * NUM_LAYERS, (3, 8, 2)],
    ids=str,
)
def test_a_chain_of_stages_is_the_whole_model(stages: SplitAs, unsplit: list[Tensor], split: tuple[int, ...]) -> None:
    """The first stage has no MLA layer up to boundary 3, the last no KDA layer from 11 on."""
    tiny = tiny_k3("odd")
    chain = [Stage(tiny) for _ in stages(*split)]
    logits, _ = run(chain, tiny.config.vocab_size)
    for actual, expected in zip(logits, unsplit, strict=True):
        assert expected.isfinite().all()
        assert_bitwise(actual, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_handed_over_is_as_large_as_the_bank_makes_it(stages: SplitAs, dtype: torch.dtype) -> None:
    """One tensor: the prefix, and a row for every block that has begun, in the run dtype."""
    tiny = tiny_k3("odd")
    with run_dtype(dtype):
        chain = [Stage(tiny) for _ in stages(*[1] * NUM_LAYERS)]
    _, handed_over = run(chain, tiny.config.vocab_size)
    for lens, packets in zip(STEPS, handed_over, strict=True):
        num_tokens = sum(lens or [1, 1])
        for boundary, packet in zip(BOUNDARIES, packets, strict=True):
            rows = math.ceil(boundary / BLOCK)
            assert packet.nbytes == (1 + rows) * num_tokens * tiny.config.hidden_size * dtype.itemsize
            assert packet.shape == (num_tokens, chain[boundary].model.handoff_width) and packet.is_contiguous()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("preset", PRESETS)
def test_stages_together_hold_every_tensor_once(stages: SplitAs, preset: str, tied: bool) -> None:
    """Each fills all that it has and reads past the rest; tied embeddings alone are in two places."""
    tiny = tiny_k3(preset, tie_word_embeddings=tied)
    num_layers, names = tiny.config.num_hidden_layers, []
    for _ in stages(2, num_layers - 3, 1):
        model = tiny.build()
        poison(model, torch.nan, 255)
        model.load_weights(tiny.tensors.items())
        assert not any(tensor.isnan().any() for tensor in state_of(model).values())
        names.append(set(model.loaders()))
    assert set.union(*names) == all_names(tiny.layout)
    shared = {"language_model.model.embed_tokens.weight"} if tied else set()
    assert names[0] & names[2] == shared
    assert not names[1] & (names[0] | names[2])


def test_a_stage_keeps_memory_for_its_own_layers_only(stages: SplitAs) -> None:
    tiny = tiny_k3("odd")
    per_stage = []
    for stage in stages(4, 9):
        state = state_of(tiny.build())
        layers = {int(name.split(".")[2]) for name in state if name.startswith("model.layers.")}
        assert layers == (set(range(4)) if stage.is_first_rank else set(range(4, NUM_LAYERS)))
        assert ("model.embed_tokens.weight" in state) is stage.is_first_rank
        assert {"lm_head.weight", "model.norm.weight"} <= state.keys() or stage.is_first_rank
        per_stage.append(sum(tensor.nbytes for tensor in state.values()))
    for _ in stages(NUM_LAYERS):
        assert sum(per_stage) == sum(tensor.nbytes for tensor in state_of(tiny.build()).values())


def test_a_stage_without_rows_can_be_sized() -> None:
    """The host divides by the bytes of a token's rows; a stage without an MLA layer has none, others keep theirs."""
    seam_pools.install()
    model = SimpleNamespace(kv_lora_rank=16, qk_rope_head_dim=8, hf_config=SimpleNamespace(architectures=[]))
    runner = SimpleNamespace(
        model_config=model, kv_cache_dtype=torch.bfloat16, use_mla_backend=True, is_draft_worker=True
    )
    sizes = object.__new__(DefaultPoolConfigurator)
    for num_layers, num_tokens in ((0, 9600), (2, 64)):
        sizes._cell_size = sizes._compute_cell_size(runner, num_layers)
        assert sizes.calculate_pool_sizes(9600 + 63, 64).max_total_num_tokens == num_tokens
