"""SGLang's prefix cache for K3: the checkpoint engine of ``sglang_k3.mem`` behind the host's ``BasePrefixCache``.

The host asks for a match, for room and for a request's tokens to be cached; slots and locks are the engine's. A request
gets its working slot and its protection in one step when it is admitted, and the host's own locks add nothing to them.
The copies wait in ``PendingMoves`` until the next forward pass, which runs them first, on its own stream.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from sglang.srt.environ import envs
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.mem_cache.base_prefix_cache import (
    BasePrefixCache,
    DecLockRefParams,
    DecLockRefResult,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    MatchPrefixParams,
    MatchResult,
)

from sglang_k3.host.broken_rows import is_broken
from sglang_k3.host.prefix_cache_metrics import PrefixCacheMetrics
from sglang_k3.mem import cache_report
from sglang_k3.mem.checkpoints import CheckpointCache
from sglang_k3.mem.engine import CheckpointEngine, Refusal
from sglang_k3.mem.lease import Lease, StepPlan
from sglang_k3.mem.ledger import check_slots
from sglang_k3.mem.limits import CheckpointLimits, describe
from sglang_k3.mem.policy_names import PolicyName, create_policy
from sglang_k3.mem.radix_tree import RadixTree, as_tokens
from sglang_k3.mem.replay_cost import ReplayCost
from sglang_k3.mem.state_moves import DeviceWork, StateMoves, on_device
from sglang_k3.mem.state_slots import StateSlots

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

logger = logging.getLogger(__name__)

FIRST_SLOT: Final = 1  # the host's padding rows write to slot 0


class PendingMoves:
    """A forward stream whose copies run at the beginning of the next forward pass."""

    def __init__(self) -> None:
        self._works: list[DeviceWork] = []

    def enqueue(self, work: DeviceWork) -> None:
        self._works.append(work)

    def run(self) -> None:
        """On the forward stream, before the model."""
        works, self._works = self._works, []
        for work in works:
            work.run()


class HostSlots:
    """``StateSlots`` where the host looks for its allocator of state slots; it only counts."""

    def __init__(self, slots: StateSlots, moves: PendingMoves, device: torch.device) -> None:
        self.size, self.moves = slots.size, moves
        self._slots, self._device = slots, device

    @property
    def free_slots(self) -> torch.Tensor:
        owned = {slot_id for slot_id, _ in self._slots.owned()}
        numbers = range(FIRST_SLOT, FIRST_SLOT + self.size)
        return torch.tensor([n for n in numbers if n not in owned], dtype=torch.int64, device=self._device)

    def available_size(self) -> int:
        return self._slots.num_free

    def schedulable_available_size(self) -> int:
        return self._slots.num_free

    def alloc_group_begin(self, num_reqs: int) -> None:
        """A request's slot is taken when it is admitted."""

    def alloc_group_end(self) -> None: ...

    def clear(self) -> None:
        assert self._slots.num_free == self.size, f"I2: cleared while in use: {self._slots!r}"


