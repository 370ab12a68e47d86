"""Loading: every tensor of a checkpoint has a place, every place gets its tensor, and nothing else is accepted."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import logging
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_k3.errors import CheckpointError, ConfigError
from sglang_k3.kernels import OpContext, latent_experts
from sglang_k3.kernels.dispatch import choose
from sglang_k3.models.kimi_k3 import KimiK3ForConditionalGeneration
from sglang_k3.models.text import experts as experts_module
from sglang_k3.models.text.experts import RoutedExperts
from sglang_k3.models.text.weights import load_checkpoint
from sglang_k3.testing.presets import PRESETS
from tests.kit.compare import assert_bitwise
from tests.model.harness import TinyK3, all_names, poison, run_dtype, state_of, tiny_k3

pytestmark = pytest.mark.sglang

PRESETS_AND_EXPERTS = [*itertools.product(PRESETS, ("mxfp4", "bf16"))]
SWITCHES = [
    {"tie_word_embeddings": True},
    {"attn_res_block_size": None},
    {"mla_use_output_gate": False},
    {"latent_moe_use_norm": False},
    {"num_shared_experts": 0},
]
ATTENTION = "language_model.model.layers.1.self_attn."
MOE = "language_model.model.layers.1.block_sparse_moe."


def experts_of(model: KimiK3ForConditionalGeneration, layer: int = 1) -> RoutedExperts:
    return model.model.layers[layer].mlp.experts


@pytest.mark.parametrize(("preset", "experts"), PRESETS_AND_EXPERTS)
def test_names_and_places_correspond(preset: str, experts: str) -> None:
    tiny = tiny_k3(preset, experts=experts)
    assert set(tiny.build().loaders()) == all_names(tiny.layout)


@pytest.mark.parametrize("switch", SWITCHES, ids=str)
def test_names_and_places_correspond_with_a_step_left_out(switch: dict[str, object]) -> None:
    tiny = tiny_k3(**switch)
    assert set(tiny.build().loaders()) == all_names(tiny.layout) != all_names(tiny_k3().layout)


@pytest.mark.parametrize(("preset", "experts"), PRESETS_AND_EXPERTS)
def test_loading_fills_everything(preset: str, experts: str) -> None:
    """What was there before does not show: two poisons give the same model, and no NaN is left."""
    tiny, loaded = tiny_k3(preset, experts=experts), []
    for value, byte in ((torch.nan, 255), (0.0, 0)):
        model = tiny.build()
        poison(model, value, byte)
        model.load_weights(tiny.tensors.items())
        loaded.append(state_of(model))
    for name, tensor in loaded[0].items():
        assert_bitwise(tensor, loaded[1][name], name)
        assert not tensor.isnan().any(), name


@pytest.mark.parametrize("switch", SWITCHES, ids=str)
def test_loading_fills_everything_with_a_step_left_out(switch: dict[str, object]) -> None:
    """Without a block size the mixes stay unused: an empty bank is passed through."""
    tiny = tiny_k3(**switch)
    model = tiny.build()
    poison(model, torch.nan, 255)
    model.load_weights(tiny.tensors.items())
    left = {name for name, tensor in state_of(model).items() if tensor.isnan().any()}
    unused = {name for name in state_of(model) if "_res." in name} if switch == {"attn_res_block_size": None} else set()
    assert left == unused


def test_tied_embeddings_are_one_tensor() -> None:
    tiny = tiny_k3(tie_word_embeddings=True)
    model = tiny.build()
    model.load_weights(tiny.tensors.items())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_bitwise(model.lm_head.weight, tiny.tensors["language_model.model.embed_tokens.weight"].float())


# By the name of the parameter, what stays fp32 in a bfloat16 run (fact sheet 2.9; the mixes by 3.5).
KEPT_FP32 = (
    "qkv_conv1d",
    "A_log",
    "dt_bias",
    "o_norm",
    "e_score_correction_bias",
    "_res.norm_weight",
    "_res.proj_weight",
)


def test_fp32_tensors_stay_fp32_in_a_bfloat16_run() -> None:
    tiny = tiny_k3("odd", experts="bf16")
    with run_dtype(torch.bfloat16):
        model = tiny.build()
    model.load_weights(tiny.tensors.items())
    dtypes = {name: tensor.dtype for name, tensor in state_of(model).items()}
    assert dtypes == {n: torch.float32 if n.endswith(KEPT_FP32) else torch.bfloat16 for n in dtypes}
    assert all(any(name.endswith(kept) for name in dtypes) for kept in KEPT_FP32)
    kda, heads = model.model.layers[1].self_attn, tiny.config.kda.num_heads
    stored = {name: tiny.tensors[ATTENTION + name] for name in ("A_log", "dt_bias", "o_norm.weight")}
    taps = torch.cat([tiny.tensors[f"{ATTENTION}{name}_conv1d.weight"] for name in "qkv"]).squeeze(1)
    assert (stored["A_log"].bfloat16().float() != stored["A_log"])[:heads].all()  # a detour would show
    assert_bitwise(kda.A_log.data, stored["A_log"][:heads])
    assert_bitwise(kda.dt_bias.data.flatten(), stored["dt_bias"])
    assert_bitwise(kda.o_norm.data, stored["o_norm.weight"])
    assert_bitwise(kda.qkv_conv1d.data, taps)
    assert kda.attn.A_log is kda.A_log and kda.attn.dt_bias is kda.dt_bias  # what the backend reads
    assert kda.attn.conv_weights is kda.qkv_conv1d
    router = model.model.layers[1].mlp.gate
    assert_bitwise(router.e_score_correction_bias.data, tiny.tensors[f"{MOE}gate.e_score_correction_bias"])


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_float_tensor_may_be_stored_in_three_types(stored: torch.dtype) -> None:
    tiny = tiny_k3()
    tensors = {n: t.to(stored) if t.is_floating_point() else t for n, t in tiny.tensors.items()}
    with run_dtype(torch.bfloat16):
        model = tiny.build()
    model.load_weights(tensors.items())
    assert_bitwise(model.model.layers[1].self_attn.dt_bias.data.flatten(), tensors[f"{ATTENTION}dt_bias"].float())
    assert_bitwise(model.model.norm.weight.data, tensors["language_model.model.norm.weight"].bfloat16())


def test_an_unpadded_a_log_is_the_same() -> None:
    tiny = tiny_k3()
    heads = tiny.config.kda.num_heads
    cut = {n: t[:heads] if n.endswith("A_log") else t for n, t in tiny.tensors.items()}
    loaded = []
    for tensors in (tiny.tensors, cut):
        model = tiny.build()
        model.load_weights(tensors.items())
        loaded.append(model.model.layers[0].self_attn.A_log.data)
    assert_bitwise(*loaded)


@pytest.mark.parametrize("stored", ["mxfp4", "bf16"])
@pytest.mark.parametrize("guess", ["mxfp4", "bf16"])
def test_the_tensors_decide_how_experts_are_stored(guess: str, stored: str) -> None:
    """The config only guesses; either way each matrix lies where the op looks for it."""
    checkpoint = tiny_k3(experts=stored)
    model = tiny_k3(experts=guess).build()
    assert experts_of(model).packed is (guess == "mxfp4")
    model.load_weights(checkpoint.tensors.items())
    for layer in range(1, checkpoint.config.num_hidden_layers):
        assert_experts(experts_of(model, layer), checkpoint, layer)


def assert_experts(experts: RoutedExperts, checkpoint: TinyK3, layer: int) -> None:
    prefix = f"language_model.model.layers.{layer}.block_sparse_moe.experts."
    packed = f"{prefix}0.w1.weight_packed" in checkpoint.tensors
    assert experts.packed is packed
    if not packed:
        assert experts.w13_scale is None and experts.w2_scale is None
    for buffer, suffix in (("", "weight_packed"), ("_scale", "weight_scale")) if packed else (("", "weight"),):
        w13, w2 = getattr(experts, f"w13{buffer}"), getattr(experts, f"w2{buffer}")
        for expert in range(checkpoint.config.moe.num_experts):
            gate, up, down = (
                checkpoint.tensors[f"{prefix}{expert}.{name}.{suffix}"].to(w13.dtype) for name in ("w1", "w3", "w2")
            )
            assert_bitwise(w13[expert], torch.cat([gate, up]), f"{prefix}{expert} w13{buffer}")
            assert_bitwise(w2[expert], down, f"{prefix}{expert} w2{buffer}")


@pytest.mark.parametrize(("code", "codes"), [(0, (0, 190)), (255, (64, 255)), (64, (64, 190)), (190, (64, 190))])
def test_scales_that_a_kernel_cannot_decode_decide_which_op_runs(code: int, codes: tuple[int, int]) -> None:
    tiny = tiny_k3()
    name = f"{MOE}experts.5.w1.weight_scale"
    changed = tiny.tensors[name].clone()
    changed[3, 0] = code
    model = tiny.build()
    model.load_weights((dict(tiny.tensors) | {name: changed}).items())
    assert experts_of(model, 1).scale_codes == codes
    assert experts_of(model, 2).scale_codes == (64, 190)
    sizes = {"lowest_scale": codes[0], "highest_scale": codes[1]}
    kernel, *_ = latent_experts.IMPLS
    reason = kernel.supports(OpContext(torch.device("cpu"), torch.bfloat16, sizes))
    assert reason is not None and ("scale codes" in reason) == (codes != (64, 190))


@pytest.fixture
def moved_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, the op that comes first wants weights in a layout of its own."""
    kernel, reference = latent_experts.IMPLS

    def run_back(*args: Any, **kwargs: Any) -> Any:
        arguments = inspect.signature(reference.fn).bind(*args, **kwargs).arguments
        for name in kernel.layout.arguments:
            if arguments[name] is not None:
                arguments[name] = arguments[name].clone()
                kernel.layout.undo(name, arguments[name])
        return reference.fn(**arguments)

    def supports(ctx: OpContext) -> str | None:
        reason = kernel.supports(ctx)
        return reason if reason is not None and "scale codes" in reason else None

    impls = (dataclasses.replace(kernel, fn=functools.wraps(reference.fn)(run_back), supports=supports), reference)
    monkeypatch.setattr(experts_module, "bind_impl", lambda op, ctx: choose(impls, ctx))


