"""The config objects that the host passes around say what the file says."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
from sglang.srt.runtime_context import get_parallel

from sglang_k3.config import K3Config
from sglang_k3.errors import ConfigError
from sglang_k3.host.hf_config import K3HFConfig
from sglang_k3.testing.presets import PRESETS
from tests.model.harness import tiny_k3

pytestmark = pytest.mark.sglang

Json = dict[str, Any]


@pytest.fixture
def config() -> Json:
    return copy.deepcopy(dict(tiny_k3().json))


def read_both_ways(config: Json) -> tuple[K3Config, K3Config]:
    """Through the host's objects, and from the file; the first must not change what it is given."""
    before = copy.deepcopy(config)
    through_host = K3HFConfig(**config).k3
    assert config == before
    return through_host, K3Config.from_dict(config)


@pytest.mark.parametrize("experts", ["mxfp4", "bf16"])
@pytest.mark.parametrize("preset", PRESETS)
def test_nothing_is_lost(preset: str, experts: str) -> None:
    through_host, from_file = read_both_ways(dict(tiny_k3(preset, experts=experts).json))
    assert through_host == from_file


@pytest.mark.parametrize(
    "change",
    [
        {"activation_situ_linear_beta": None},
        {"attn_res_block_size": None},
        {"tie_word_embeddings": True},
        {"mla_use_output_gate": False},
    ],
    ids=str,
)
def test_null_and_switches_survive(change: Json, config: Json) -> None:
    config["text_config"] |= change
    through_host, from_file = read_both_ways(config)
    assert through_host == from_file != tiny_k3().config


def test_what_stands_at_the_top_only_reaches_the_text_config(config: Json) -> None:
    text = config["text_config"]
    config["quantization_config"] = text.pop("quantization_config")
    config["tie_word_embeddings"] = True
    for key in ("tie_word_embeddings", "eos_token_id"):
        del text[key]
    through_host, from_file = read_both_ways(config)
    assert through_host == from_file
    assert through_host.tie_word_embeddings and through_host.mxfp4_experts
    assert K3HFConfig(**config).text_config.eos_token_id == config["eos_token_id"]


def test_what_stands_in_the_text_config_only_reaches_the_top(config: Json) -> None:
    config["text_config"]["tie_word_embeddings"] = True
    for key in ("tie_word_embeddings", "eos_token_id", "bos_token_id", "pad_token_id"):
        del config[key]
    made = K3HFConfig(**config)
    assert made.tie_word_embeddings is True
    assert made.eos_token_id == config["text_config"]["eos_token_id"]


def test_the_host_sees_no_quantisation(config: Json) -> None:
    """At the top it would look the method up in its own registry and refuse."""
    config["quantization_config"] = config["text_config"].pop("quantization_config")
    assert not hasattr(K3HFConfig(**config), "quantization_config")


def test_overrides_take_effect(config: Json) -> None:
    """``--json-model-override-args`` comes in through ``update``: one key of the nested object leaves the others."""
    made = K3HFConfig(**config)
    made.update({"text_config": {"rms_norm_eps": 1e-3}, "eos_token_id": 7})
    assert made.k3 == dataclasses.replace(tiny_k3().config, rms_norm_eps=1e-3)
    assert made.eos_token_id == 7
    with pytest.raises(ConfigError, match="no rms_norm_eps at the top.*under text_config"):
        made.update({"rms_norm_eps": 1e-3})


@pytest.mark.parametrize(("partition", "most"), [("5,4", 4), ("2,7", 4), ("7,2", 6), ("3,4,2", 3), ("9", 6)])
def test_every_stage_counts_its_slots_by_the_largest(
    partition: str, most: int, config: Json, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers 3, 7 and 8 are MLA; from one budget of bytes all stages get one number of slots, and it fits in each."""
    monkeypatch.setenv("SGLANG_PP_LAYER_PARTITION", partition)
    with get_parallel().override(pp_size=partition.count(",") + 1):
        params = K3HFConfig(**config).text_config.mamba2_cache_params
    window, matrices = 3 * 3 * 4 * 16, 4 * 16 * 16  # per layer: of q, k and v, and one for each head
    per_layer = window * params.dtype.conv.itemsize + matrices * params.dtype.temporal.itemsize
    assert params.mamba_cache_per_req == most * per_layer
    assert params.layers == [0, 1, 2, 4, 5, 6]


@pytest.mark.parametrize("preset", PRESETS)
def test_the_host_reads_the_schedule_and_the_state_shapes(preset: str) -> None:
    tiny = tiny_k3(preset)
    text, kda = K3HFConfig(**tiny.json).text_config, tiny.config.kda
    assert text.full_attention_layer_ids == list(tiny.config.full_attention_layers)
    assert sorted(text.full_attention_layer_ids + text.linear_layer_ids) == list(range(tiny.config.num_hidden_layers))
    params = text.mamba2_cache_params
    assert params.layers == text.linear_layer_ids
    assert params.shape.temporal == (kda.num_heads, kda.head_dim, kda.head_dim)
    assert list(params.shape.conv) == [(kda.short_conv_kernel_size - 1, 3 * kda.width)]
