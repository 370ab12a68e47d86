"""``K3ServerArgs``: the host's command line with the ``--k3-*`` flags, and K3's defaults behind it.

For any other model it behaves as the host's own class does.
"""

import dataclasses
from typing import Any, get_args

from sglang.srt.arg_groups.arg_utils import A, Arg
from sglang.srt.server_args import ServerArgs

from sglang_k3.config import ARCHITECTURE
from sglang_k3.errors import ConfigError, K3Error
from sglang_k3.integration import environment
from sglang_k3.integration.defaults import fill_defaults, prepare_model, settle_chunk
from sglang_k3.integration.graphs import largest_asked
from sglang_k3.integration.machine import refuse_what_it_cannot_serve
from sglang_k3.integration.names import ALIAS, TINY_ALIAS, is_k3, is_on_this_machine, refuse_no_model
from sglang_k3.integration.refusals import PREFIX_CACHE
from sglang_k3.mem.policy_names import PolicyName
from sglang_k3.options import LatentNormEps, ServeOptions


@dataclasses.dataclass
class K3ServerArgs(ServerArgs):
    """Arguments of one server.

    ``is_k3`` says whether it serves K3, ``asked_graph_batch`` is the largest batch that its user wants captured.
    """

    k3_latent_norm_eps: A[
        str,
        Arg(
            help="K3 only: epsilon of the two MLA latent norms: 'reference' is 1e-6 as in the published modelling "
            "code, 'config' is rms_norm_eps as in other engines.",
            choices=list(get_args(LatentNormEps)),
        ),
    ] = ServeOptions.k3_latent_norm_eps
    k3_checkpoints_per_path: A[
        int,
        Arg(
            help="K3 only: recurrent states that the prefix cache keeps from the beginning of a prompt to any point of "
            "it, beside those where prompts diverge. At least 1.",
        ),
    ] = ServeOptions.k3_checkpoints_per_path
    k3_checkpoint_policy: A[
        str | None,
        Arg(
            help="K3 only: which cached recurrent state goes when room is needed: 'replay-cost' (the default) weighs "
            "what it costs to compute it again per byte against how soon such states are used again, 'lru' gives up "
            "the least recently used.",
            choices=list(get_args(PolicyName)),
        ),
    ] = ServeOptions.k3_checkpoint_policy

    def __post_init__(self) -> None:
        try:
            self._take_model()
        except OSError as error:
            raise ConfigError(
                f"{error}. Give --model a folder whose files can be read; {TINY_ALIAS} needs a folder that can be "
                "written, in the cache that XDG_CACHE_HOME names."
            ) from error
        # The host reads these variables as it resolves the arguments: an earlier server's must be gone by then.
        environment.clear()
        if not self.is_k3:
            self._resolve_as_another_model()
            self._refuse_k3_in_disguise()
            return
        ServeOptions.from_server_args(self)
        self.asked_graph_batch = largest_asked(self)
        fill_defaults(self)
        try:
            super().__post_init__()
        except K3Error:  # of this package, which the host calls for the config
            raise
        except (ValueError, AssertionError, OSError) as error:
            why = " ".join(str(error).split())
            if isinstance(error, OSError) and not is_on_this_machine(self.model_path, self.revision):
                why = f"{self.model_path} must be downloaded first, and its folder given. {why}"
            raise ConfigError(f"SGLang refuses these arguments: {why}") from error
        settle_chunk(self)
        refuse_what_it_cannot_serve(self, self.get_model_config().hf_config.k3)
        environment.set_for_k3(
            run_dtype=str(self.get_model_config().dtype).removeprefix("torch."),
            device=self.device,
            tp_size=self.tp_size,
            pp_size=self.pp_size,
        )

    def enable_mamba_extra_buffer(self) -> bool:
        """Whether the host hands out and tracks snapshots; K3's own prefix cache does so itself."""
        return self.radix_cache_backend != PREFIX_CACHE and super().enable_mamba_extra_buffer()

    def _take_model(self) -> None:
        self.is_k3 = is_k3(self.model_path, self.revision)
        if self.is_k3:
            prepare_model(self)
        else:
            refuse_no_model(self.model_path)

    def _resolve_as_another_model(self) -> None:
        """Let the host resolve what is not known to be a K3 model.

        Raises:
            ConfigError: the host finds no accelerator for a name that is nowhere here. It may be that of a K3 model,
                which needs none.
        """
        try:
            super().__post_init__()
        except RuntimeError as error:
            if self.device is not None or is_on_this_machine(self.model_path, self.revision):
                raise
            raise ConfigError(
                f"There is no folder {self.model_path}, and no such repository was downloaded before, so that it is "
                f"taken for another model than K3: {error} If it is a K3 model, download it and give its folder. Names "
                f"that need no folder are {ALIAS} and {TINY_ALIAS}."
            ) from error

    def _refuse_k3_in_disguise(self) -> None:
        """A repository that nobody has downloaded yet is known by its name alone, until the host has its config.

        Raises:
            ConfigError: it is a K3, and the host has resolved the arguments for another model.
        """
        config = getattr(getattr(self, "model_config", None), "hf_config", None)
        if ARCHITECTURE in (getattr(config, "architectures", None) or ()):
            raise ConfigError(
                f"{self.model_path} is a K3 model, which its name did not tell. Run the same command again, now that "
                "its config is in the cache, or download the model and pass its folder."
            )

    def _validate_mamba_extra_buffer(self, view: Any, model_arch: str) -> None:
        """The host admits snapshots only where its own CUDA kernels run; ours run everywhere.

        What else it checks here, the interval and its page, ``defaults`` has checked already.
        """
        if not (self.is_k3 and self.device == "cpu"):
            super()._validate_mamba_extra_buffer(view, model_arch)
