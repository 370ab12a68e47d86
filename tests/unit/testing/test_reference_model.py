"""ReferenceModel: properties that the architecture promises, whatever the weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sglang_k3.errors import CheckpointError
from sglang_k3.testing import equations
from sglang_k3.testing.reference import MLAState, ReferenceModel, load_text_weights

Load = Callable[..., ReferenceModel]


def tokens(length: int, vocab_size: int, *, seed: int = 0) -> list[int]:
    return torch.randint(vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("preset", ["default", "odd"])
def test_float32_agrees_with_float64(preset: str, load_reference: Load) -> None:
    single, double = load_reference(preset), load_reference(preset, dtype=torch.float64)
    ids = tokens(40, single.config.vocab_size)
    error = (single.logprobs(ids) - double.logprobs(ids)).abs().max()
    assert 0 < float(error) < 1e-3


def test_other_dtypes_are_refused(load_reference: Load) -> None:
    with pytest.raises(ValueError, match="use round_to"):
        load_reference("default", dtype=torch.bfloat16)


def test_logprobs_are_the_steps_one_by_one(load_reference: Load) -> None:
    model, ids = load_reference("default"), [5, 6, 7]
    state = model.new_state()
    logits = torch.stack([model.step(state, i) for i in ids])
    logprobs = model.logprobs(ids)
    assert logits.dtype == logprobs.dtype == torch.float32
    assert logprobs.shape == (3, model.config.vocab_size)
    assert torch.equal(logprobs, torch.log_softmax(logits, dim=-1))
    assert state.num_tokens == 3


def test_a_clone_goes_its_own_way(load_reference: Load) -> None:
    model = load_reference("default")
    state = model.new_state()
    for i in (1, 2, 3):
        model.step(state, i)
    branch = state.clone()
    for i in (9, 9):
        model.step(branch, i)
    assert (state.num_tokens, branch.num_tokens) == (3, 5)
    assert torch.equal(torch.log_softmax(model.step(state, 4), -1), model.logprobs([1, 2, 3, 4])[-1])


def test_greedy_takes_the_best_token_and_says_by_how_much(load_reference: Load) -> None:
    model, prompt = load_reference("default"), [10, 20, 30]
    ids, gaps = model.greedy(prompt, 5)
    logprobs = model.logprobs(prompt + ids[:-1])[len(prompt) - 1 :]
    best = logprobs.topk(2)
    assert ids == best.indices[:, 0].tolist()
    assert gaps == pytest.approx((best.values[:, 0] - best.values[:, 1]).tolist(), abs=1e-4)
    with pytest.raises(ValueError, match="at least one token"):
        model.greedy([], 1)


def test_trace_shows_what_each_sub_layer_read_and_wrote(load_reference: Load) -> None:
    model, ids = load_reference("default"), [3, 4]
    trace = model.trace(ids)
    kinds = ("attention_mix", "attention_output", "mlp_mix", "mlp_output")
    assert set(trace) == {f"layers.{i}.{kind}" for i in range(9) for kind in kinds} | {"final_mix"}
    assert {tuple(tensor.shape) for tensor in trace.values()} == {(2, 64)}
    assert torch.equal(trace["layers.0.attention_mix"], model.weights["model.embed_tokens.weight"][ids])
    normed = equations.unit_rms(trace["final_mix"], eps=1e-5) * model.weights["model.norm.weight"]
    logits = normed @ model.weights["lm_head.weight"].T
    torch.testing.assert_close(torch.log_softmax(logits, -1), model.logprobs(ids), rtol=0, atol=1e-5)


def test_bank_rows_follow_the_published_table(load_reference: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fact sheet 3.5 with blocks of 12: rows in the bank at the attention side and at the MLP side of each layer."""
    model = load_reference("deep")
    rows_mixed: list[int] = []
    mix = equations.depth_mix

    def count(rows: list[Tensor], **options: object) -> Tensor:
        rows_mixed.append(len(rows))
        return mix(rows, **options)

    monkeypatch.setattr(equations, "depth_mix", count)
    model.step(model.new_state(), 1)
    table = {0: (0, 1), **dict.fromkeys(range(1, 12), (1, 1)), 12: (1, 2), **dict.fromkeys(range(13, 24), (2, 2))}
    table[24] = (2, 3)
    bank_rows = [rows for layer in range(25) for rows in table[layer]] + [3]
    assert rows_mixed == [rows + 1 for rows in bank_rows if rows]  # no mix where the bank is empty


