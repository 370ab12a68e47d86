"""The KDA backend over a state pool: a sequence cut anywhere gives the same bits, and snapshots are at their depth."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
from sglang.srt.managers.schedule_batch import ScheduleBatch
from torch import Tensor

from sglang_k3.config import K3Config
from sglang_k3.host.kda_backend import K3KDABackend
from sglang_k3.models.text.kda import KimiDeltaAttention
from tests.kit.compare import assert_bitwise
from tests.model.fakes import NUM_STATE_SLOTS, FakeRunner, Request
from tests.model.harness import tiny_k3

pytestmark = pytest.mark.sglang

LAYER = 2  # a KDA layer with others before and after it in the pool
LENGTH = 23


@dataclasses.dataclass(frozen=True)
class Sequence:
    """What the projections give a layer for each token: ``[T, 3 H K]``, ``[T, H K]`` and ``[T, H]``."""

    mixed_qkv: Tensor
    a: Tensor
    b: Tensor

    @classmethod
    def random(cls, config: K3Config, num_tokens: int = LENGTH) -> Sequence:
        width = config.kda.width
        return cls(
            torch.randn(num_tokens, 3 * width),
            torch.randn(num_tokens, width),
            torch.randn(num_tokens, config.kda.num_heads),
        )

    def tokens(self, start: int, stop: int) -> Sequence:
        return Sequence(self.mixed_qkv[start:stop], self.a[start:stop], self.b[start:stop])


class Bench:
    """One KDA layer over a fresh runner; a request's tokens always come from its own sequence."""

    def __init__(self, preset: str = "default") -> None:
        tiny = tiny_k3(preset)
        module = KimiDeltaAttention(tiny.config, LAYER)
        tiny.load_into(module, f"layers.{LAYER}.self_attn.")
        self.layer: RadixLinearAttention = module.attn
        self.runner = FakeRunner(tiny.config)
        self.backend = K3KDABackend(self.runner)
        self.place = tiny.config.kda_layers.index(LAYER)

    def run(self, batch: SimpleNamespace, inputs: list[Sequence]) -> list[Tensor]:
        """Outputs ``[T, H, V]`` of each request."""
        self.backend.init_forward_metadata(batch)
        forward = self.backend.forward_decode if batch.forward_mode.is_decode() else self.backend.forward_extend
        fields = (torch.cat([getattr(s, name) for s in inputs]) for name in ("mixed_qkv", "a", "b"))
        return list(forward(self.layer, batch, *fields).split([len(s.b) for s in inputs]))

    def extend(self, requests: list[Request], sequences: list[Sequence], lens: list[int]) -> list[Tensor]:
        inputs = [s.tokens(r.length, r.length + n) for r, s, n in zip(requests, sequences, lens, strict=True)]
        return self.run(self.runner.extend(requests, lens), inputs)

    def decode(self, requests: list[Request], sequences: list[Sequence]) -> list[Tensor]:
        inputs = [s.tokens(r.length, r.length + 1) for r, s in zip(requests, sequences, strict=True)]
        return self.run(self.runner.decode(requests), inputs)

    def states(self, slot: int) -> tuple[Tensor, Tensor]:
        """Copies of a slot's conv window and recurrent state in this layer."""
        return self.runner.conv[self.place, slot].clone(), self.runner.temporal[self.place, slot].clone()


def states_after(sequence: Sequence, num_tokens: int, preset: str = "default") -> tuple[Tensor, Tensor]:
    """Window and state after exactly so many tokens, from one extend on a machine of its own."""
    bench = Bench(preset)
    request = bench.runner.new_request()
    bench.extend([request], [sequence], [num_tokens])
    return bench.states(request.state_slot)


def assert_states(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], what: str) -> None:
    assert expected[1].isfinite().all() and expected[1].any()
    assert_bitwise(actual[0], expected[0], f"{what}: conv window")
    assert_bitwise(actual[1], expected[1], f"{what}: recurrent state")


