"""Fit the ``chat`` preset: a tiny K3 that holds a small conversation, closes its channels and calls tools.

    python -m sglang_k3.testing.fit                      a quarter of an hour on one core; writes into the package
    python -m sglang_k3.testing.fit --steps 200 --data /tmp/fit

Matrices are trained with Muon, everything else with Adam; the loss is the cross entropy of what the assistant writes.
The files serve on every machine, but fitting again gives other bytes: sums are not taken in the same order everywhere.
After a fit raise ``GENERATOR_VERSION`` in ``tiny`` and run the tests.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm

from sglang_k3.config import K3Config
from sglang_k3.testing import fitted
from sglang_k3.testing.fit_data import Speaker, conversations
from sglang_k3.testing.fit_model import FitModel
from sglang_k3.testing.fit_render import FIXED_TEXTS, SegmentTokenizer, training_sequence, whole_segments
from sglang_k3.testing.fit_start import initial_weights
from sglang_k3.testing.fit_vocabulary import learn_merges
from sglang_k3.testing.fit_world import GROUPS, NUMBERS, SKIES
from sglang_k3.testing.presets import TinyPreset, find_preset, published_config
from sglang_k3.testing.random_weights import RandomWeights
from sglang_k3.testing.tokenizer import Merges, build_tokenizer

PRESET = "chat"
NUM_WORD_MERGES = 670
VOCABULARY_CONVERSATIONS = 3000
WORLD_WEIGHT = 2000  # how often the words of the world are counted, so that each is one token
POOL = 512  # conversations that are sorted by length before they are cut into batches
BALANCE_RATE = 0.002  # of the routing bias per step, against overloaded experts


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How long, how much at once and how fast.

    Attributes:
        steps: optimizer steps.
        batch_tokens: tokens of a batch, padding included.
        muon_rate, adam_rate: learning rates after the warm-up.
    """

    steps: int = 2600
    batch_tokens: int = 2048
    muon_rate: float = 0.005
    adam_rate: float = 0.004
    warmup: int = 50

    def factor(self, step: int) -> float:
        """Of the learning rates: up, flat, then down to zero over the second half."""
        return min(1.0, (step + 1) / self.warmup, 2.0 * (1.0 - step / self.steps))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m sglang_k3.testing.fit", description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=Schedule.steps, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and conversations (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: %(default)s)")
    parser.add_argument("--data", type=Path, default=fitted.DATA, help="folder to write to (default: the package's)")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    merges = vocabulary_merges()
    model = fit(find_preset(PRESET), merges, Schedule(steps=args.steps), seed=args.seed)
    paths = [fitted.save_merges(PRESET, merges, args.data), *fitted.save(PRESET, model.published(), args.data)]
    for path in paths:
        tqdm.write(f"wrote {path} ({path.stat().st_size / 1e3:.0f} kB)")


def vocabulary_merges() -> list[tuple[str, str]]:
    """The tokenizer merges that suit the conversations."""
    made = conversations(VOCABULARY_CONVERSATIONS, seed=0)
    segments = itertools.chain.from_iterable(whole_segments(conversation)[0] for conversation in made)
    texts = collections.Counter(segment.text for segment in segments if not segment.is_control)
    words = [word for group in GROUPS if group is not NUMBERS for word in group]
    for text in [word if word[0].isupper() else f" {word}" for word in words] + SKIES:
        texts[text] += WORLD_WEIGHT
    numbers = [number for number in NUMBERS if len(number) > 1]
    return learn_merges(texts, [*FIXED_TEXTS, *numbers], num_word_merges=NUM_WORD_MERGES)


def fit(preset: TinyPreset, merges: Merges, schedule: Schedule, *, seed: int) -> FitModel:
    """Train from scratch, with a progress bar on standard error."""
    model = new_model(preset, merges, seed=seed)
    optimizer = Optimizer(model, schedule)
    tokenizer = SegmentTokenizer(build_tokenizer(preset.vocab_size, merges))
    data = batches(tokenizer, schedule.batch_tokens, seed=seed + 1)
    with tqdm(range(schedule.steps), unit="step", dynamic_ncols=True, mininterval=1.0) as bar:
        recent: collections.deque[float] = collections.deque(maxlen=50)
        for step in bar:
            ids, learned = next(data)
            loss = batch_loss(model, ids, learned)
            loss.backward()
            optimizer.step(schedule.factor(step))
            recent.append(loss.item())
            bar.set_postfix_str(f"loss {sum(recent) / len(recent):.4f}")
    return model