def test_first_bank_row_is_the_raw_embedding(load_reference: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_reference("default")
    banks: list[list[Tensor]] = []
    mix = equations.depth_mix

    def record(rows: list[Tensor], **options: object) -> Tensor:
        banks.append(rows)
        return mix(rows, **options)

    monkeypatch.setattr(equations, "depth_mix", record)
    trace = model.trace([7])
    assert all(torch.equal(rows[0], model.weights["model.embed_tokens.weight"][7]) for rows in banks)
    # The second row is the sum of block 0's outputs, without the embedding: p restarts when a row is banked.
    summed = sum(trace[f"layers.{i}.{kind}_output"][0] for i in range(4) for kind in ("attention", "mlp"))
    torch.testing.assert_close(banks[-1][1], summed, rtol=0, atol=1e-5)


def test_layer_0_attention_residual_never_acts(load_reference: Load) -> None:
    model, ids = load_reference("default"), tokens(6, 384)
    before = model.logprobs(ids)
    for kind in ("norm", "proj"):
        name = f"model.layers.0.self_attention_res_{kind}.weight"
        model.weights[name] = torch.full_like(model.weights[name], 1e3)
    assert torch.equal(model.logprobs(ids), before)


def test_mla_readout_ignores_the_order_of_the_past(load_reference: Load) -> None:
    model = load_reference("default")
    state = model.new_state()
    for i in tokens(12, 384):
        model.step(state, i)
    shuffled = state.clone()
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    for layer, carried in enumerate(state.layers):
        if isinstance(carried, MLAState):
            shuffled.layers[layer] = MLAState(carried.keys[order], carried.values[order])
    torch.testing.assert_close(model.step(shuffled, 5), model.step(state, 5), rtol=0, atol=1e-4)


def test_routed_scaling_factor_and_weight_sum_cancel_in_the_latent_norm(load_reference: Load) -> None:
    """Fact sheet 11: log-probs cannot see either, so the routing weights need their own test."""
    model, ids = load_reference("default", dtype=torch.float64), tokens(6, 384)
    before = model.logprobs(ids)
    moe = model.config.moe
    for change in ({"routed_scaling_factor": 2.5}, {"renormalize": False}):
        model.config = dataclasses.replace(model.config, moe=dataclasses.replace(moe, **change))
        torch.testing.assert_close(model.logprobs(ids), before, rtol=0, atol=2e-3)
    without_norm = dataclasses.replace(moe, use_norm=False)
    model.config = dataclasses.replace(model.config, moe=without_norm)
    plain = model.logprobs(ids)
    model.config = dataclasses.replace(model.config, moe=dataclasses.replace(without_norm, routed_scaling_factor=2.5))
    assert float((model.logprobs(ids) - plain).abs().max()) > 0.1


def test_without_a_block_size_residuals_are_ordinary(load_reference: Load) -> None:
    model = load_reference("default")
    model.config = dataclasses.replace(model.config, attn_res_block_size=None)
    trace = model.trace([7, 8])
    stream = model.weights["model.embed_tokens.weight"][[7, 8]]
    for layer in range(9):
        torch.testing.assert_close(trace[f"layers.{layer}.attention_mix"], stream)
        stream = stream + trace[f"layers.{layer}.attention_output"]
        torch.testing.assert_close(trace[f"layers.{layer}.mlp_mix"], stream)
        stream = stream + trace[f"layers.{layer}.mlp_output"]
    torch.testing.assert_close(trace["final_mix"], stream)


def test_stored_padding_of_a_log_is_optional_and_ignored(load_reference: Load) -> None:
    model, ids = load_reference("default"), tokens(4, 384)
    before = model.logprobs(ids)
    for name, tensor in model.weights.items():
        if name.endswith("A_log"):
            model.weights[name] = tensor[:4]
    assert torch.equal(model.logprobs(ids), before)


def test_tied_embeddings_stand_in_for_the_head(load_reference: Load) -> None:
    model, ids = load_reference("default"), [1, 2]
    model.weights["lm_head.weight"] = model.weights["model.embed_tokens.weight"]
    untied = model.logprobs(ids)
    del model.weights["lm_head.weight"]
    model.config = dataclasses.replace(model.config, tie_word_embeddings=True)
    assert torch.equal(model.logprobs(ids), untied)


def test_mla_without_output_gate_needs_no_gate_weights(load_reference: Load) -> None:
    model = load_reference("default")
    model.config = dataclasses.replace(model.config, mla=dataclasses.replace(model.config.mla, use_output_gate=False))
    for layer in model.config.full_attention_layers:
        del model.weights[f"model.layers.{layer}.self_attn.g_proj.weight"]
    assert bool(model.logprobs([1, 2]).isfinite().all())


def test_a_missing_tensor_is_named(load_reference: Load) -> None:
    model = load_reference("default")
    del model.weights["model.layers.3.self_attn.q_a_proj.weight"]
    with pytest.raises(CheckpointError, match=r"language_model\.model\.layers\.3\.self_attn\.q_a_proj\.weight"):
        model.logprobs([1])


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="give the folder of a downloaded checkpoint"):
        load_text_weights(tmp_path, torch.float32)