@pytest.mark.parametrize("preset", ["default", "odd"])
@pytest.mark.parametrize(
    "lens", [[1] * LENGTH, [7, 16], [2, 2, 19], [22, 1]], ids=["one by one", "7, 16", "2, 2, 19", "22, 1"]
)
def test_an_extend_in_pieces_is_one_extend(lens: list[int], preset: str) -> None:
    """Pieces shorter than the conv window too; the slot's old content, NaN here, does not matter."""
    sequence = Sequence.random(tiny_k3(preset).config)
    whole, pieces = Bench(preset), Bench(preset)
    request = whole.runner.new_request()
    (expected,) = whole.extend([request], [sequence], [LENGTH])
    request = pieces.runner.new_request()
    actual = torch.cat([pieces.extend([request], [sequence], [n])[0] for n in lens])
    assert expected.isfinite().all()
    assert_bitwise(actual, expected, "outputs")
    assert_states(pieces.states(request.state_slot), whole.states(request.state_slot), "last state")


@pytest.mark.parametrize("preset", ["default", "odd"])
def test_decode_after_extend_is_a_longer_extend(preset: str) -> None:
    sequence = Sequence.random(tiny_k3(preset).config)
    whole, steps = Bench(preset), Bench(preset)
    request = whole.runner.new_request()
    (expected,) = whole.extend([request], [sequence], [LENGTH])
    request = steps.runner.new_request()
    parts = steps.extend([request], [sequence], [LENGTH - 6])
    parts += [steps.decode([request], [sequence])[0] for _ in range(6)]
    assert_bitwise(torch.cat(parts), expected, "outputs")
    assert_states(steps.states(request.state_slot), whole.states(request.state_slot), "last state")


def test_a_batch_is_its_requests_one_by_one() -> None:
    """Mixed lengths and depths, in extend and in decode; each request keeps to its own slot."""
    config = tiny_k3().config
    sequences = [Sequence.random(config) for _ in range(4)]
    together = Bench()
    requests = [together.runner.new_request() for _ in sequences]
    first = together.extend(requests[:2], sequences[:2], [5, 9])
    second = together.extend(requests, sequences, [3, 1, 12, 2])
    third = together.decode(requests[::-1], sequences[::-1])[::-1]
    outputs = [torch.cat(parts) for parts in zip([*first, first[0][:0], first[0][:0]], second, third, strict=True)]
    for request, sequence, output in zip(requests, sequences, outputs, strict=True):
        alone = Bench()
        one = alone.runner.new_request()
        assert_bitwise(output, alone.extend([one], [sequence], [request.length])[0], "outputs")
        assert_states(together.states(request.state_slot), alone.states(one.state_slot), "last state")
    used = {request.state_slot for request in requests}
    for slot in set(range(NUM_STATE_SLOTS)) - used:
        assert all(state.isnan().all() for state in together.states(slot)), f"slot {slot} was written"


def test_other_layers_are_left_alone() -> None:
    bench = Bench()
    request = bench.runner.new_request()
    sequence = Sequence.random(tiny_k3().config)
    bench.extend([request], [sequence], [5])
    bench.decode([request], [sequence])
    others = [i for i in range(len(bench.runner.conv)) if i != bench.place]
    assert bench.runner.conv[others].isnan().all() and bench.runner.temporal[others].isnan().all()


def host_wants(
    request: Request, extend_len: int, target: int, branching_seqlen: int | None = None
) -> tuple[bool, int, int]:
    """Ask the host's scheduler: mask and ``mamba_track_seqlens`` of the batch, and the depth that it has recorded."""
    scheduled = SimpleNamespace(
        extend_range=SimpleNamespace(length=extend_len),
        prefix_indices=range(request.length),
        mamba_ping_pong_track_buffer=torch.tensor([target, 0]),
        mamba_next_track_idx=0,
        mamba_branching_seqlen=branching_seqlen,
        mamba_last_track_seqlen=None,
    )
    batch = SimpleNamespace(req_to_token_pool=SimpleNamespace(get_mamba_ping_pong_other_idx=lambda index: 1 - index))
    entry = ScheduleBatch._mamba_radix_cache_v2_req_prepare_for_extend(batch, scheduled)
    return entry.track_mask, entry.track_seqlen, scheduled.mamba_last_track_seqlen


