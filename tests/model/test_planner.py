"""What the planner says a rank holds is what the modules of that rank hold."""

from __future__ import annotations

import pytest
import torch

from sglang_k3.models.text.decoder_layer import KimiDecoderLayer
from sglang_k3.planner import Ranks, plan_stages
from tests.model.harness import Rank, run_dtype, state_of, tiny_k3

pytestmark = pytest.mark.sglang


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("preset", "experts", "tp_size", "ep_size"),
    [("default", "mxfp4", 1, 1), ("default", "mxfp4", 2, 2), ("default", "bf16", 2, 1), ("odd", "mxfp4", 1, 1)],
)
def test_weights_of_a_rank(preset: str, experts: str, tp_size: int, ep_size: int, dtype: torch.dtype) -> None:
    """Of the inner layers: a dense one, both kinds of attention, both kinds of MLP."""
    packed = {} if experts == "mxfp4" else {"quantization_config": None}
    config = tiny_k3(preset, experts=experts, first_k_dense_replace=2, **packed).config
    inner = range(1, config.num_hidden_layers - 1)
    with Rank(0, tp_size, ep_size).active(), run_dtype(dtype):
        layers = [
            KimiDecoderLayer(config, layer, packed_experts=experts == "mxfp4", latent_norm_eps=1e-6) for layer in inner
        ]
    held = sum(tensor.nbytes for layer in layers for tensor in state_of(layer).values())
    ranks = Ranks(tp_size, stages=((inner.start, inner.stop),))
    (plan,) = plan_stages(config, ranks, num_states=0, num_tokens=0, itemsize=dtype.itemsize)
    assert plan.weights == held


def test_the_whole_model() -> None:
    tiny = tiny_k3()
    held = sum(tensor.nbytes for tensor in state_of(tiny.build()).values())
    (plan,) = plan_stages(tiny.config, Ranks(), num_states=0, num_tokens=0, itemsize=4)
    assert plan.weights == held


def test_stages_share_the_layers() -> None:
    config = tiny_k3().config
    sizes = {"num_states": 10, "num_tokens": 1000}
    (whole,) = plan_stages(config, Ranks(), **sizes)
    stages = plan_stages(config, Ranks(stages=((0, 5), (5, 9))), **sizes)
    assert len(stages) == 2
    for part in ("weights", "states", "latent_rows"):
        assert sum(getattr(plan, part) for plan in stages) == getattr(whole, part)


def test_states_and_rows_are_those_of_the_pools() -> None:
    config = tiny_k3().config
    kda, mla = config.kda, config.mla
    (plan,) = plan_stages(config, Ranks(), num_states=3, num_tokens=7, itemsize=2, state_itemsize=4)
    state = 4 * kda.num_heads * kda.head_dim**2 + 2 * 3 * (kda.short_conv_kernel_size - 1) * kda.width
    assert plan.states == 3 * len(config.kda_layers) * state
    assert plan.latent_rows == 7 * len(config.full_attention_layers) * 2 * (mla.kv_lora_rank + mla.qk_rope_head_dim)
