"""ServeOptions: every knob that the plugin adds to the server, parsed once."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args

from sglang_k3.errors import ConfigError, HostError
from sglang_k3.mem.limits import CHECKPOINTS_PER_PATH
from sglang_k3.mem.policy_names import DEFAULT_POLICY, PolicyName

LatentNormEps = Literal["reference", "config"]
# The published reference leaves out the epsilon of these two norms, so its constructor default applies.
_REFERENCE_LATENT_NORM_EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class ServeOptions:
    """The ``--k3-*`` flags of one server.

    Attributes:
        k3_latent_norm_eps: epsilon of ``q_a_layernorm`` and ``kv_a_layernorm``: ``reference`` is 1e-6, as
            the published modelling code has it, ``config`` is ``rms_norm_eps``, as other engines have it.
        k3_checkpoints_per_path: states that the prefix cache keeps on a path, beside those at its forks.
        k3_checkpoint_policy: which of them goes when room is needed; None is ``DEFAULT_POLICY``.
    """

    k3_latent_norm_eps: LatentNormEps = "reference"
    k3_checkpoints_per_path: int = CHECKPOINTS_PER_PATH
    k3_checkpoint_policy: PolicyName | None = None

    def __post_init__(self) -> None:
        if self.k3_latent_norm_eps not in get_args(LatentNormEps):
            raise ConfigError(
                f"--k3-latent-norm-eps {self.k3_latent_norm_eps!r} is not one of {', '.join(get_args(LatentNormEps))}."
            )
        if self.k3_checkpoints_per_path < 1:
            raise ConfigError(
                f"--k3-checkpoints-per-path {self.k3_checkpoints_per_path} keeps no state to restore. Give at least 1, "
                "or --disable-radix-cache."
            )
        if self.k3_checkpoint_policy not in (None, *get_args(PolicyName)):
            raise ConfigError(
                f"--k3-checkpoint-policy {self.k3_checkpoint_policy!r} is not one of {', '.join(get_args(PolicyName))}."
            )

    @classmethod
    def from_server_args(cls, server_args: Any) -> ServeOptions:
        """The options that a parsed command line carries.

        Raises:
            HostError: the arguments are the host's own class: the plugin was not loaded in this process.
        """
        try:
            return cls(**{field.name: getattr(server_args, field.name) for field in dataclasses.fields(cls)})
        except AttributeError:
            raise HostError(
                "K3 is served with arguments that have no --k3-* options: SGLang did not load the plugin. "
                "Run `sglang-k3 doctor`, and check SGLANG_PLUGINS."
            ) from None

    @property
    def checkpoint_policy(self) -> PolicyName:
        return self.k3_checkpoint_policy or DEFAULT_POLICY

    def latent_norm_eps(self, rms_norm_eps: float) -> float:
        return rms_norm_eps if self.k3_latent_norm_eps == "config" else _REFERENCE_LATENT_NORM_EPS
