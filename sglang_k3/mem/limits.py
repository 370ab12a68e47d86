"""Where checkpoints may lie, how many, and how many state slots a request needs: checked once, at start.

A request owns or protects at most ``SLOTS_PER_REQUEST`` slots at any moment, and so a pool of that many per running
request never has to skip a checkpoint for want of a slot that nobody may give up:

    working    1  the state that every forward overwrites
    pair       2  a snapshot that waits for its donation, and, only from a boundary on, the one that a forward in
                  flight writes
    source     1  the checkpoint in the tree that it restores from; protected until that copy is enqueued

Away from boundaries it is two: the working slot, and the pair's first or the source.
"""

from __future__ import annotations

import dataclasses
import math

from sglang_k3.errors import ConfigError

WORKING_SLOTS, PAIR_SLOTS, SOURCE_SLOTS = 1, 2, 1
SLOTS_PER_REQUEST = WORKING_SLOTS + PAIR_SLOTS + SOURCE_SLOTS

# A path of this many checkpoints beside its forks: enough for a long prompt's chunks to be sampled, few enough that
# one prompt cannot fill the pool of a handful of requests.
CHECKPOINTS_PER_PATH = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointLimits:
    """What the engine is held to.

    Attributes:
        state_chunk: tokens between the depths at which the prefill kernels offer a state.
        page_size: tokens of a page of the tree, as wide as it is over all ranks that share it.
        track_interval: tokens between two snapshots of an answer.
        checkpoints_per_path: checkpoints from the root to any node at the moment one is planted there, forks apart.
    """

    state_chunk: int
    page_size: int
    track_interval: int
    checkpoints_per_path: int = CHECKPOINTS_PER_PATH

    def __post_init__(self) -> None:
        for name in ("state_chunk", "page_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)} is no number of tokens. Give at least 1.")
        if self.checkpoints_per_path < 1:
            raise ConfigError(
                f"checkpoints_per_path = {self.checkpoints_per_path} keeps no state to restore. Give at least 1, or "
                "switch the prefix cache off."
            )
        if self.track_interval < 1 or self.track_interval % self.grid:
            raise ConfigError(
                f"track_interval = {self.track_interval} is not a multiple of {self.grid}, the grid on which states "
                f"are kept. The smallest that works is {self.grid}."
            )

    @property
    def grid(self) -> int:
        """Tokens between the depths at which the tree may hold a state."""
        return math.lcm(self.state_chunk, self.page_size)

    def floor(self, depth: int) -> int:
        """The deepest grid point that is not below ``depth`` tokens."""
        return depth // self.grid * self.grid


def running_requests(num_slots: int) -> int:
    """How many requests a pool of ``num_slots`` state slots can run at once.

    Raises:
        ConfigError: not even one.
    """
    if num_slots < SLOTS_PER_REQUEST:
        raise ConfigError(
            f"A pool of {num_slots} state slots is too small for one request, which needs {WORKING_SLOTS} to work in, "
            f"{PAIR_SLOTS} for snapshots and {SOURCE_SLOTS} to restore from. "
            f"The smallest that works is {SLOTS_PER_REQUEST}."
        )
    return num_slots // SLOTS_PER_REQUEST


def describe(num_slots: int, limits: CheckpointLimits) -> str:
    """One line for the log at start."""
    return (
        f"{num_slots} state slots, {SLOTS_PER_REQUEST} per running request ({WORKING_SLOTS} working, {PAIR_SLOTS} for "
        f"snapshots, {SOURCE_SLOTS} to restore from): {running_requests(num_slots)} requests at once; states are kept "
        f"every {limits.grid} tokens of a prompt and every {limits.track_interval} of an answer, at most "
        f"{limits.checkpoints_per_path} per path beside its forks"
    )
