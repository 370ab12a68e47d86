"""Who meets whom on the traces, at which pool sizes, and what leaves one mechanism out.

The *working set* of a trace is the peak of the bytes held, states and KV and running requests, when nothing is ever
evicted and states are planted by the published rule (Marconi's: at forks and at the ends of answers). It is the same
for all contenders; those that plant more meet their limits sooner.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Final

from sglang_k3.mem.checkpoint_policy import CheckpointPolicy
from sglang_k3.mem.engine import CheckpointEngine
from sglang_k3.mem.lease import Lease
from sglang_k3.mem.replay_cost import ReplayCost
from sglang_k3.mem.replay_cost_policy import ALL, Mechanism, ReplayCostPolicy
from sglang_k3.testing.cache_future import Future
from sglang_k3.testing.cache_rivals import (
    ChunkEndEngine,
    GarbageFirstLRU,
    MarconiEngine,
    MarconiPolicy,
    PathTouchCache,
    SGLangEngine,
    oracle,
)
from sglang_k3.testing.cache_simulator import Contender, Outcome, Simulator, smallest_pool
from sglang_k3.testing.cache_traces import Trace

# K3 on one of eight ranks, fp32 states, bf16 KV: ``ReplayCost.of(published config, tp_size=8)``, which a test compares.
K3_COST: Final = ReplayCost(linear_flops=206_779_416_576, pair_flops=1_474_560, state_bytes=56_171_520, kv_bytes=27_648)
UNBOUNDED: Final = 1 << 50
ALPHAS: Final = (0.0, 0.1, 0.25, 0.5, 1.0, 2.0)
BOOTSTRAP: Final = 5  # Marconi's window, in multiples of the requests before the first eviction
LATEST_TUNING: Final = 0.25  # of the trace: a window that never ends would tune nothing

POOLS: Final = (0.25, 0.5, 1.0, 2.0)


def ours(mechanisms: Mechanism = ALL) -> Callable[[ReplayCost], CheckpointPolicy]:
    return functools.partial(ReplayCostPolicy, mechanisms=mechanisms)


def _lru(cost: ReplayCost) -> CheckpointPolicy:
    return GarbageFirstLRU()


RIVALS: Final = (
    Contender("every_chunk_lru", _lru, engine=ChunkEndEngine),
    Contender("sglang", _lru, engine=SGLangEngine, cache=PathTouchCache),
)
OURS: Final = Contender("ours", ours())
NAMES: Final = ("ours", "every_chunk_lru", "sglang", "marconi", "oracle")


class _NoForks(CheckpointEngine):
    """Plants nothing where a request leaves what is cached."""

    def _inner_depth(self, lease: Lease, end: int) -> int | None:
        lease.match = lease.match._replace(fork_depth=None)
        return super()._inner_depth(lease, end)


ABLATIONS: Final = (
    *(
        Contender(f"without {mechanism.name}".lower().replace("_", " "), ours(ALL & ~mechanism))
        for mechanism in Mechanism
    ),
    Contender("without planted forks", ours(), engine=_NoForks),
    Contender("without chunk ends", ours(), engine=SGLangEngine),
    Contender("a hit touches its path", ours(), cache=PathTouchCache),
    Contender("at most 8 states per path", ours(), checkpoints_per_path=8),
    Contender("our states, plain LRU", _lru),
)


@dataclasses.dataclass(frozen=True)
class Cell:
    """One trace at one pool size."""

    trace: Trace
    working_set: int  # bytes
    pool: float
    cost: ReplayCost = K3_COST

    @property
    def pool_bytes(self) -> int:
        """At least what the largest request needs to run alone."""
        return max(int(self.pool * self.working_set), smallest_pool(self.trace, self.cost))

    def run(self, contender: Contender, **options: Callable[[int], None] | int | None) -> Outcome:
        return Simulator(contender, self.trace, self.pool_bytes, self.cost, **options).run()  # type: ignore[arg-type]

    def run_named(self, name: str, future: Future) -> Outcome:
        """One of ``NAMES``, or an ablation."""
        if name == "marconi":
            return self._run_marconi()
        if name == "oracle":
            return self._run_oracle(future)
        return self.run(next(one for one in (OURS, *RIVALS, *ABLATIONS) if one.name == name))

    def _run_oracle(self, future: Future) -> Outcome:
        engine, policy = oracle(future)
        return self.run(Contender("oracle", policy, engine=engine), on_arrival=future.arrived)

    def _run_marconi(self) -> Outcome:
        """With its tuning: alpha is 0 until a window behind the first eviction is over, then the best for that window.

        Before the first eviction alpha changes nothing, so that playing the trace from its start up to the end of the
        window is playing the window from the tree at the first eviction.
        """
        plain = self.run(_marconi(0.0))
        first = plain.first_eviction
        if first is None:
            return plain
        num_turns = sum(len(session.turns) for session in self.trace.sessions)
        tuned_at = min(first + BOOTSTRAP * first, max(first + 1, int(num_turns * LATEST_TUNING)))
        rates = {alpha: self.run(_marconi(alpha), stop_after=tuned_at).token_hit_rate for alpha in ALPHAS}
        best = max(rates, key=lambda alpha: (rates[alpha], -alpha))
        if best == 0.0:
            return plain
        policies: list[MarconiPolicy] = []

        def switch(number: int) -> None:
            if number == tuned_at:
                policies[0].alpha = best

        def policy(cost: ReplayCost) -> CheckpointPolicy:
            policies.append(MarconiPolicy(cost))
            return policies[-1]

        return self.run(Contender("marconi", policy, engine=MarconiEngine), on_arrival=switch)


def _marconi(alpha: float) -> Contender:
    return Contender("marconi", functools.partial(MarconiPolicy, alpha=alpha), engine=MarconiEngine)


def working_set(trace: Trace, cost: ReplayCost = K3_COST) -> int:
    simulator = Simulator(_marconi(0.0), trace, UNBOUNDED, cost)
    simulator.run()
    return simulator.budget.most_used
