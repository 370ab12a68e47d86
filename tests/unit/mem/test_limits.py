"""What cannot work is refused at start, with the value, the limit and the smallest value that works."""

from __future__ import annotations

import pytest

from sglang_k3.errors import ConfigError
from sglang_k3.mem.limits import SLOTS_PER_REQUEST, CheckpointLimits, describe, running_requests


def limits(**changed: int) -> CheckpointLimits:
    return CheckpointLimits(**{"state_chunk": 64, "page_size": 1, "track_interval": 256, **changed})


@pytest.mark.parametrize(
    ("state_chunk", "page_size", "grid"), [(64, 1, 64), (64, 16, 64), (64, 128, 128), (64, 48, 192), (16, 64 * 3, 192)]
)
def test_the_grid_suits_kernels_and_pages_also_those_widened_over_ranks(state_chunk: int, page_size: int, grid: int):
    made = limits(state_chunk=state_chunk, page_size=page_size, track_interval=grid)
    assert made.grid == grid
    assert [made.floor(depth) for depth in (0, grid - 1, grid, 2 * grid + 1)] == [0, 0, grid, 2 * grid]


@pytest.mark.parametrize("cap", [0, -1])
def test_a_cap_that_keeps_nothing_is_refused(cap: int):
    with pytest.raises(ConfigError, match=f"checkpoints_per_path = {cap} keeps no state to restore. Give at least 1"):
        limits(checkpoints_per_path=cap)


@pytest.mark.parametrize("interval", [0, -64, 1, 65, 100])
def test_an_interval_off_the_grid_is_refused(interval: int):
    with pytest.raises(ConfigError, match=f"track_interval = {interval} is not a multiple of 64.*that works is 64"):
        limits(track_interval=interval)
    with pytest.raises(ConfigError, match="that works is 128"):
        limits(track_interval=64, page_size=128)


@pytest.mark.parametrize("name", ["state_chunk", "page_size"])
def test_a_size_of_nothing_is_refused(name: str):
    with pytest.raises(ConfigError, match=f"{name} = 0 is no number of tokens. Give at least 1"):
        limits(**{name: 0})


@pytest.mark.parametrize("num_slots", [-1, 0, 3])
def test_a_pool_too_small_for_one_request_is_refused(num_slots: int):
    with pytest.raises(ConfigError, match=f"A pool of {num_slots} state slots is too small.* that works is 4"):
        running_requests(num_slots)


def test_four_slots_per_request_are_derived_and_printed():
    assert SLOTS_PER_REQUEST == 4
    assert [running_requests(num_slots) for num_slots in (4, 7, 8, 80)] == [1, 1, 2, 20]
    assert describe(80, limits()) == (
        "80 state slots, 4 per running request (1 working, 2 for snapshots, 1 to restore from): 20 requests at once; "
        "states are kept every 64 tokens of a prompt and every 256 of an answer, at most 8 per path beside its forks"
    )
