"""A model whose state is an exact function of the tokens that it has absorbed, on pools as the real one has them.

Per layer the state is a hash folded over the tokens, and a count of them; beside it a window of the last three, as a
convolution has. The KV of a token is a hash of everything up to it. The next token depends on all of these, and so a
state of another depth, another window or one wrong location changes the answer. What was never written is NaN.

Legend: L layers, S slots, N KV locations.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch

from sglang_k3.mem.state_slots import SlotId

LAYERS = 2
WINDOW = 3
VOCABULARY = 3  # so few that unrelated prompts share their beginnings
_PRIME = 2**31 - 1
_FACTORS = (48271, 69621)  # below 2**20: products stay exact in fp64


@dataclasses.dataclass(frozen=True)
class State:
    """After ``count`` tokens."""

    hashes: tuple[int, ...] = (0,) * LAYERS
    window: tuple[int, ...] = (0,) * WINDOW
    count: int = 0

    def absorb(self, token: int) -> State:
        x = token + 1 + sum((i + 2) * past for i, past in enumerate(self.window))
        hashes = tuple((h * factor + x) % _PRIME for h, factor in zip(self.hashes, _FACTORS, strict=True))
        return State(hashes, (*self.window[1:], token), self.count + 1)


@dataclasses.dataclass(frozen=True)
class Row:
    """One request's part of a forward: tokens ``start .. end`` of ``tokens``, which may end before that by then."""

    slot_id: SlotId
    start: int
    end: int
    tokens: list[int]
    kv_locs: torch.Tensor
    inner: tuple[SlotId, int] | None = None


class FakeModel:
    """The pools and the forward pass over them.

    Attributes:
        recurrent: hash and count per layer and slot ``[L, S, 2]``, fp64.
        conv: last tokens ``[L, S, 3]``, fp32.
        kv: ``[N]``, fp64.
    """

    def __init__(self, num_slots: int, num_locs: int) -> None:
        self.recurrent = torch.full((LAYERS, num_slots, 2), torch.nan, dtype=torch.float64)
        self.conv = torch.full((LAYERS, num_slots, WINDOW), torch.nan)
        self.kv = torch.full((num_locs,), torch.nan, dtype=torch.float64)

    def forward(self, row: Row) -> int:
        """The next token."""
        state = self.read(row.slot_id) if row.start else State()
        assert state.count == row.start, f"I1: slot {row.slot_id} encodes {state.count} tokens, not {row.start}"
        assert len(row.tokens) >= row.end, "a token is absorbed before it was sampled"
        new_kv = []
        for token in row.tokens[row.start : row.end]:
            state = state.absorb(token)
            new_kv.append(_kv_of(state))
            if row.inner is not None and state.count == row.inner[1]:
                self._write(row.inner[0], state)
        self._write(row.slot_id, state)
        self.kv[row.kv_locs[row.start : row.end]] = torch.tensor(new_kv, dtype=torch.float64)
        return next_token(state, self.kv[row.kv_locs[: row.end]].sum().item())

    def read(self, slot_id: SlotId) -> State:
        hashes, counts = self.recurrent[:, slot_id].T.tolist()
        windows = self.conv[:, slot_id].tolist()
        assert counts[0] == counts[1] and windows[0] == windows[1], f"slot {slot_id} is torn or NaN: {counts} {windows}"
        return State(tuple(map(int, hashes)), tuple(map(int, windows[0])), int(counts[0]))

    def _write(self, slot_id: SlotId, state: State) -> None:
        self.recurrent[:, slot_id] = torch.tensor([[h, state.count] for h in state.hashes], dtype=torch.float64)
        self.conv[:, slot_id] = torch.tensor(state.window, dtype=torch.float32)


def next_token(state: State, kv_sum: float) -> int:
    assert kv_sum == kv_sum, "a KV location was read that nobody has written"
    return (sum(state.hashes) + state.window[0] + int(kv_sum)) // 7 % VOCABULARY


def _kv_of(state: State) -> int:
    return state.hashes[0] % (1 << 20)


@functools.lru_cache(maxsize=4096)
def answer_alone(prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    """What a request gets that has the model for itself, without any pool: the oracle."""
    state, kv_sum, tokens = State(), 0, [*prompt]
    for i in range(len(prompt) + num_tokens - 1):
        state = state.absorb(tokens[i])
        kv_sum += _kv_of(state)
        if i >= len(prompt) - 1:
            tokens.append(next_token(state, kv_sum))
    return tokens[len(prompt) :]


def state_after(tokens: Sequence[int]) -> State:
    state = State()
    for token in tokens:
        state = state.absorb(token)
    return state
