"""Greedy continuations of the reference: sequences of which every prefix is a prompt with a known answer.

A sequence is some random tokens and what the reference writes behind them. Cut anywhere behind the random tokens, it is
a prompt, and what follows the cut is the answer, so a few sequences give thousands of prompts that share long prefixes.
The reference takes milliseconds for a token; what it wrote is kept in a file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
from pathlib import Path

from filelock import FileLock
from tqdm import tqdm

from sglang_k3.testing.reference import ReferenceModel, ReferenceState

# Distance of the reference's two best logits below which the noise of a float32 run could choose the other token.
SURE_GAP = 1e-3


@dataclasses.dataclass(frozen=True)
class SequenceSet:
    """What sequences to make.

    Attributes:
        stem: random tokens that all sequences begin with, at least 1.
        branch: up to so many random tokens more in each.
        written: tokens that the reference writes behind, at most: a sequence ends before the first unsure one.
    """

    count: int = 8
    stem: int = 96
    branch: int = 200
    written: int = 256
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Sequence:
    """Attributes:
    ids: random tokens, then what the reference writes.
    given: how many are random.
    logprobs: of the written ones.
    """

    ids: list[int]
    given: int
    logprobs: list[float]


def ensure_continuations(folder: Path, wanted: SequenceSet, cache: Path) -> list[Sequence]:
    """The sequences for the checkpoint in ``folder``, from a file in ``cache`` or computed now."""
    key = hashlib.sha256(repr((wanted, SURE_GAP)).encode())
    for file in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        key.update(file.read_bytes())
    path = cache / f"continuations-{key.hexdigest()[:16]}.json"
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        if not path.exists():
            sequences = write_continuations(ReferenceModel.from_checkpoint(folder), wanted)
            unfinished = path.with_suffix(".part")
            unfinished.write_text(json.dumps([dataclasses.asdict(s) for s in sequences]))
            unfinished.replace(path)
    return [Sequence(**entry) for entry in json.loads(path.read_text())]


def write_continuations(model: ReferenceModel, wanted: SequenceSet) -> list[Sequence]:
    """Let the reference write; the same set gives the same sequences."""
    rng = random.Random(wanted.seed)
    vocab = range(model.config.vocab_size)
    stem = rng.choices(vocab, k=wanted.stem)
    trunk = model.new_state()
    for token in stem:
        model.step(trunk, token)
    sequences = []
    for n in tqdm(range(wanted.count), desc="reference", unit="sequence"):
        # Lengths are spread evenly, so that some sequences are short and some long whatever the seed.
        branch = rng.choices(vocab, k=1 + n * (wanted.branch - 1) // max(1, wanted.count - 1))
        ids, logprobs = _continue(model, trunk.clone(), branch, wanted.written)
        sequences.append(Sequence([*stem, *branch, *ids], given=len(stem) + len(branch), logprobs=logprobs))
    return sequences


def _continue(
    model: ReferenceModel, state: ReferenceState, tokens: list[int], limit: int
) -> tuple[list[int], list[float]]:
    """Greedy tokens behind ``tokens`` and their log-probs, up to the first unsure one."""
    logits = [model.step(state, token) for token in tokens][-1]
    ids: list[int] = []
    logprobs: list[float] = []
    while len(ids) < limit:
        best = logits.log_softmax(-1).topk(2)
        if best.values[0] - best.values[1] < SURE_GAP:
            break
        ids.append(int(best.indices[0]))
        logprobs.append(float(best.values[0]))
        logits = model.step(state, ids[-1])
    return ids, logprobs
