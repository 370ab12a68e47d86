"""Tensor and expert parallel: the ranks' slices put together are the whole, and so are their partial results."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from torch import Tensor, nn

from sglang_k3.config import K3Config
from sglang_k3.errors import ConfigError
from sglang_k3.models.text import latent_moe
from sglang_k3.models.text.experts import RoutedExperts
from sglang_k3.models.text.kda import KimiDeltaAttention
from sglang_k3.models.text.latent_moe import LatentMoE
from sglang_k3.models.text.mla import KimiMLAAttention
from sglang_k3.models.text.mlp import SiTUMLP
from sglang_k3.testing.presets import PRESETS
from tests.kit.compare import assert_bitwise
from tests.kit.tolerance import assert_close
from tests.model.fakes import FakeRunner, hybrid_backend
from tests.model.harness import Rank, TinyK3, ranks, state_of, tiny_k3

pytestmark = pytest.mark.sglang

KDA_LAYER, MLA_LAYER = 1, 3
# Experts of two MXFP4 groups in both directions, so that two ranks can split them; all head counts are even.
WIDE = dataclasses.replace(PRESETS["default"], moe_width=64, latent_size=96)

# How a rank's parameter lies in the whole: the axis, and into how many stacked parts the whole falls first.
Split = tuple[int, int]
KDA_SPLITS: dict[str, Split | None] = {
    "qkv_proj.weight": (0, 3),
    "qkv_conv1d": (0, 3),
    "f_a_proj.weight": None,
    "f_b_proj.weight": (0, 1),
    "b_proj.weight": (0, 1),
    "g_proj.weight": (0, 1),
    "o_proj.weight": (1, 1),
    "A_log": (0, 1),
    "dt_bias": (0, 1),
    "o_norm": None,
}
MLA_SPLITS: dict[str, Split | None] = {
    "q_a_proj.weight": None,
    "q_a_layernorm.weight": None,
    "q_b_proj.weight": (0, 1),
    "kv_a_proj_with_mqa.weight": None,
    "kv_a_layernorm.weight": None,
    "kv_b_proj.weight": (0, 1),
    "g_proj.weight": (0, 1),
    "o_proj.weight": (1, 1),
}
MLP_SPLITS: dict[str, Split | None] = {"gate_up_proj.weight": (0, 2), "down_proj.weight": (1, 1)}
EXPERT_SPLITS: dict[str, Split] = {"w13": (1, 2), "w13_scale": (1, 2), "w2": (2, 1), "w2_scale": (2, 1)}


def put_together(slices: list[Tensor], split: Split) -> Tensor:
    axis, parts = split
    return torch.cat(
        [torch.cat(part, axis) for part in zip(*(s.chunk(parts, axis) for s in slices), strict=True)], axis
    )


def build(make: Callable[[], nn.Module], tiny: TinyK3, prefix: str, rank: Rank | None = None) -> nn.Module:
    """A loaded module: the whole of it, or one rank's."""
    with (rank or Rank(0, 1)).active():
        module = make()
        tiny.load_into(module, prefix)
    return module


def assert_slices(whole: nn.Module, parts: list[nn.Module], splits: dict[str, Split | None]) -> None:
    """Every parameter and buffer, none without a rule."""
    state, states = state_of(whole), [state_of(part) for part in parts]
    assert set(state) == set(splits)
    for name, split in splits.items():
        slices = [s[name].data for s in states]
        if split is None:
            for copy in slices:
                assert_bitwise(copy, state[name].data, name)
        else:
            assert all(s.numel() * len(parts) == state[name].numel() for s in slices), name
            assert_bitwise(put_together(slices, split), state[name].data, name)


def kda(config: K3Config) -> KimiDeltaAttention:
    return KimiDeltaAttention(config, KDA_LAYER)


def mla(config: K3Config) -> KimiMLAAttention:
    return KimiMLAAttention(config, MLA_LAYER, latent_norm_eps=1e-6)