class K3PrefixCache(BasePrefixCache):
    """One rank's cache.

    Args:
        params: the host's pools.
        limits: grid, interval and cap.
        policy: which state or leaf goes when room is needed.
        cost: of this model, equal on all ranks of it.
    """

    disable = False

    def __init__(self, params: CacheInitParams, limits: CheckpointLimits, policy: PolicyName, cost: ReplayCost) -> None:
        self.req_to_token_pool = params.req_to_token_pool
        self.token_to_kv_pool_allocator = params.token_to_kv_pool_allocator
        self.page_size = params.page_size
        if params.enable_metrics:
            self.init_metrics_collector()
        self._device = torch.device(self.token_to_kv_pool_allocator.device)
        pool = self.req_to_token_pool.mamba_pool
        slots = StateSlots(pool.size, first=FIRST_SLOT)
        pending = PendingMoves()
        states = [*pool.mamba_cache.conv, pool.mamba_cache.temporal]
        tree = RadixTree(self.page_size, torch.empty(0, dtype=torch.int64, device=self._device))
        order = create_policy(policy, cost)
        cache = CheckpointCache(tree, slots, self.token_to_kv_pool_allocator, policy=order, limits=limits)
        self.engine = CheckpointEngine(cache, StateMoves(slots, states, pending), self.token_to_kv_pool_allocator)
        self.req_to_token_pool.mamba_allocator = HostSlots(slots, pending, self._device)
        self.root_node = tree.root
        self._tree, self._cache = tree, cache
        self._leases: dict[Req, Lease] = {}
        self._policy, self._cost = policy, cost
        self._metrics: PrefixCacheMetrics | None = None
        logger.info("K3 prefix cache: %s", describe(slots.size, limits))

    def publish(self, labels: Mapping[str, Any]) -> None:
        """Keep this cache's figures in the host's metrics, under the host's labels of this rank."""
        self._metrics = PrefixCacheMetrics(labels)
        self._metrics.update(self.engine)

    def report(self) -> dict[str, Any]:
        """What ``sglang-k3 cache-report`` draws."""
        return {"policy": self._policy, **cache_report.describe(self.engine, self._cost)}

    # What the host's scheduler does with a request, in order.

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """KV locations up to the state that a request would start from. Changes nothing."""
        match = self._cache.match(params.key.extra_key, as_tokens(params.key.raw_token_ids()))
        locs = self._cache.kv_locs(match.node, 0)
        return MatchResult(locs, last_device_node=match.node, last_host_node=match.node, best_match_node=match.node)

    def admit(self, req: Req) -> Refusal | None:
        """Give a waiting request its working slot and protection; ``withdraw`` takes them back."""
        ids = req.full_untruncated_fill_ids
        num_usable = 0 if envs.SGLANG_RADIX_FORCE_MISS.get() else req._compute_max_prefix_len(len(ids))
        lease = self.engine.admit(req.rid, req.extra_key, ids, num_usable=num_usable)
        if isinstance(lease, Refusal):
            return lease
        self._leases[req] = lease
        req.mamba_pool_idx = on_device([lease.working], self._device)[0]
        req.mamba_needs_clear = False  # where there is no initial state, the kernels start from zero
        req.prefix_indices = self._cache.kv_locs(lease.node, 0)
        self._follow(req, lease)
        return None

    def withdraw(self, req: Req) -> None:
        """The host has no room for a request that was admitted here."""
        self.engine.discard(self._leases.pop(req), req.prefix_indices)
        req.mamba_pool_idx = None

    @contextlib.contextmanager
    def forward(self, batch: ScheduleBatch) -> Iterator[None]:
        """Around the launch of the forward pass of ``batch``: restores before it, snapshots in it and behind it."""
        reqs = batch.reqs
        if batch.forward_mode.is_decode():
            reqs = [req for req in reqs if not self.engine.decode_quietly(self._leases[req])]
        plans = [self._plan(req) for req in reqs]
        self.engine.before_forward(plans)
        self._set_tracks(batch, plans)
        yield
        self.engine.after_forward(plans)
        self._set_tracks(batch, ())
        self._update_metrics()

    def cache_unfinished_req(self, req: Req, chunked: bool = False, **kwargs: Any) -> None:
        lease = self._caught_up(req)
        row = self.req_to_token_pool.req_to_token[req.req_pool_idx]
        moved = self.engine.donate(lease, row[: lease.computed].long())
        end = lease.node.depth
        if len(moved):
            self.req_to_token_pool.write((req.req_pool_idx, slice(end - len(moved), end)), moved)
        req.prefix_indices = row[: len(req.get_fill_ids())].long()
        self._follow(req, lease)

    def cache_finished_req(self, req: Req, is_insert: bool = True, *, kv_len_to_handle: int, **kwargs: Any) -> None:
        lease = self._caught_up(req)
        kv_locs = self.req_to_token_pool.req_to_token[req.req_pool_idx, :kv_len_to_handle].long()
        turn_of = self._end_turn(req)
        if is_insert:
            self.engine.finish(lease, kv_locs, session=turn_of)
        else:
            self.engine.discard(lease, kv_locs)
        del self._leases[req]
        req.mamba_pool_idx = None
        if is_broken(req):
            self._cache.forget(lease.node)
        self._update_metrics()

    def supports_streaming_session(self) -> bool:
        return True

    def release_session(self, session_id: str) -> None:
        self.engine.close_session(session_id)
        self._update_metrics()

    def evict(self, params: EvictParams) -> EvictResult:
        """Room for KV. Room for states is made where a slot is taken."""
        start_time = time.perf_counter()
        freed = self.engine.evict_kv(params.num_tokens) if params.num_tokens > 0 else 0
        self.update_eviction_metrics(freed, start_time)
        return EvictResult(num_tokens_evicted=freed)

    def inc_lock_ref(self, node: Any) -> IncLockRefResult:
        """The lease protects what its request needs, from admission on."""
        return IncLockRefResult()

    def dec_lock_ref(self, node: Any, params: DecLockRefParams | None = None) -> DecLockRefResult:
        return DecLockRefResult()

    def reset(self) -> None:
        assert not self._leases, f"the cache is reset while {[*self._leases.values()]} run"
        self.engine.flush()
        self._update_metrics()

    # What the host asks about sizes.

    def supports_mamba(self) -> bool:
        return True

    def evictable_size(self) -> int:
        """What sessions hold is there for whom the host admits."""
        return self._tree.num_tokens - self.protected_size()

    def protected_size(self) -> int:
        return self._tree.num_protected_tokens - self._tree.num_held_tokens

    def full_evictable_size(self) -> int:
        return self.evictable_size()

    def full_protected_size(self) -> int:
        return self.protected_size()

    def mamba_evictable_size(self) -> int:
        return self._cache.num_states - self._cache.num_protected_states

    def mamba_protected_size(self) -> int:
        return self._cache.num_protected_states

    def total_size(self) -> int:
        return self._tree.num_tokens

    def all_values_flatten(self) -> torch.Tensor:
        return torch.cat([self._tree.root.kv_locs, *(node.kv_locs for node in self._tree.nodes())])

    def all_mamba_values_flatten(self) -> torch.Tensor:
        slots = [node.checkpoint.slot_id for node in self._tree.nodes() if node.checkpoint is not None]
        return torch.tensor(slots, dtype=torch.int64, device=self._device)

    def sanity_check(self) -> None:
        check_slots(self.engine)

    def available_and_evictable_str(self) -> str:
        return (
            f"{self._tree!r}, {self._cache.slots!r}, {self.token_to_kv_pool_allocator.available_size()} tokens free, "
            f"{self._cache.counts}\n"
        )

    def pretty_print(self) -> None:
        logger.info("%s", self.available_and_evictable_str())

    def _update_metrics(self) -> None:
        if self._metrics is not None:
            self._metrics.update(self.engine)

    def _plan(self, req: Req) -> StepPlan:
        lease = self._caught_up(req)
        if lease.is_prefilling:
            return self.engine.plan_extend(lease, req.extend_range.end)
        return self.engine.plan_decode(lease)

    def _caught_up(self, req: Req) -> Lease:
        """The lease, with the tokens of the answer that the host knows by now."""
        lease = self._leases[req]
        for token in req.output_ids[len(lease.tokens) - len(req.origin_input_ids) :]:
            self.engine.append(lease, token)
        return lease

    def _end_turn(self, req: Req) -> str | None:
        """Tell a streaming session that its turn is over, unless it is retracted; its id, if it is to be continued."""
        session = req.session
        if session is None or not session.streaming or not req.finished():
            return None
        is_aborted = isinstance(req.finished_reason, FINISH_ABORT)
        if is_aborted:
            session.abort_req()  # the next turn follows the one before
        else:
            session.finish_req(req)
        if session.close_on_finish:
            # Here and not when the host comes to it, which is when each rank's own clock says so.
            self.release_session(session.session_id)
        return None if is_aborted or session.close_on_finish else str(session.session_id)

    def _set_tracks(self, batch: ScheduleBatch, plans: tuple[()] | list[StepPlan]) -> None:
        """Tell the KDA backend which state to leave inside each extend, at its exact depth; nothing if none is due."""
        batch.mamba_track_mask = batch.mamba_track_indices = batch.mamba_track_seqlens = None
        if any(plan.inner for plan in plans):
            inner = [(plan.inner.slot_id, plan.inner.depth) if plan.inner else (-1, -1) for plan in plans]
            slots, depths = (on_device(column, self._device) for column in zip(*inner, strict=True))
            batch.mamba_track_mask = depths >= 0
            batch.mamba_track_indices, batch.mamba_track_seqlens = slots, depths

    def _follow(self, req: Req, lease: Lease) -> None:
        req.last_node = lease.node
        req.cache_protected_len = lease.node.depth
