"""Which implementation of an op runs where, decided once and with reasons.

An op lists its implementations from the fastest to the reference. Each says, for a device, a dtype and sizes, why it
cannot run there. The choice is made in the constructor of the model and yields a plain function: a call through it
costs nothing more than the call.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any

from sglang_k3.env import KERNEL_MODES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class OpContext:
    """Where an op is going to run.

    Attributes:
        device: device of the tensors.
        dtype: run dtype, or ``None`` where the op has none (copies).
        sizes: what an implementation may want to know, by the letter of the op's docstring, e.g. ``{"K": 128}``.
    """

    device: torch.device
    dtype: torch.dtype | None = None
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def __hash__(self) -> int:
        return hash((self.device, self.dtype, frozenset(self.sizes.items())))

    @classmethod
    def of(cls, tensor: torch.Tensor, **sizes: int) -> OpContext:
        """The context of a module that holds ``tensor``."""
        return cls(device=tensor.device, dtype=tensor.dtype, sizes=sizes)


@dataclasses.dataclass(frozen=True)
class Layout:
    """How an implementation wants weights to lie, if not as they are published.

    Attributes:
        arguments: names of the arguments of the op that it is about.
        write: ``write(name, matrix, rows, first_row)`` puts published rows, from ``first_row`` on, where they belong in
            the contiguous ``matrix [R, C]`` of argument ``name``, which lies in this layout.
        read: ``read(name, matrix)`` is a copy of ``matrix`` as it would be published.
        forget: frees what ``write`` and ``read`` keep on the device from call to call.
    """

    arguments: tuple[str, ...]
    write: Callable[[str, torch.Tensor, torch.Tensor, int], None]
    read: Callable[[str, torch.Tensor], torch.Tensor]
    forget: Callable[[], None]

    def apply(self, name: str, weight: torch.Tensor) -> None:
        """Bring ``weight [E, R, C]`` from the published layout into this, in place, a matrix at a time."""
        for matrix in weight:
            self.write(name, matrix, matrix.clone(), 0)

    def undo(self, name: str, weight: torch.Tensor) -> None:
        """The way back."""
        for matrix in weight:
            matrix.copy_(self.read(name, matrix))


def _write_as_published(_: str, matrix: torch.Tensor, rows: torch.Tensor, first_row: int) -> None:
    matrix[first_row : first_row + len(rows)] = rows


PUBLISHED = Layout((), _write_as_published, lambda _, matrix: matrix.clone(), lambda: None)


@dataclasses.dataclass(frozen=True)
class Impl:
    """One implementation of an op.

    Attributes:
        name: ``"reference"``, ``"triton"`` or the name of a vendor library.
        fn: the function, with the signature of the op.
        supports: ``None`` if ``fn`` can run in a context, else the reason why not, with the value it refuses.
        layout: of the weights that ``fn`` takes. Who holds them applies it once, not at every call.
    """

    name: str
    fn: Callable[..., Any]
    supports: Callable[[OpContext], str | None]
    layout: Layout = PUBLISHED


def reference_impl(fn: Callable[..., Any]) -> Impl:
    """The plain torch definition of an op, which runs anywhere."""
    return Impl("reference", fn, lambda _: None)


def choose(impls: Sequence[Impl], ctx: OpContext, mode: str = "auto") -> Impl:
    """The first implementation that supports ``ctx``; a mode other than ``auto`` admits only those of that name.

    Raises:
        ValueError: none does. The message holds the reason of each.
    """
    refusals: list[str] = []
    for impl in impls:
        reason = f"not asked for by mode {mode}" if mode not in ("auto", impl.name) else impl.supports(ctx)
        if reason is None:
            if mode == "auto" and (refusals or impl.name not in KERNEL_MODES):
                why = f" ({'; '.join(refusals)})" if refusals else ""
                logger.info("%s runs as %s%s", impl.fn.__name__, impl.name, why)
            return impl
        refusals.append(f"{impl.name}: {reason}")
    raise ValueError(
        f"No implementation for {ctx} with kernel mode {mode!r} ({'; '.join(refusals)}). "
        "Unset K3PLUGIN_KERNELS or set it to auto to allow every implementation."
    )
