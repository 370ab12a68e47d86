"""What fits the ``chat`` preset: the batched model is the reference, its data is what a client would send."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from sglang_k3.chat.encoding import encode, render
from sglang_k3.config import K3Config
from sglang_k3.testing import fit, fitted
from sglang_k3.testing.fit_data import TOPICS, Speaker, conversations
from sglang_k3.testing.fit_model import FitModel, Situ
from sglang_k3.testing.fit_render import FIXED_TEXTS, SegmentTokenizer, answer_text, prompt_segments, training_sequence
from sglang_k3.testing.fit_vocabulary import learn_merges
from sglang_k3.testing.presets import PRESETS, published_config
from sglang_k3.testing.random_weights import RandomWeights
from sglang_k3.testing.reference import ReferenceModel
from sglang_k3.testing.tokenizer import build_tokenizer

LENGTH = 45  # three chunks of the delta rule, the last one not full


def random_model(preset: str) -> tuple[K3Config, dict[str, Tensor]]:
    sizes = PRESETS[preset]
    config = published_config(sizes, dtype="float32", packed_experts=False, vision=False)
    tensors = RandomWeights(sizes, seed=0, packed_experts=False).text()
    return K3Config.from_dict(config), {k.removeprefix("language_model."): t.float() for k, t in tensors.items()}


def random_ids(vocab_size: int) -> Tensor:
    return torch.randint(vocab_size, (2, LENGTH), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """These tensors are too small for several, and ``fit`` sets the number for the whole process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tokenizer() -> SegmentTokenizer:
    preset = PRESETS["chat"]
    return SegmentTokenizer(build_tokenizer(preset.vocab_size, preset.learned_merges))


@pytest.mark.parametrize("preset", ["default", "odd", "chat"])
def test_batched_forward_is_the_reference(preset: str) -> None:
    config, weights = random_model(preset)
    ids = random_ids(config.vocab_size)
    with torch.no_grad():
        batched = torch.log_softmax(FitModel(config, weights, quantize=False)(ids), dim=-1)
    reference = ReferenceModel(config, weights)
    for row, logprobs in zip(ids.tolist(), batched, strict=True):
        torch.testing.assert_close(logprobs, reference.logprobs(row), atol=1e-4, rtol=0)


def test_what_is_trained_is_what_ships(tmp_path: Path) -> None:
    config, weights = random_model("chat")
    model = FitModel(config, weights)
    ids = random_ids(config.vocab_size)[:1]
    with torch.no_grad():
        batched = torch.log_softmax(model(ids)[0], dim=-1)
    fitted.save("x", model.published(), tmp_path)
    shipped = fitted.load("x", packed_experts=False, folder=tmp_path)
    assert fitted_names(weights).keys() == shipped.keys()
    read = {name.removeprefix("language_model."): tensor.float() for name, tensor in shipped.items()}
    torch.testing.assert_close(ReferenceModel(config, read).logprobs(ids[0].tolist()), batched, atol=1e-4, rtol=0)


def test_logits_are_given_where_they_are_wanted() -> None:
    config, weights = random_model("default")
    model, ids = FitModel(config, weights), random_ids(config.vocab_size)
    wanted = torch.zeros_like(ids, dtype=torch.bool)
    wanted[0, 3] = wanted[1, 40] = True
    with torch.no_grad():
        torch.testing.assert_close(model(ids, wanted), model(ids)[wanted])


@pytest.mark.parametrize("linear_beta", [25.0, None])
def test_derivative_of_situ(linear_beta: float | None) -> None:
    gate = torch.linspace(-9, 9, 7, dtype=torch.float64, requires_grad=True)
    up = torch.linspace(60, -40, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda g, u: Situ.apply(g, u, 4.0, linear_beta), (gate, up))


def test_stored_matrices_are_exact_in_bfloat16() -> None:
    weight = torch.randn(40, 96, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 3, 40)[:, None]
    weight[7] = 0
    stored = fitted.round_trip("model.x.weight", weight)
    assert torch.equal(stored.bfloat16().float(), stored)
    assert torch.equal(fitted.round_trip("model.x.weight", stored), stored)
    error = (stored - weight).abs().amax(1)
    assert bool((error <= weight.abs().amax(1) / 127).all())


