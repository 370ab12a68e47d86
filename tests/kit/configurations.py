"""The server configurations of the test suite: one server each, and what it must agree with."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from sglang_k3.env import cache_root
from sglang_k3.testing.cache import ensure_tiny
from sglang_k3.testing.presets import GPU_PRESETS
from sglang_k3.testing.server import ServerProcess, sglang_command
from tests.kit.parity import BFLOAT16, FLOAT32, Oracle, Tolerance

ON_GPU = torch.cuda.is_available()
# On the GPU host nothing may be compiled at start: these two would be.
DEVICE_FLAGS = ("--sampling-backend", "pytorch", "--grammar-backend", "none") if ON_GPU else ()
DEFAULT_GRID = 64  # depth of the states that the tree keeps, where the page is not larger


@dataclasses.dataclass(frozen=True)
class Configuration:
    """A tiny checkpoint and the flags that it is served with.

    Attributes:
        grid: tokens between the depths at which a prefix can be reused; 0 for any, or none.
        chunk: tokens that one forward prefills at most.
        is_host_tree: the host's own prefix cache is asked for.
        env: variables of the host that the server gets beside the test's own.
        says: what must be on its log when it is up.
    """

    name: str
    preset: str = "default"
    dtype: str = "float32"
    experts: str = "mxfp4"
    flags: tuple[str, ...] = ()
    grid: int = DEFAULT_GRID
    chunk: int = 2048
    is_host_tree: bool = False
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    says: str = ""

    @property
    def is_k3_tree(self) -> bool:
        return self.grid == DEFAULT_GRID and not self.is_host_tree

    @property
    def tolerance(self) -> Tolerance:
        return FLOAT32 if self.dtype == "float32" else BFLOAT16

    def checkpoint(self, cache: Path) -> Path:
        """Written into ``cache``, or, as a large one takes a minute, where the next run finds it again."""
        place = cache_root() if self.preset in GPU_PRESETS else cache
        return ensure_tiny(place, self.preset, dtype=self.dtype, experts=self.experts)

    def oracle(self, folder: Path) -> Oracle:
        """The reference of the checkpoint in ``folder``; a small one is faster on the CPU."""
        return Oracle(folder, device="cuda" if ON_GPU and self.preset in GPU_PRESETS else "cpu")


@dataclasses.dataclass(frozen=True)
class Served:
    """A running server beside the reference of its checkpoint."""

    configuration: Configuration
    server: ServerProcess
    oracle: Oracle


def start(configuration: Configuration, cache: Path, log_folder: Path) -> tuple[ServerProcess, Path]:
    """The server of a configuration, not yet entered, and its checkpoint folder."""
    folder = configuration.checkpoint(cache)
    command = sglang_command(str(folder), *DEVICE_FLAGS, *configuration.flags)
    env = os.environ | configuration.env
    return ServerProcess(command, log_path=log_folder / f"{configuration.name}.log", env=env), folder