@pytest.mark.parametrize("preset", ["default", "odd"])
@pytest.mark.parametrize(
    ("prefix_len", "extend_len", "branching_seqlen", "depth"),
    [
        pytest.param(0, 8, None, 8, id="aligned end"),
        pytest.param(0, 11, None, 8, id="inside"),
        pytest.param(8, 4, None, 12, id="aligned end behind a prefix"),
        pytest.param(8, 7, None, 12, id="inside, behind a prefix"),
        pytest.param(6, 5, None, 10, id="behind a prefix off the grid"),
        pytest.param(0, 12, 4, 4, id="fork, asked for by one more"),
        pytest.param(4, 15, 8, 8, id="fork behind a prefix"),
        pytest.param(4, 15, 16, 16, id="fork at the last depth"),
        pytest.param(4, 15, 7, 16, id="fork off the grid is not kept"),
        pytest.param(4, 15, 4, 16, id="fork in the prefix is not kept"),
        pytest.param(0, 4, None, 4, id="one step of the grid"),
    ],
)
def test_a_snapshot_is_the_state_at_the_depth_that_the_host_records(
    preset: str,
    prefix_len: int,
    extend_len: int,
    branching_seqlen: int | None,
    depth: int,
) -> None:
    """The window may reach back into the prefix; the working slot goes on to the end all the same."""
    sequence = Sequence.random(tiny_k3(preset).config)
    bench = Bench(preset)
    request, target = bench.runner.new_request(), bench.runner.new_state_slot()
    if prefix_len:
        bench.extend([request], [sequence], [prefix_len])
    mask, seqlen, recorded = host_wants(request, extend_len, target, branching_seqlen)
    assert (mask, recorded) == (True, depth)
    batch = bench.runner.extend([request], [extend_len])
    batch.mamba_track_mask = torch.tensor([mask])
    batch.mamba_track_seqlens = torch.tensor([seqlen])
    batch.mamba_track_indices = torch.tensor([target])
    bench.run(batch, [sequence.tokens(prefix_len, prefix_len + extend_len)])
    assert_states(bench.states(target), states_after(sequence, depth, preset), "snapshot")
    end = states_after(sequence, prefix_len + extend_len, preset)
    assert_states(bench.states(request.state_slot), end, "working slot")