def test_two_steps_of_fitting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "VOCABULARY_CONVERSATIONS", 60)
    monkeypatch.setattr(fit, "NUM_WORD_MERGES", 50)
    monkeypatch.setattr(fit, "POOL", 16)
    fit.main(["--steps", "2", "--data", str(tmp_path)])
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in fitted.DATA.iterdir()}
    made = fitted.load("chat", packed_experts=True, folder=tmp_path)
    shipped = fitted.load("chat", packed_experts=True)
    assert {name: (t.shape, t.dtype) for name, t in made.items()} == {n: (t.shape, t.dtype) for n, t in shipped.items()}
    start = fitted_names(fit.new_model(PRESETS["chat"], (), seed=0).published())
    projections = [name for name in start if name.endswith("_proj.weight") and ".self_attn." in name]
    assert not [name for name in projections if torch.equal(made[name].float(), start[name])]


def fitted_names(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"language_model.{name}": tensor for name, tensor in weights.items()}


def test_prompts_are_those_of_the_encoding_and_answers_are_learned(tokenizer: SegmentTokenizer) -> None:
    for made in conversations(60, seed=5):
        ids, learned = training_sequence(made, tokenizer)
        prompt = encode(prompt_segments(made), tokenizer)
        assert ids[: len(prompt)] == prompt
        answer = tokenizer.tokenizer.decode(ids[len(prompt) :], skip_special_tokens=False)
        assert answer == answer_text(made)
        assert all(learned[len(prompt) :])
        history = sum(turn["role"] == "assistant" and turn.get("learn", True) for turn in made.messages[:-1])
        end = tokenizer.control_id("<|end_of_msg|>")
        assert sum(learn and i == end for i, learn in zip(ids, learned, strict=True)) == history + 1


def test_history_is_spelled_as_it_was_written() -> None:
    speaker = Speaker(2)
    made = next(c for c in (speaker.conversation("weather") for _ in range(99)) if c.messages[-1].get("tool_calls"))
    stub = "".join(s.text for s in render([], thinking=made.thinking, effort=None))
    continued = render([*made.messages], tools=made.tools, thinking=made.thinking, effort=made.effort)
    assert "".join(s.text for s in continued).endswith(stub + answer_text(made) + stub)


def test_held_out_phrasings_are_never_trained_on() -> None:
    def questions(held_out: bool) -> set[str]:
        speaker = Speaker(0, held_out=held_out)
        speaker.rng.random = lambda: 0.99  # type: ignore[method-assign]  # no variation
        return {speaker.phrase("weather", city="Rome") for _ in range(300)}

    assert questions(held_out=True) & questions(held_out=False) == set()


def test_a_seed_gives_the_same_conversations_and_every_topic_works() -> None:
    assert list(conversations(20, seed=3)) == list(conversations(20, seed=3)) != list(conversations(20, seed=4))
    for topic in TOPICS:
        assert Speaker(0).conversation(topic).messages[-1]["role"] == "assistant"


def test_learned_merges() -> None:
    fixed = "A fixed text, said whole."
    merges = learn_merges({"the cat": 2, "The mat 12": 1}, [fixed], num_word_merges=50)
    learned = build_tokenizer(256 + 400, merges)
    assert tokens(learned, "the cat") == ["the", " cat"]
    assert tokens(learned, " 12") == [" ", "1", "2"], "digits stay apart"
    assert tokens(learned, fixed) == [fixed]
    assert tokens(learned, "zzz\u00e9")[:3] == ["z", "z", "z"], "bytes remain"


def test_vocabulary_of_the_preset(tokenizer: SegmentTokenizer) -> None:
    for text in FIXED_TEXTS:
        assert len(tokenizer.encode_ordinary(text)) <= 3, text
    paris = tokenizer.encode_ordinary("Paris")
    assert len(paris) == 1
    assert tokenizer.encode_ordinary("weather in Paris?")[-2:-1] == paris, "a name is the same token everywhere"
    apart = [i for text in (" role", '="', "user", '"') for i in tokenizer.encode_ordinary(text)]
    assert tokenizer.encode_ordinary(' role="user"') != apart, "merges cross the borders of segments"


def tokens(tokenizer: Tokenizer, text: str) -> list[str]:
    return [text[start:end] for start, end in tokenizer.encode(text).offsets]
