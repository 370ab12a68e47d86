"""What a state costs, from the published sizes of K3."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_k3.config import K3Config
from sglang_k3.mem.replay_cost import ReplayCost

# k3_facts.md 1.7: parameters that a token meets, without the embedding table; the head is one of them, but a replay
# needs no logits. The figure counts norms, mixes and biases, which the cost leaves out.
ACTIVE_PARAMETERS = 104_189_614_848
HEAD_PARAMETERS = 163_840 * 7_168


@pytest.fixture
def config(published_config: dict[str, Any]) -> K3Config:
    return K3Config.from_dict(published_config)


def test_linear_flops_are_two_per_active_parameter(config: K3Config):
    recurrence = 69 * 7 * 96 * 128 * 128
    expected = 2 * (ACTIVE_PARAMETERS - HEAD_PARAMETERS) + recurrence
    assert ReplayCost.of(config).linear_flops == pytest.approx(expected, rel=1e-3)


def test_attention_costs_a_query_key_and_a_weighted_value_per_pair(config: K3Config):
    assert ReplayCost.of(config).pair_flops == 24 * 96 * 2 * (192 + 128)


def test_bytes_are_the_published_ones(config: K3Config):
    """k3_facts.md 3.3.7 and 3.4; algorithms.md 6 gives 56.2 and 29.0 MB per rank of eight."""
    whole = ReplayCost.of(config)
    assert (whole.state_bytes, whole.kv_bytes) == (434_110_464 + 69 * 3 * 36_864 * 2, 27_648)
    assert ReplayCost.of(config, tp_size=8).state_bytes == pytest.approx(56.2e6, rel=2e-3)
    assert ReplayCost.of(config, tp_size=8, state_itemsize=2).state_bytes == pytest.approx(29.0e6, rel=2e-3)
    assert ReplayCost.of(config, tp_size=8).kv_bytes == 27_648


def test_a_replay_is_the_sum_of_its_tokens(config: K3Config):
    cost = ReplayCost.of(config)
    token_by_token = sum(cost.linear_flops + cost.pair_flops * (position + 1) for position in range(1000, 1300))
    assert cost.replay_flops(1000, 1300) == token_by_token
    assert cost.replay_flops(0, 1000) + cost.replay_flops(1000, 1300) == cost.replay_flops(0, 1300)
    assert cost.replay_flops(7, 7) == 0


def test_in_larger_units_nothing_costs_less(config: K3Config):
    """Pairs within a unit are counted for its last token: a unit of 16 at depth 16,000 is off by 0.01 %."""
    cost, scaled = ReplayCost.of(config), ReplayCost.of(config).in_units_of(16)
    assert scaled.replay_flops(100, 1000) == pytest.approx(cost.replay_flops(1600, 16000), rel=1e-3)
    assert (scaled.kv_bytes, scaled.state_bytes) == (16 * cost.kv_bytes, cost.state_bytes)