def outputs_of(experts: RoutedExperts) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    latent = torch.randn(9, experts.latent_size, generator=generator)
    ids = torch.arange(18, dtype=torch.int32).view(9, 2) % experts.num_experts
    return experts(latent, torch.full((9, 2), 0.5), ids)


def restore(experts: RoutedExperts) -> None:
    for name in moved_of(experts):
        experts.latent_experts.layout.undo(name, getattr(experts, name))


def moved_of(experts: RoutedExperts) -> list[str]:
    return [name for name in experts.latent_experts.layout.arguments if getattr(experts, name) is not None]


@pytest.mark.usefixtures("moved_weights")
@pytest.mark.parametrize("stored", ["mxfp4", "bf16"])
def test_weights_lie_as_their_op_wants_them(stored: str) -> None:
    """Also those of a second checkpoint, and of one that broke off: the host rolls such an update back."""
    tiny = tiny_k3(experts=stored)
    model = tiny.build()
    names = list(tiny.tensors)
    for kept in (names, names[: len(names) // 2], names):
        with contextlib.nullcontext() if kept is names else pytest.raises(CheckpointError, match="missing"):
            model.load_weights((name, tiny.tensors[name]) for name in kept)
        outputs = outputs_of(experts_of(model))
        restore(experts_of(model))
        assert_experts(experts_of(model), tiny, 1)
        for name in moved_of(experts_of(model)):
            experts_of(model).latent_experts.layout.apply(name, getattr(experts_of(model), name))
        assert outputs.any()
        assert_bitwise(outputs_of(experts_of(model)), outputs)


@pytest.mark.usefixtures("moved_weights")
@pytest.mark.parametrize("name", ["experts.0.w1", "experts.5.w2", "experts.7.w3"])
def test_weights_that_are_there_follow_when_the_op_changes(name: str) -> None:
    tiny = tiny_k3()
    scale = tiny.tensors[f"{MOE}{name}.weight_scale"].clone()
    scale[0, 0] = 0
    model = tiny.build()
    model.load_weights((dict(tiny.tensors) | {f"{MOE}{name}.weight_scale": scale}).items())
    assert [experts_of(model, layer).latent_experts.name for layer in (1, 2)] == ["reference", "triton"]
    changed = dataclasses.replace(tiny, tensors=dict(tiny.tensors) | {f"{MOE}{name}.weight_scale": scale})
    assert_experts(experts_of(model, 1), changed, 1)
    restore(experts_of(model, 2))
    assert_experts(experts_of(model, 2), tiny, 2)


@pytest.mark.parametrize("brings", ["other scales", "plain experts"])
def test_what_another_kernel_must_decode_is_refused_once_graphs_are_captured(
    brings: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = tiny_k3()
    model = tiny.build()
    model.load_weights(dict(tiny.tensors).items())
    monkeypatch.setattr("sglang_k3.models.text.experts._is_captured", lambda latent: True)
    before = outputs_of(experts_of(model))
    new = dict(tiny_k3(experts="bf16").tensors)
    if brings == "other scales":
        scale = f"{MOE}experts.5.w1.weight_scale"
        new = dict(tiny.tensors) | {scale: torch.zeros_like(tiny.tensors[scale])}
    with pytest.raises(ConfigError, match="start a server with them"):
        model.load_weights(new.items())
    model.load_weights(dict(tiny.tensors).items())  # as the host rolls back
    assert_bitwise(outputs_of(experts_of(model)), before)


def test_layers_may_store_their_experts_differently() -> None:
    packed, plain = tiny_k3(experts="mxfp4"), tiny_k3(experts="bf16")
    mixed = {n: t for n, t in packed.tensors.items() if not n.startswith(f"{MOE}experts.")}
    mixed |= {n: t for n, t in plain.tensors.items() if n.startswith(f"{MOE}experts.")}
    model = packed.build()
    model.load_weights(mixed.items())
    assert_experts(experts_of(model, 1), plain, 1)
    assert_experts(experts_of(model, 2), packed, 2)


@pytest.mark.parametrize("guess", ["mxfp4", "bf16"])
def test_one_layer_may_not(guess: str) -> None:
    packed, plain = tiny_k3(experts="mxfp4"), tiny_k3(experts="bf16")
    odd_one = f"{MOE}experts.5.w1."
    tensors = {n: t for n, t in packed.tensors.items() if not n.startswith(odd_one)}
    tensors[f"{odd_one}weight"] = plain.tensors[f"{odd_one}weight"]
    with pytest.raises(CheckpointError, match=f"{odd_one}weight: MXFP4 and plain experts in one layer"):
        tiny_k3(experts=guess).build().load_weights(tensors.items())


def test_a_loaded_model_takes_another_checkpoint() -> None:
    """Also one that stores its experts the other way: the host can update weights from disk."""
    packed, plain = tiny_k3(experts="mxfp4"), tiny_k3(experts="bf16")
    model = packed.build()
    for checkpoint in (packed, plain, packed):
        model.load_weights(checkpoint.tensors.items())
        assert_experts(experts_of(model), checkpoint, 1)


def test_new_weights_of_a_mix_are_used() -> None:
    """The product that a mix keeps of its two vectors follows each of them."""
    mix = tiny_k3().build().model.layers[1].mlp_res
    with torch.no_grad():
        mix.load_norm(torch.full((64,), 3.0))
        assert_bitwise(mix.folded_weight, torch.zeros(64))
        mix.load_proj(torch.full((1, 64), 2.0))
        assert_bitwise(mix.folded_weight, torch.full((64,), 6.0))
        mix.load_norm(torch.full((64,), 5.0))
        assert_bitwise(mix.folded_weight, torch.full((64,), 10.0))


def test_a_missing_tensor_is_named() -> None:
    tiny = tiny_k3()
    tensors = dict(tiny.tensors)
    del tensors[f"{ATTENTION}o_norm.weight"]
    with pytest.raises(CheckpointError, match=f"{ATTENTION}o_norm.weight: missing"):
        tiny.build().load_weights(tensors.items())


@pytest.mark.parametrize(
    ("name", "tensor", "problem"),
    [
        (f"{ATTENTION}f_a_proj.weight", torch.zeros(64, 16), r"shape \[64, 16\], expected \[16, 64\]"),
        (f"{ATTENTION}dt_bias", torch.zeros(64, dtype=torch.int32), "type torch.int32, expected one of BF16, F16, F32"),
        (f"{MOE}experts.0.w1.weight_packed", torch.zeros(32, 16), r"type F32, expected U8 \(packed bytes\)"),
        (f"{ATTENTION}extra", torch.zeros(1), "unexpected"),
        (f"{ATTENTION}dt_bias", torch.zeros(64), "stored twice"),
    ],
)
def test_a_bad_tensor_is_named_before_the_next_is_read(name: str, tensor: Tensor, problem: str) -> None:
    tiny = tiny_k3()
    good = {n: t for n, t in tiny.tensors.items() if n != name or problem == "stored twice"}

    def stream() -> Iterator[tuple[str, Tensor]]:
        yield from good.items()
        yield name, tensor
        pytest.fail("another tensor was asked for")

    with pytest.raises(CheckpointError, match=f"{name}: {problem}"):
        tiny.build().load_weights(stream())


def test_vision_tensors_are_counted_and_left_unused(caplog: pytest.LogCaptureFixture) -> None:
    tiny = tiny_k3()
    text = {n: t for n, t in tiny.tensors.items() if n.startswith("language_model.")}
    with caplog.at_level(logging.INFO, logger="sglang_k3"):
        tiny.build().load_weights(text.items())
        assert "vision" not in caplog.text
        tiny.build().load_weights(tiny.tensors.items())
    assert f"{len(tiny.tensors) - len(text)} vision tensors checked and left unused" in caplog.text


def test_one_tensor_is_held_at_a_time() -> None:
    """When the next tensor is made nobody holds the last one: host memory stays near one shard."""
    tiny, model = tiny_k3(), tiny_k3().build()

    def stream() -> Iterator[tuple[str, Tensor]]:
        for name, stored in tiny.tensors.items():
            tensor = stored.clone()
            released = weakref.ref(tensor)
            yield name, tensor
            del tensor
            assert released() is None, f"{name} is still held"

    load_checkpoint(stream(), model.loaders(), tiny.layout)