@pytest.mark.parametrize("depth", range(6, 16))
def test_k3_s_own_cache_asks_for_exact_depths(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a prefix off the grid, at the end of it, inside the extend and at its end."""
    sequence, bench = Sequence.random(tiny_k3().config), Bench()
    monkeypatch.setattr(bench.backend, "depth_unit", 1)
    request, target = bench.runner.new_request(), bench.runner.new_state_slot()
    bench.extend([request], [sequence], [6])
    batch = bench.runner.extend([request], [9])
    batch.mamba_track_mask = torch.tensor([True])
    batch.mamba_track_seqlens = torch.tensor([depth])
    batch.mamba_track_indices = torch.tensor([target])
    bench.run(batch, [sequence.tokens(6, 15)])
    assert_states(bench.states(target), states_after(sequence, depth), "snapshot")
    assert_states(bench.states(request.state_slot), states_after(sequence, 15), "working slot")


def test_only_requests_that_are_due_are_snapshot() -> None:
    """One with a prefix and due, one too short, one that starts here and is due."""
    config, bench = tiny_k3().config, Bench()
    sequences = [Sequence.random(config) for _ in range(3)]
    requests, targets = (
        [bench.runner.new_request() for _ in sequences],
        [bench.runner.new_state_slot() for _ in sequences],
    )
    bench.extend(requests[:1], sequences[:1], [4])
    lens = [9, 3, 5]
    wants = [host_wants(r, n, t) for r, n, t in zip(requests, lens, targets, strict=True)]
    starts = [request.length for request in requests]
    batch = bench.runner.extend(requests, lens)
    batch.mamba_track_mask = torch.tensor([mask for mask, _, _ in wants])
    batch.mamba_track_seqlens = torch.tensor([seqlen for _, seqlen, _ in wants])
    batch.mamba_track_indices = torch.tensor(targets)
    assert batch.mamba_track_mask.tolist() == [True, False, True]
    bench.run(batch, [s.tokens(start, start + n) for s, start, n in zip(sequences, starts, lens, strict=True)])
    assert bench.backend.metadata.track_lens.tolist() == [8, -1, 4]
    assert_states(bench.states(targets[0]), states_after(sequences[0], 12), "first")
    assert all(state.isnan().all() for state in bench.states(targets[1]))
    assert_states(bench.states(targets[2]), states_after(sequences[2], 4), "third")


def test_a_decode_step_is_snapshot_after_it() -> None:
    """Bit for bit the working slot, for the requests whose mask is set, and at once for all layers of a step."""
    config, bench = tiny_k3().config, Bench()
    bench.backend.last_layer = LAYER
    sequences = [Sequence.random(config) for _ in range(2)]
    requests, targets = (
        [bench.runner.new_request() for _ in sequences],
        [bench.runner.new_state_slot() for _ in sequences],
    )
    bench.extend(requests, sequences, [7, 5])
    batch = bench.runner.decode(requests)
    batch.mamba_track_mask = torch.tensor([True, False])
    batch.mamba_track_indices = torch.tensor(targets)
    bench.run(batch, [sequences[0].tokens(7, 8), sequences[1].tokens(5, 6)])
    assert_states(bench.states(targets[0]), states_after(sequences[0], 8), "snapshot")
    assert all(state.isnan().all() for state in bench.states(targets[1]))
    for pool in (bench.runner.conv, bench.runner.temporal):
        assert_bitwise(pool[:, targets[0]], pool[:, requests[0].state_slot], "snapshot of every layer")


def test_snapshots_wait_for_the_last_kda_layer_of_the_stage() -> None:
    bench = Bench()
    assert bench.backend.last_layer == max(tiny_k3().config.kda_layers) > LAYER
    request, target = bench.runner.new_request(), bench.runner.new_state_slot()
    sequence = Sequence.random(tiny_k3().config)
    bench.extend([request], [sequence], [7])
    batch = bench.runner.decode([request])
    batch.mamba_track_mask, batch.mamba_track_indices = torch.tensor([True]), torch.tensor([target])
    bench.run(batch, [sequence.tokens(7, 8)])
    assert all(state.isnan().all() for state in bench.states(target))


def test_a_snapshot_serves_another_request() -> None:
    """Copied into a working slot it continues the sequence as if that had been computed there."""
    sequence, bench = Sequence.random(tiny_k3().config), Bench()
    first, second = bench.runner.new_request(), bench.runner.new_request()
    bench.extend([first], [sequence], [9])
    for pool in (bench.runner.conv, bench.runner.temporal):
        pool[:, second.state_slot] = pool[:, first.state_slot]
    second.length = 9
    bench.extend([second], [sequence], [6])
    assert_states(bench.states(second.state_slot), states_after(sequence, 15), "continued")


@pytest.mark.parametrize("mode", ["extend", "decode"])
def test_padding_rows_touch_nothing(mode: str) -> None:
    """Rows that the host adds to reach a batch size: their output is zero, and no slot changes for them."""
    config, bench = tiny_k3().config, Bench()
    sequences = [Sequence.random(config) for _ in range(3)]
    requests = [bench.runner.new_request() for _ in sequences]
    bench.extend(requests, sequences, [5, 5, 5])
    before = [bench.states(slot) for slot in range(NUM_STATE_SLOTS)]
    lens = [3, 2, 2] if mode == "extend" else [1, 1, 1]
    batch = bench.runner.extend(requests, lens) if mode == "extend" else bench.runner.decode(requests)
    batch._original_batch_size = 1
    outputs = bench.run(batch, [s.tokens(5, 5 + n) for s, n in zip(sequences, lens, strict=True)])
    assert outputs[0].any() and not outputs[1].any() and not outputs[2].any()
    expected = states_after(sequences[0], 5 + lens[0])
    for slot, was in enumerate(before):
        now = bench.states(slot)
        for actual, old in zip(now, expected if slot == requests[0].state_slot else was, strict=True):
            assert_bitwise(actual, old, f"slot {slot}")