def new_model(preset: TinyPreset, merges: Merges, *, seed: int) -> FitModel:
    """A model of these sizes to start from."""
    json_config = published_config(preset, merges=merges, dtype="float32", packed_experts=True, vision=False)
    config = K3Config.from_dict(json_config)
    named = RandomWeights(preset, seed=seed, packed_experts=False).text()
    shapes = {name.removeprefix("language_model."): tensor.shape for name, tensor in named.items()}
    tokenizer = build_tokenizer(preset.vocab_size, merges)
    spellings = [tokenizer.decode([i], skip_special_tokens=False) for i in range(preset.vocab_size)]
    return FitModel(config, initial_weights(config, shapes, spellings, GROUPS, seed=seed))


def batches(tokenizer: SegmentTokenizer, batch_tokens: int, *, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Without end: ids ``[B, T]`` and where the assistant wrote them, bool ``[B, T]``; sequences of like length."""
    speaker, shuffle = Speaker(seed), random.Random(seed)
    while True:
        pool = [training_sequence(speaker.conversation(), tokenizer) for _ in range(POOL)]
        pool.sort(key=lambda sequence: len(sequence[0]))
        cut: list[list[tuple[list[int], list[bool]]]] = [[]]
        for sequence in pool:
            if len(sequence[0]) * (len(cut[-1]) + 1) > batch_tokens and cut[-1]:
                cut.append([])
            cut[-1].append(sequence)
        shuffle.shuffle(cut)
        for batch in cut:
            length = max(len(ids) for ids, _ in batch)
            ids = [row + [0] * (length - len(row)) for row, _ in batch]
            learned = [row + [False] * (length - len(row)) for _, row in batch]
            yield torch.tensor(ids), torch.tensor(learned)


def batch_loss(model: FitModel, ids: Tensor, learned: Tensor) -> Tensor:
    """Mean cross entropy of the learned tokens."""
    logits = model(ids[:, :-1], learned[:, 1:])
    return functional.cross_entropy(logits, ids[:, 1:][learned[:, 1:]])


class Optimizer:
    """Muon for hidden matrices, Adam for the rest, and the routing bias that keeps experts evenly loaded."""

    def __init__(self, model: FitModel, schedule: Schedule) -> None:
        self.model, self.schedule = model, schedule
        named = {name: p for name, p in model.params.items() if p.requires_grad}
        matrices = {n: p for n, p in named.items() if p.ndim >= 2 and min(p.shape) > 4 and "embed" not in n}
        del matrices["lm_head/weight"]
        self.adam = torch.optim.Adam([p for n, p in named.items() if n not in matrices], betas=(0.9, 0.98))
        by_shape: dict[torch.Size, list[Tensor]] = collections.defaultdict(list)
        for parameter in matrices.values():
            by_shape[parameter.shape].append(parameter)
        self.groups = list(by_shape.values())
        self.momenta = [torch.zeros(len(group), *group[0].shape) for group in self.groups]

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """Use and clear the gradients; ``factor`` scales both learning rates."""
        self.adam.param_groups[0]["lr"] = self.schedule.adam_rate * factor
        self.adam.step()
        for group, momentum in zip(self.groups, self.momenta, strict=True):
            gradient = torch.stack([p.grad for p in group if p.grad is not None])
            momentum.mul_(0.95).add_(gradient)
            rows, columns = gradient.shape[-2:]
            size = self.schedule.muon_rate * factor * max(1.0, rows / columns) ** 0.5
            update = orthogonalized(gradient + 0.95 * momentum)
            for parameter, change in zip(group, update, strict=True):
                parameter.sub_(size * change)
        for name, load in self.model.expert_load.items():
            bias = self.model.weight(f"{name}.gate.e_score_correction_bias")
            bias += BALANCE_RATE * factor * torch.sign(load.mean() - load)
        self.model.zero_grad()


def orthogonalized(matrices: Tensor) -> Tensor:
    """Each ``[..., R, C]`` with its singular values brought near one: five Newton-Schulz steps, as Muon does.

    Coefficients: https://kellerjordan.github.io/posts/muon/
    """
    x: Tensor = matrices / (matrices.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if is_tall else x


if __name__ == "__main__":
    main()
