"""The repetition penalty as the OpenAI-compatible engines define it, element by element."""

from __future__ import annotations

import inspect

import pytest
import torch
from sglang.srt.sampling.penaltylib import repetition_penalty

from sglang_k3.host.penalties import apply_scaling_penalties

pytestmark = pytest.mark.sglang


def test_positive_logits_are_divided_and_negative_ones_multiplied() -> None:
    logits = torch.tensor([[3.0, -3.0, 0.0, 5.0], [-1.0, 1.0, 2.0, -float("inf")]])
    penalties = torch.tensor([[1.5, 1.5, 1.5, 1.0], [0.5, 0.5, 1.0, 2.0]])
    apply_scaling_penalties(logits, penalties)
    assert logits.tolist() == [[2.0, -4.5, 0.0, 5.0], [-0.5, 2.0, 2.0, -float("inf")]]


def test_it_takes_what_the_host_passes() -> None:
    host = inspect.signature(repetition_penalty.apply_scaling_penalties).parameters
    assert list(inspect.signature(apply_scaling_penalties).parameters) == list(host)
