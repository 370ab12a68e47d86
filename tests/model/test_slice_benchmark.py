"""The slice that ``benchmarks/unit_slice.py`` times is the model, over what its backends ask of a runner."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from sglang_k3.testing.presets import PRESETS

pytestmark = pytest.mark.sglang
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize("step", ["decode", "prefill"])
def test_a_small_slice_steps_on_a_cpu(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import slice_model

    small = dataclasses.replace(PRESETS["default"], num_layers=4, full_attention_layers=(4,))
    monkeypatch.setattr(slice_model, "DEVICE", "cpu")
    monkeypatch.setattr(slice_model, "SLICE_SIZES", small)
    unit = slice_model.UnitSlice(1)
    batch = getattr(slice_model.Pools(unit, 2, 5), step)()
    assert batch.input_ids.shape == ((2,) if step == "decode" else (10,))
    logits = unit.forward(batch)
    assert logits.shape == (2, unit.config.vocab_size)
    assert torch.isfinite(logits).all()
