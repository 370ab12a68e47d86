"""Prompts that are being prefilled: who would compute what another is computing already.

A request whose prompt begins like one in flight waits for the state that this one will leave at their last common grid
point, and starts there; the one in flight plants it for all that wait. A wait ends when that depth is passed, whether
a state was planted or not, and with the other's end: nobody waits for what will not come.
"""

from __future__ import annotations

from array import array

from sglang_k3.mem.lease import Lease
from sglang_k3.mem.limits import CheckpointLimits
from sglang_k3.mem.radix_tree import Namespace, common_prefix


class InFlight:
    """The leases between their admission and the donation that ends their prefill."""

    def __init__(self, limits: CheckpointLimits) -> None:
        self._limits = limits
        self._leases: dict[Lease, None] = {}  # in order of admission

    def add(self, lease: Lease) -> None:
        self._leases[lease] = None

    def discard(self, lease: Lease) -> None:
        self._leases.pop(lease, None)

    def is_awaited(self, namespace: Namespace, usable: array[int], state_depth: int) -> bool:
        """Whether a state deeper than ``state_depth`` is on its way; asks for one where none is planned.

        Args:
            usable: what of the prompt that asks may come from the cache.
        """
        for lease in self._leases:
            if lease.namespace != namespace:
                continue
            common = common_prefix(lease.tokens, usable, 0)
            depth = self._limits.floor(common)
            if depth <= state_depth:
                continue
            if lease.computed < depth <= lease.prefill_end:
                lease.wanted[depth] = common < min(len(lease.tokens), len(usable))
                return True
            if any(state_depth < snapshot.depth <= depth for snapshot in lease.snapshots):
                return True
        return False
