"""The routed experts of one layer on this rank: their storage, and how the checkpoint fills it.

Whether experts are MXFP4 or plain is decided by the tensors that arrive, not by the ``ignore`` expressions
of the quantisation config, which do not match the published file (fact sheet 1.4): the config is only the
first guess, so that a model without a checkpoint has storage too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from sglang.srt.runtime_context import get_parallel
from torch import nn

from sglang_k3.config import MXFP4_GROUP_SIZE, K3Config
from sglang_k3.errors import ConfigError
from sglang_k3.kernels import OpContext, bind_impl
from sglang_k3.kernels.dispatch import Impl
from sglang_k3.kernels.latent_experts import HIGHEST_SCALE, LOWEST_SCALE
from sglang_k3.models.text.weights import Loaders

# Values per element of the last axis, by the suffix that the checkpoint gives a tensor.
_PACKED_SUFFIXES = {"weight_packed": 2, "weight_scale": MXFP4_GROUP_SIZE}


class RoutedExperts(nn.Module):
    """Experts ``[first_expert, first_expert + E)``, each split by width over the MoE tensor-parallel group.

    Buffers ``w13 [E, 2I, L]`` (as published: gate rows, then up rows) and ``w2 [E, L, I]``: the run dtype, or uint8
    with two values a byte beside uint8 scales ``[..., L/32]`` and ``[..., I/32]``. At all times they lie as the op
    wants them: what arrives is written into its layout at once.
    """

    w13: torch.Tensor
    w2: torch.Tensor
    w13_scale: torch.Tensor | None
    w2_scale: torch.Tensor | None

    def __init__(self, config: K3Config, *, packed: bool) -> None:
        super().__init__()
        moe, parallel = config.moe, get_parallel()
        self.num_experts = _split(moe.num_experts, parallel.moe_ep_size, "text_config.num_experts", "--ep-size")
        self.first_expert = parallel.moe_ep_rank * self.num_experts
        self.width = _split(
            moe.intermediate_size, parallel.moe_tp_size, "text_config.moe_intermediate_size", "--tp-size"
        )
        self.first_column = parallel.moe_tp_rank * self.width
        self.latent_size, self.total_experts = moe.latent_size, moe.num_experts
        self.activation = {
            "beta": config.activation_situ_beta,
            "linear_beta": config.activation_situ_linear_beta,
        }
        self.run_dtype, self.device = torch.get_default_dtype(), torch.empty(0).device
        self.scale_codes = (LOWEST_SCALE, HIGHEST_SCALE)
        self.is_in_graphs = False
        self.allocate(packed=packed)

    def allocate(self, *, packed: bool) -> None:
        """(Re)create the buffers for packed or plain experts and choose the op for them.

        Raises:
            ConfigError: CUDA graphs hold the buffers that there are.
        """
        self._refuse_under_graphs(f"{'MXFP4' if packed else 'plain'} experts")
        self.packed = packed
        if packed and (self.width % MXFP4_GROUP_SIZE or self.latent_size % MXFP4_GROUP_SIZE):
            raise ConfigError(
                f"MXFP4 experts need a width and a latent size in multiples of {MXFP4_GROUP_SIZE} on every rank, "
                f"got {self.width} and {self.latent_size}: use a smaller --tp-size, or --ep-size to split by expert."
            )
        shapes = {
            "w13": (self.num_experts, 2 * self.width, self.latent_size),
            "w2": (self.num_experts, self.latent_size, self.width),
        }
        for name, (*lead, last) in shapes.items():
            if packed:
                self._buffer(name, (*lead, last // 2), torch.uint8)
                self._buffer(f"{name}_scale", (*lead, last // MXFP4_GROUP_SIZE), torch.uint8)
            else:
                self._buffer(name, (*lead, last), self.run_dtype)
                self.register_buffer(f"{name}_scale", None, persistent=False)
        self.latent_experts = self._choose_op()  # zeros lie as any layout wants them

    def _choose_op(self) -> Impl:
        lowest, highest = self.scale_codes
        sizes = {"E": self.num_experts, "L": self.latent_size, "I": self.width}
        context = OpContext.of(self.w13, **sizes, lowest_scale=lowest, highest_scale=highest)
        return bind_impl("latent_experts", context)

    def _buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.register_buffer(name, torch.zeros(shape, dtype=dtype, device=self.device), persistent=False)

    def loaders(self) -> Loaders:
        """A loader for every tensor of every expert, those of other ranks included: they are read past."""
        loaders: Loaders = {}
        for expert in range(self.total_experts):
            for name in ("w1", "w2", "w3"):
                for suffix in ("weight", *_PACKED_SUFFIXES):
                    loaders[f"{expert}.{name}.{suffix}"] = self._loader(expert, name, suffix)
        return loaders

    def _loader(self, expert: int, name: str, suffix: str) -> Callable[[torch.Tensor], None]:
        def load(tensor: torch.Tensor) -> None:
            packed = suffix in _PACKED_SUFFIXES
            if packed != self.packed:  # the first tensor of a layer tells: the audit lets none of the other kind follow
                self.allocate(packed=packed)
            local = expert - self.first_expert
            if 0 <= local < self.num_experts:
                part = self._slice_of_rank(tensor, name, suffix)
                buffer = ("w2" if name == "w2" else "w13") + ("_scale" if suffix == "weight_scale" else "")
                first_row = self.width if name == "w3" else 0
                self.latent_experts.layout.write(buffer, getattr(self, buffer)[local], part, first_row)
                if suffix == "weight_scale":
                    self._note_scales(part)

        return load

    def _note_scales(self, codes: torch.Tensor) -> None:
        """No published weight has such scales, but one that does is decoded exactly all the same."""
        lowest, highest = (int(code) for code in codes.aminmax())
        if lowest < self.scale_codes[0] or highest > self.scale_codes[1]:
            self._refuse_under_graphs(f"scale codes of {lowest} to {highest}")
            self.scale_codes = (min(lowest, self.scale_codes[0]), max(highest, self.scale_codes[1]))
            before, self.latent_experts = self.latent_experts, self._choose_op()
            for name in before.layout.arguments:
                before.layout.undo(name, getattr(self, name))
            for name in self.latent_experts.layout.arguments:
                self.latent_experts.layout.apply(name, getattr(self, name))

    def _refuse_under_graphs(self, what: str) -> None:
        if self.is_in_graphs:
            raise ConfigError(
                f"New weights bring {what}, which another kernel decodes than the one that the CUDA graphs of this "
                "server hold: start a server with them."
            )

    def _slice_of_rank(self, tensor: torch.Tensor, name: str, suffix: str) -> torch.Tensor:
        if name != "w2":
            return tensor[self.first_column : self.first_column + self.width]
        per_element = _PACKED_SUFFIXES.get(suffix, 1)
        start, width = self.first_column // per_element, self.width // per_element
        return tensor[:, start : start + width]

    def forward(self, latent: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        """This rank's part of the weighted expert sum, ``[T, L]``."""
        self.is_in_graphs |= _is_captured(latent)
        return self.latent_experts.fn(
            latent,
            topk_weights,
            topk_ids,
            self.w13,
            self.w2,
            w13_scale=self.w13_scale,
            w2_scale=self.w2_scale,
            expert_offset=self.first_expert,
            **self.activation,
        )


def _is_captured(latent: torch.Tensor) -> bool:
    return latent.is_cuda and torch.cuda.is_current_stream_capturing()


def _split(total: int, ranks: int, key: str, flag: str) -> int:
    if total % ranks:
        raise ConfigError(f"{flag} gives {ranks} ranks, which do not divide {key} = {total}.")
    return total // ranks
