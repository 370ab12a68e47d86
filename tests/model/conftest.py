"""SGLang's distributed state for one process, set up once: the host's layers do not exist without it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
from sglang.srt.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel
from sglang.srt.runtime_context import get_context
from sglang.srt.server_args import ServerArgs

from sglang_k3.options import ServeOptions

SNAPSHOT_GRID = 4  # tokens between the depths at which the host keeps states; 64 in a server


@pytest.fixture(scope="session", autouse=True)
def server_args(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerArgs]:
    """One rank over gloo, and the host's arguments at their defaults with our options beside them."""
    rendezvous: Path = tmp_path_factory.mktemp("gloo") / "rendezvous"
    with get_context().override_server_args(device="cpu") as args:
        added = {
            **dataclasses.asdict(ServeOptions()),
            "_mamba_cache_chunk_size": SNAPSHOT_GRID,
            "mamba_radix_cache_strategy": "extra_buffer",
        }
        for name, value in added.items():
            object.__setattr__(args, name, value)  # the host guards what it has published
        init_distributed_environment(
            world_size=1, rank=0, local_rank=0, distributed_init_method=f"file://{rendezvous}", backend="gloo"
        )
        initialize_model_parallel(backend="gloo")
        yield args
        destroy_model_parallel()
        destroy_distributed_environment()
