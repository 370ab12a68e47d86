"""The checkpoint policies by the names that a server is given.

The default is the one that weighs what a state costs; plain LRU is there to compare with.
"""

from __future__ import annotations

from typing import Final, Literal

from sglang_k3.mem.checkpoint_policy import CheckpointPolicy, LRUPolicy
from sglang_k3.mem.replay_cost import ReplayCost
from sglang_k3.mem.replay_cost_policy import ReplayCostPolicy

PolicyName = Literal["replay-cost", "lru"]
DEFAULT_POLICY: Final[PolicyName] = "replay-cost"


def create_policy(name: PolicyName, cost: ReplayCost) -> CheckpointPolicy:
    """A policy for one rank's cache, which decides alike on every rank.

    Args:
        cost: of the whole model; must be equal on all ranks that share a tree.
    """
    return {"replay-cost": lambda: ReplayCostPolicy(cost), "lru": LRUPolicy}[name]()
