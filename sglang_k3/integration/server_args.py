"""``K3ServerArgs``: the host's command line with the ``--k3-*`` flags, and K3's defaults behind it.

For any other model it behaves as the host's own class does.
"""

import dataclasses
import os
from typing import Any, get_args

from sglang.srt.arg_groups.arg_utils import A, Arg
from sglang.srt.server_args import ServerArgs

from sglang_k3.errors import ConfigError
from sglang_k3.integration.defaults import fill_defaults, prepare_model
from sglang_k3.integration.names import is_k3
from sglang_k3.options import LatentNormEps, ServeOptions


@dataclasses.dataclass
class K3ServerArgs(ServerArgs):
    """Arguments of one server; ``is_k3`` says whether it serves K3."""

    k3_latent_norm_eps: A[
        str,
        Arg(
            help="K3 only: epsilon of the two MLA latent norms: 'reference' is 1e-6 as in the published modelling "
            "code, 'config' is rms_norm_eps as in other engines.",
            choices=list(get_args(LatentNormEps)),
        ),
    ] = ServeOptions.k3_latent_norm_eps

    def __post_init__(self) -> None:
        self.is_k3 = is_k3(self.model_path)
        if not self.is_k3:
            super().__post_init__()
            return
        ServeOptions.from_server_args(self)
        prepare_model(self)
        fill_defaults(self)
        super().__post_init__()
        self._check_track_interval()
        self._set_environment()

    def _set_environment(self) -> None:
        """What the child processes inherit, so that users set nothing."""
        # The host finds the model class by this name.
        os.environ["SGLANG_EXTERNAL_MODEL_PACKAGE"] = "sglang_k3.models"
        # The conv history is exact in the run dtype (design.md 8); the host's own default is bfloat16.
        run_dtype = str(self.get_model_config().dtype).removeprefix("torch.")
        os.environ.setdefault("SGLANG_MAMBA_CONV_DTYPE", run_dtype)
        if self.device == "cpu":
            # One core is left to the processes that tokenise and answer: threads that wait for it stall all others.
            cores = max(1, len(os.sched_getaffinity(0)) - 1)
            os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // (self.tp_size * self.pp_size))))

    def _check_track_interval(self) -> None:
        if self.mamba_track_interval % self.mamba_cache_chunk_size:
            raise ConfigError(
                f"--mamba-track-interval {self.mamba_track_interval} is not a multiple of "
                f"{self.mamba_cache_chunk_size}, the grid on which states are kept: use a multiple."
            )

    def _validate_mamba_extra_buffer(self, view: Any, model_arch: str) -> None:
        """The host admits snapshots only where its own CUDA kernels run; ours run everywhere."""
        if not (self.is_k3 and self.device == "cpu"):
            super()._validate_mamba_extra_buffer(view, model_arch)
