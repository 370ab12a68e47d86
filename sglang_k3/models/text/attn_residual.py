"""Attention Residuals: a softmax over depth in place of the residual stream (fact sheet 3.5).

Per token the model keeps ``prefix_sum``, the sum of sub-layer outputs since the last block boundary,
and a bank of frozen prefixes. The last output travels beside the sum, as ``delta``, until the next mix adds it.
All live for one forward pass only; nothing is cached across steps.
"""

from __future__ import annotations

import torch
from torch import nn

from sglang_k3.kernels import OpContext, bind
from sglang_k3.models.text.norm import RMSNorm


class ResidualBank:
    """The frozen rows of one forward pass, in one buffer so that a mix reads them as a single view.

    ``append`` copies: the running prefix is updated afterwards, and a row must not follow it.
    """

    def __init__(self, rows: torch.Tensor, num_rows: int = 0) -> None:
        self._buffer, self.num_rows = rows, num_rows

    @classmethod
    def empty(cls, max_rows: int, like: torch.Tensor) -> ResidualBank:
        return cls(like.new_empty(max_rows, *like.shape))

    @classmethod
    def holding(cls, rows: torch.Tensor, max_rows: int) -> ResidualBank:
        """A bank that begins with a copy of ``rows [N, T, D]``."""
        bank = cls(rows.new_empty(max_rows, *rows.shape[1:]), num_rows=len(rows))
        bank.rows.copy_(rows)
        return bank

    @property
    def rows(self) -> torch.Tensor:
        """``[N, T, D]``, oldest first."""
        return self._buffer[: self.num_rows]

    def append(self, prefix_sum: torch.Tensor) -> None:
        self._buffer[self.num_rows].copy_(prefix_sum)
        self.num_rows += 1


class DepthMix(nn.Module):
    """One mix: scores of every bank row and the prefix, softmax over depth, weighted sum, then a norm of the same eps.

    The norm weight and the projection only ever appear as a product, so they are folded into one fp32
    vector when both have been loaded; normalised rows are never rounded (fact sheet 7.4).
    """

    def __init__(self, size: int, *, eps: float) -> None:
        super().__init__()
        self.norm_weight = nn.Parameter(torch.ones(size, dtype=torch.float32), requires_grad=False)
        self.proj_weight = nn.Parameter(torch.zeros(size, dtype=torch.float32), requires_grad=False)
        self.eps = eps
        self._folded: torch.Tensor | None = None
        self.depth_mix = bind("depth_mix", OpContext.of(self.norm_weight, D=size))

    @property
    def folded_weight(self) -> torch.Tensor:
        if self._folded is None:
            self._folded = self.norm_weight * self.proj_weight
        return self._folded

    def load_norm(self, tensor: torch.Tensor) -> None:
        self.norm_weight.copy_(tensor)
        self._folded = None

    def load_proj(self, tensor: torch.Tensor) -> None:
        self.proj_weight.copy_(tensor[0])
        self._folded = None

    def forward(
        self, bank: ResidualBank, prefix_sum: torch.Tensor, delta: torch.Tensor | None, norm: RMSNorm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The mixed residual ``[T, D]``, normalised for the sub-layer that reads it, and the prefix with ``delta``.

        ``delta`` is the output of the sub-layer before, if it has not been added yet.
        """
        if bank.num_rows == 0:
            prefix_sum = prefix_sum if delta is None else prefix_sum + delta
            return norm(prefix_sum), prefix_sum
        mixed: tuple[torch.Tensor, torch.Tensor] = self.depth_mix(
            bank.rows, prefix_sum, self.folded_weight, eps=self.eps, norm_weight=norm.weight, delta=delta
        )
        return mixed