@pytest.mark.parametrize("tp_size", [2, 4])
@pytest.mark.parametrize(
    ("make", "prefix", "splits"),
    [
        pytest.param(kda, f"layers.{KDA_LAYER}.self_attn.", KDA_SPLITS, id="KDA"),
        pytest.param(mla, f"layers.{MLA_LAYER}.self_attn.", MLA_SPLITS, id="MLA"),
        pytest.param(lambda config: SiTUMLP(config, config.intermediate_size), "layers.0.mlp.", MLP_SPLITS, id="MLP"),
    ],
)
def test_slices_make_the_whole(
    make: Callable[[K3Config], nn.Module], prefix: str, splits: dict[str, Split | None], tp_size: int
) -> None:
    tiny = tiny_k3(WIDE)
    whole = build(lambda: make(tiny.config), tiny, prefix)
    parts = [build(lambda: make(tiny.config), tiny, prefix, rank) for rank in ranks(tp_size)]
    assert_slices(whole, parts, splits)


@pytest.mark.parametrize("experts", ["mxfp4", "bf16"])
@pytest.mark.parametrize(("tp_size", "ep_size"), [(2, 1), (2, 2), (4, 2), (8, 4), (4, 4)])
def test_expert_slices_make_the_whole(tp_size: int, ep_size: int, experts: str) -> None:
    """Split by expert over ``ep_size`` ranks, each of these by width over the rest."""
    tiny = tiny_k3(WIDE, experts=experts)
    prefix = "layers.1.block_sparse_moe.experts."
    packed = experts == "mxfp4"
    whole = build(lambda: RoutedExperts(tiny.config, packed=packed), tiny, prefix)
    places = ranks(tp_size, ep_size)
    parts = [build(lambda: RoutedExperts(tiny.config, packed=packed), tiny, prefix, rank) for rank in places]
    state, states = state_of(whole), [state_of(part) for part in parts]
    assert set(state) == set(EXPERT_SPLITS if packed else ("w13", "w2"))
    moe_tp_size = tp_size // ep_size
    for name, tensor in state.items():
        by_expert = [
            put_together([s[name] for s in states[first : first + moe_tp_size]], EXPERT_SPLITS[name])
            for first in range(0, tp_size, moe_tp_size)
        ]
        assert_bitwise(torch.cat(by_expert), tensor, name)
    firsts = [part.first_expert for part in parts]
    assert firsts == [8 // ep_size * (rank.rank // moe_tp_size) for rank in places]


def routing(config: K3Config, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Random experts, each at most once per token, and weights that add up to one."""
    ids = torch.rand(num_tokens, config.moe.num_experts).topk(config.moe.top_k).indices.int()
    return torch.rand(num_tokens, config.moe.top_k).softmax(-1), ids


@pytest.mark.parametrize("experts", ["mxfp4", "bf16"])
@pytest.mark.parametrize(("tp_size", "ep_size"), [(2, 1), (2, 2), (4, 2)])
def test_partial_expert_sums_add_up(tp_size: int, ep_size: int, experts: str) -> None:
    tiny = tiny_k3(WIDE, experts=experts)
    prefix = "layers.1.block_sparse_moe.experts."
    latent = torch.randn(13, tiny.config.moe.latent_size)
    chosen = routing(tiny.config, 13)

    def partial_sum(rank: Rank | None = None) -> Tensor:
        return build(lambda: RoutedExperts(tiny.config, packed=experts == "mxfp4"), tiny, prefix, rank)(latent, *chosen)

    parts = [partial_sum(rank) for rank in ranks(tp_size, ep_size)]
    assert all(part.any() for part in parts)
    assert_close(torch.stack(parts).sum(0), partial_sum(), "ratio")


@pytest.mark.parametrize(("tp_size", "ep_size"), [(2, 1), (2, 2)])
def test_the_latent_sum_is_reduced_before_its_norm(tp_size: int, ep_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm is not linear: reducing after it would give another model."""
    tiny = tiny_k3(WIDE, num_shared_experts=0)
    prefix, x = "layers.1.block_sparse_moe.", torch.randn(7, tiny.config.hidden_size)
    expected = build(lambda: LatentMoE(tiny.config, packed=True), tiny, prefix)(x)
    places = ranks(tp_size, ep_size)
    modules = [build(lambda: LatentMoE(tiny.config, packed=True), tiny, prefix, rank) for rank in places]
    partial_sums = [module.experts(module.routed_expert_down_proj(x)[0], *module.gate(x)) for module in modules]
    for module, own, rank in zip(modules, partial_sums, places, strict=True):

        def all_reduce(y: Tensor, own: Tensor = own) -> Tensor:
            assert_bitwise(y, own, "what the rank reduces")
            return torch.stack(partial_sums).sum(0)

        monkeypatch.setattr(latent_moe, "tensor_model_parallel_all_reduce", all_reduce)
        with rank.active():
            assert_close(module(x), expected, "ratio")


def test_one_rank_reduces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = tiny_k3()
    monkeypatch.setattr(latent_moe, "tensor_model_parallel_all_reduce", lambda y: pytest.fail("nothing to reduce"))
    moe = build(lambda: LatentMoE(tiny.config, packed=True), tiny, "layers.1.block_sparse_moe.")
    assert moe(torch.randn(3, 64)).isfinite().all()


def test_partial_outputs_of_the_mlp_add_up() -> None:
    tiny, x = tiny_k3(WIDE), torch.randn(7, WIDE.hidden_size)

    def output(rank: Rank | None = None) -> Tensor:
        return build(lambda: SiTUMLP(tiny.config, tiny.config.intermediate_size), tiny, "layers.0.mlp.", rank)(x)

    # The group of the test has one member, so that what a rank would reduce comes back as it is.
    assert_close(torch.stack([output(rank) for rank in ranks(4)]).sum(0), output(), "ratio")


@pytest.mark.parametrize(("make", "layer"), [(kda, KDA_LAYER), (mla, MLA_LAYER)])
def test_partial_outputs_of_attention_add_up(make: Callable[[K3Config], nn.Module], layer: int) -> None:
    """Each rank over pools of its own heads: a prompt, a continuation and a decode step."""
    tiny, x = tiny_k3(WIDE), torch.randn(9, WIDE.hidden_size)

    def output(rank: Rank | None = None) -> Tensor:
        module = build(lambda: make(tiny.config), tiny, f"layers.{layer}.self_attn.", rank)
        runner = FakeRunner(tiny.config, tp_size=rank.tp_size if rank else 1)
        backend, request, parts = hybrid_backend(runner, tiny.config), runner.new_request(), []
        with forward_context(ForwardContext(attn_backend=backend)):
            for n in (5, 3, 1):
                tokens = x[request.length : request.length + n]
                batch = runner.decode([request]) if n == 1 else runner.extend([request], [n])
                backend.init_forward_metadata(batch)
                parts.append(module(tokens, batch))
        return torch.cat(parts)

    partial_outputs = [output(rank) for rank in ranks(2)]
    assert_close(torch.stack(partial_outputs).sum(0), output(), "ratio")


@pytest.mark.parametrize(
    ("rank", "experts", "message"),
    [
        (Rank(0, 2), "mxfp4", "multiples of 32 on every rank, got 16 and 32: use a smaller --tp-size, or --ep-size"),
        (Rank(0, 3, 3), "bf16", "--ep-size gives 3 ranks, which do not divide text_config.num_experts = 8"),
        (Rank(0, 3), "bf16", "--tp-size gives 3 ranks, which do not divide text_config.moe_intermediate_size = 32"),
    ],
)
def test_a_split_that_does_not_come_out_even_is_refused(rank: Rank, experts: str, message: str) -> None:
    with rank.active(), pytest.raises(ConfigError, match=message):
        RoutedExperts(tiny_k3(experts=experts).config, packed=experts == "mxfp4")


def test_packed_tensors_that_the_rank_cannot_split_are_refused() -> None:
    """Also where the config did not announce them."""
    packed, plain = tiny_k3(experts="mxfp4"), tiny_k3(experts="bf16")
    with Rank(0, 2).active():
        experts = RoutedExperts(plain.config, packed=False)
        with pytest.raises(ConfigError, match="multiples of 32 on every rank, got 16 and 32"):
            packed.load_into(experts, "layers.1.block_sparse_moe.experts.")


@pytest.mark.parametrize("ep_size", [2, 4, 8])
def test_splitting_by_expert_keeps_mxfp4_whole(ep_size: int) -> None:
    """The remedy that the refusal names."""
    with Rank(0, ep_size, ep_size).active():
        assert RoutedExperts(tiny_k3().config, packed=True).w2.shape == (8 // ep_size, 32, 16)
