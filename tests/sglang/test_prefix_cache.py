"""K3's prefix cache behind the host's interface, over the host's own pools."""

from __future__ import annotations

import collections
import inspect
from array import array
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import prometheus_client
import pytest
import torch
from sglang.srt.environ import envs
from sglang.srt.managers.io_struct import GetInternalStateReq
from sglang.srt.managers.schedule_policy import AddReqResult
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache, EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_k3.config import K3Config
from sglang_k3.host.prefix_cache import K3PrefixCache
from sglang_k3.host.prefix_cache_metrics import METRICS, readings
from sglang_k3.integration import seam_cache_report, seam_prefix_cache
from sglang_k3.mem.cache_report import ENDPOINT, as_text
from sglang_k3.mem.checkpoint_policy import LRUPolicy
from sglang_k3.mem.engine import Refusal
from sglang_k3.mem.limits import CheckpointLimits
from sglang_k3.mem.policy_names import DEFAULT_POLICY, create_policy
from sglang_k3.mem.replay_cost_policy import ReplayCostPolicy
from sglang_k3.options import ServeOptions
from sglang_k3.testing.cache_contest import K3_COST
from sglang_k3.testing.presets import K3_SIZES, published_config

pytestmark = pytest.mark.sglang
GRID, SLOTS, TOKENS = 4, 8, 64


class Req:
    """What the cache reads and writes of the host's request."""

    def __init__(self, rid: str, prompt: list[int], row: int) -> None:
        self.rid, self.req_pool_idx, self.extra_key = rid, row, None
        self.origin_input_ids, self.output_ids = array("q", prompt), array("q")
        self.mamba_pool_idx = self.finished_reason = self.session = None
        self.extend_range = SimpleNamespace(end=len(prompt))

    @property
    def full_untruncated_fill_ids(self) -> array:
        return self.origin_input_ids + self.output_ids

    def get_fill_ids(self) -> array:
        return self.full_untruncated_fill_ids[: self.extend_range.end]

    def _compute_max_prefix_len(self, length: int) -> int:
        return length - 1

    def finished(self) -> bool:
        return self.finished_reason is not None


class Host:
    """Pools and the few steps of a scheduler."""

    def __init__(self) -> None:
        self.conv = torch.zeros(2, SLOTS + 1, 3)
        self.temporal = torch.zeros(2, SLOTS + 1, 2, 2)
        pool = ReqToTokenPool(size=4, max_context_len=TOKENS, device="cpu", enable_memory_saver=False)
        cache = SimpleNamespace(conv=[self.conv], temporal=self.temporal)
        pool.mamba_pool = SimpleNamespace(size=SLOTS, mamba_cache=cache)
        self.allocator = TokenToKVPoolAllocator(TOKENS, torch.float32, "cpu", kvcache=None, need_sort=False)
        params = SimpleNamespace(
            req_to_token_pool=pool, token_to_kv_pool_allocator=self.allocator, page_size=1, enable_metrics=False
        )
        limits = CheckpointLimits(state_chunk=GRID, page_size=1, track_interval=GRID)
        self.pool, self.cache = pool, K3PrefixCache(params, limits, DEFAULT_POLICY, K3_COST)

    def admit(self, rid: str, prompt: list[int], row: int = 1) -> Req:
        req = Req(rid, prompt, row)
        assert self.cache.admit(req) is None
        return req

    def extend(self, req: Req, end: int | None = None) -> SimpleNamespace:
        """Launch the forward of a chunk; what the batch carried while it was launched."""
        start, end = len(req.prefix_indices), end or len(req.origin_input_ids)
        self.pool.req_to_token[req.req_pool_idx, :start] = req.prefix_indices.int()
        return self._forward(req, ForwardMode.EXTEND, start, end)

    def decode(self, req: Req) -> None:
        """Launch the next step of an answer; the host may not know yet which token it absorbs."""
        assert self._forward(req, ForwardMode.DECODE, req.extend_range.end, req.extend_range.end + 1).reqs == [req]

    def _forward(self, req: Req, mode: ForwardMode, start: int, end: int) -> SimpleNamespace:
        req.extend_range.end = end
        self.pool.req_to_token[req.req_pool_idx, start:end] = self.allocator.alloc(end - start).int()
        batch = SimpleNamespace(reqs=[req], forward_mode=mode)
        with self.cache.forward(batch):
            seen = SimpleNamespace(**vars(batch))
            self.pool.mamba_allocator.moves.run()
            self.temporal[:, req.mamba_pool_idx] = end  # the model: here a state is its depth
            if seen.mamba_track_mask is not None:
                self.temporal[:, seen.mamba_track_indices] = seen.mamba_track_seqlens.float()
        assert batch.mamba_track_mask is None
        return seen

    def finish(self, req: Req, *, is_insert: bool = True) -> None:
        self.cache.cache_finished_req(req, is_insert, kv_len_to_handle=req.extend_range.end)

    def finish_all(self, *requests: tuple[str, list[int]]) -> None:
        """One after the other."""
        for rid, prompt in requests:
            req = self.admit(rid, prompt)
            self.extend(req)
            self.finish(req)

    def matched(self, prompt: list[int]) -> list[int]:
        key = RadixKey(array("q", prompt), limit=len(prompt) - 1)
        return self.cache.match_prefix(MatchPrefixParams(key=key)).device_indices.tolist()

    def is_balanced(self) -> bool:
        self.cache.sanity_check()
        tree = self.cache.evictable_size() + self.cache.protected_size()
        return self.allocator.available_size() + tree == TOKENS


@pytest.fixture
def host() -> Host:
    return Host()


PROMPT = [*range(10)]


def test_a_prompt_leaves_its_states_and_a_repeat_starts_from_the_last(host: Host) -> None:
    req = host.admit("first", PROMPT)
    assert host.extend(req).mamba_track_seqlens.tolist() == [8]
    host.finish(req)
    assert req.mamba_pool_idx is None
    row = host.pool.req_to_token[1, :8].tolist()
    assert host.matched(PROMPT) == row == host.cache.all_values_flatten().tolist()
    assert host.cache.mamba_evictable_size() == 1 and host.is_balanced()

    again = host.admit("again", PROMPT, row=2)
    assert again.prefix_indices.tolist() == row
    assert host.cache.mamba_protected_size() == 1 and host.cache.full_protected_size() == 8
    host.extend(again)
    assert host.cache.mamba_protected_size() == 0
    host.finish(again)
    assert host.is_balanced() and host.pool.mamba_allocator.available_size() == SLOTS - 1


def test_copies_run_at_the_beginning_of_the_next_forward(host: Host) -> None:
    """A state at a chunk's end is copied behind its forward: before the next one runs, not when it was asked for."""
    req = host.admit("first", PROMPT)
    assert host.extend(req, end=8).mamba_track_mask is None
    host.cache.cache_unfinished_req(req, chunked=True)
    slot = host.cache.all_mamba_values_flatten()
    assert (host.temporal[:, slot] == 0).all()
    host.extend(req)
    assert (host.temporal[:, slot] == 8).all()
    host.finish(req)
    host.admit("again", PROMPT, row=2)
    assert host.is_balanced()


@pytest.mark.parametrize("known_late_by", [0, 1, 5])
def test_an_answer_leaves_its_last_certain_state(host: Host, known_late_by: int) -> None:
    """Whenever the host learns of the tokens that it computes with."""
    req = host.admit("answers", PROMPT)
    host.extend(req)
    answer = [100 + n for n in range(8)]
    for n in range(7):  # at the end, 17 tokens are computed and 18 are known
        req.output_ids.extend(answer[len(req.output_ids) : n + 1 - known_late_by])
        host.decode(req)
        host.cache.sanity_check()
        assert len(host.cache._leases[req].slot_ids) <= 4
    req.output_ids.extend(answer[len(req.output_ids) :])
    host.finish(req)
    assert host.is_balanced()
    assert len(host.matched([*PROMPT, *answer, 0])) == 16
    again = host.admit("again", [*PROMPT, *answer, 0], row=2)
    host.extend(again)
    assert host.cache._leases[again].match.state_depth == 16


def test_a_chunk_that_another_has_cached_by_then_is_given_the_tree_s_locations(host: Host) -> None:
    slow, fast = host.admit("slow", PROMPT), None
    host.extend(slow, end=3)
    host.cache.cache_unfinished_req(slow, chunked=True)
    host.cache.engine._in_flight.discard(host.cache._leases[slow])  # or the second would wait
    fast = host.admit("fast", PROMPT, row=2)
    host.extend(fast)
    host.finish(fast)
    host.extend(slow)
    host.cache.cache_unfinished_req(slow)
    assert host.pool.req_to_token[1, :8].tolist() == host.pool.req_to_token[2, :8].tolist()
    assert slow.cache_protected_len == 8 and slow.prefix_indices.tolist() == host.pool.req_to_token[1, :10].tolist()
    host.finish(slow)
    assert host.is_balanced()


def test_what_is_not_to_be_cached_is_given_back(host: Host) -> None:
    req = host.admit("aborted", PROMPT)
    host.extend(req)
    host.finish(req, is_insert=False)
    assert host.matched(PROMPT) == []
    assert host.is_balanced() and host.pool.mamba_allocator.available_size() == SLOTS


def test_a_broken_prompt_is_forgotten(host: Host) -> None:
    req = host.admit("broken", PROMPT)
    host.extend(req, end=8)
    host.cache.cache_unfinished_req(req, chunked=True)
    assert len(host.matched(PROMPT)) == 8
    host.extend(req)
    message = "The model's logits are not finite. If this happens again, check the checkpoint and --dtype."
    req.finished_reason = SimpleNamespace(message=message)
    host.finish(req, is_insert=False)
    assert host.matched(PROMPT) == []
    assert host.is_balanced()


def test_eviction_frees_kv_and_leaves_slots_to_the_engine(host: Host) -> None:
    req = host.admit("first", PROMPT)
    host.extend(req)
    host.finish(req)
    assert host.cache.evict(EvictParams(mamba_num=3)).num_tokens_evicted == 0
    assert host.cache.mamba_evictable_size() == 1
    assert host.cache.evict(EvictParams(num_tokens=1)).num_tokens_evicted == 8
    assert host.allocator.available_size() == TOKENS and host.is_balanced()


def test_a_reset_empties_it_and_only_when_nothing_runs(host: Host) -> None:
    req = host.admit("first", PROMPT)
    with pytest.raises(AssertionError, match="reset while"):
        host.cache.reset()
    host.extend(req)
    host.finish(req)
    host.cache.reset()
    host.pool.mamba_allocator.clear()
    assert host.cache.total_size() == 0 and host.allocator.available_size() == TOKENS


def test_admission_reserves_and_gives_back_what_the_host_has_no_room_for(host: Host) -> None:
    before = host.pool.mamba_allocator.available_size()
    seen = []

    def full(adder: SimpleNamespace, req: Req) -> AddReqResult:
        seen.append(host.pool.mamba_allocator.available_size())
        return AddReqResult.NO_TOKEN

    adder = SimpleNamespace(tree_cache=host.cache, can_run_list=[])
    req = Req("first", PROMPT, 1)
    assert seam_prefix_cache._add_one_req(full, adder, req) is AddReqResult.NO_TOKEN
    assert seen == [before - 1] and host.pool.mamba_allocator.available_size() == before
    assert req.mamba_pool_idx is None and host.is_balanced()


def test_a_prompt_that_another_computes_stays_in_the_queue(host: Host) -> None:
    def never(adder: SimpleNamespace, req: Req) -> AddReqResult:
        raise AssertionError("the host was asked")

    host.admit("first", PROMPT)
    adder = SimpleNamespace(tree_cache=host.cache, can_run_list=[])
    assert seam_prefix_cache._add_one_req(never, adder, Req("second", PROMPT, 2)) is AddReqResult.CONTINUE
    for n in range(SLOTS - 1):
        host.admit(f"other {n}", [100 + n], row=2)
    assert host.cache.admit(Req("one too many", [99], 3)) is Refusal.NO_STATE_SLOT
    assert seam_prefix_cache._add_one_req(never, adder, Req("one too many", [99], 3)) is AddReqResult.OTHER


@pytest.fixture
def published(host: Host) -> Iterator[Callable[..., float | None]]:
    """The value of a series of the host's, once the cache keeps its figures there."""
    registry = prometheus_client.REGISTRY
    host.cache.publish({"tp_rank": 0, "model_name": "k3"})

    def value(name: str, **label: str) -> float | None:
        return registry.get_sample_value(f"sglang:k3_{name}", {"tp_rank": "0", "model_name": "k3", **label})

    yield value
    for metric in host.cache._metrics.metrics.values():
        registry.unregister(metric)


def test_its_figures_are_those_of_the_engine(host: Host, published: Callable[..., float | None]) -> None:
    def slots() -> list[float | None]:
        return [published("state_slots", owner=owner) for owner in ("free", "working", "snapshot", "cached")]

    assert published("prefix_starts_total") == 0 and slots() == [SLOTS, 0, 0, 0]
    first = host.admit("first", PROMPT)
    host.extend(first)
    assert slots() == [SLOTS - 2, 1, 1, 0]  # its state waits for the end of the prefill
    host.finish(first)
    assert slots() == [SLOTS - 1, 0, 0, 1]
    host.finish_all(("again", PROMPT), ("branch", PROMPT[:6] + [9] * 4), ("branch again", PROMPT[:6] + [8] * 4))
    # The branch finds 6 tokens of KV and no state, and plants one at 4, where the next branch starts.
    starts = {"prefix_starts": 4, "state_hits": 2, "state_hit_tokens": 8 + 4, "kv_hits_without_state": 2}
    tokens = {"kv_tokens_without_state": 6 + 2, "replayed_tokens": 6 + 2}
    assert {name: published(f"{name}_total") for name in starts | tokens} == starts | tokens
    assert [published("checkpoints_planted_total", kind=kind) for kind in ("fork", "plain")] == [1, 2]
    host.cache.engine.cache.counts.skipped["no slot"] += 3
    host.cache.reset()
    assert published("checkpoints_evicted_total", reason="by a flush") == 3 and slots() == [SLOTS, 0, 0, 0]
    assert published("checkpoints_skipped_total", reason="no slot") == 3
    assert published("checkpoints_evicted_total", reason="for a slot") == 0, "there from the start"


def test_every_series_is_there_from_the_start_as_the_readme_lists_them(host: Host) -> None:
    seen = collections.defaultdict(list)
    for metric, value, _ in readings(host.cache.engine):
        seen[metric].append(value)
    assert {metric: sorted(values) for metric, values in seen.items()} == {
        metric: sorted(metric.values or [""]) for metric in METRICS
    }


def test_each_rank_s_scheduler_publishes_where_the_host_does(host: Host) -> None:
    """Not where the host keeps no metrics of its own, nor for another tree."""
    seen = []
    host.cache.publish = seen.append
    collector = SimpleNamespace(labels={"tp_rank": 1})
    for enabled, tree in ((True, host.cache), (False, host.cache), (True, object())):
        context = SimpleNamespace(current_scheduler_metrics_enabled=enabled, collector=collector)
        scheduler = SimpleNamespace(metrics_collector_context=context, tree_cache=tree)
        seam_prefix_cache._init_metrics(lambda scheduler, rank: None, scheduler, 1)
    assert seen == [{"tp_rank": 1}]


def test_a_scheduler_describes_its_cache_when_asked_for_it(host: Host) -> None:
    host.finish_all(("first", PROMPT), ("again", PROMPT))
    scheduler = SimpleNamespace(tree_cache=host.cache, ps=SimpleNamespace(dp_rank=1))
    question = GetInternalStateReq(rid=seam_cache_report.QUESTION)
    report = seam_cache_report._answer(never, scheduler, question).internal_state
    assert (report["dp_rank"], report["policy"], report["counts"]["state_hits"]) == (1, DEFAULT_POLICY, 1)
    assert "began 2 requests, 1 of them from a state" in as_text(report)
    other = SimpleNamespace(tree_cache=object())
    assert seam_cache_report._answer(never, other, question).internal_state == {"other": "object"}
    assert seam_cache_report._answer(lambda scheduler, request: 7, scheduler, GetInternalStateReq()) == 7


def test_the_report_needs_the_key_that_the_host_s_own_information_needs() -> None:
    from sglang.srt.entrypoints.http_server import app
    from sglang.srt.utils.auth import _get_auth_level_from_app_and_scope, decide_request_auth

    def is_allowed(path: str, key: str | None) -> bool:
        scope = {"type": "http", "method": "GET", "path": path, "headers": [], "root_path": ""}
        level = _get_auth_level_from_app_and_scope(app, scope)
        header = key and f"Bearer {key}"
        keys = {"api_key": "user", "admin_api_key": "admin"}
        return decide_request_auth(
            method="GET", path=path, authorization_header=header, auth_level=level, **keys
        ).allowed

    routes = len(app.routes)
    seam_cache_report._add_endpoint(lambda args: None, SimpleNamespace(is_k3=False))
    assert len(app.routes) == routes
    seam_cache_report._add_endpoint(lambda args: None, SimpleNamespace(is_k3=True))
    assert ENDPOINT in {getattr(route, "path", None) for route in app.routes}
    for path in (ENDPOINT, "/server_info"):
        assert [is_allowed(path, key) for key in (None, "guess", "user")] == [False, False, True]


def never(*args: object) -> None:
    raise AssertionError("the host was asked")


def test_a_state_costs_what_the_pools_hold_for_it() -> None:
    """k3_facts.md 3.3.7: 56.2 MB on each of eight ranks; with data-parallel attention every rank has all heads."""
    config = K3Config.from_dict(published_config(K3_SIZES, dtype="bfloat16", packed_experts=True, vision=False))
    conv, temporal = torch.empty(0, dtype=torch.bfloat16), torch.empty(0)
    pool = SimpleNamespace(mamba_pool=SimpleNamespace(mamba_cache=SimpleNamespace(conv=[conv], temporal=temporal)))
    split, whole = (
        seam_prefix_cache.cost_of(config, SimpleNamespace(tp_size=8, dp_size=dp_size), pool) for dp_size in (1, 8)
    )
    assert split == K3_COST and whole.state_bytes == 8 * split.state_bytes


@pytest.mark.parametrize(
    ("given", "kind"), [(None, ReplayCostPolicy), ("replay-cost", ReplayCostPolicy), ("lru", LRUPolicy)]
)
def test_the_policy_is_the_one_that_was_asked_for(given: str | None, kind: type) -> None:
    assert type(create_policy(ServeOptions(k3_checkpoint_policy=given).checkpoint_policy, K3_COST)) is kind


def test_it_has_what_the_host_s_base_class_asks_for() -> None:
    for name, method in inspect.getmembers(K3PrefixCache, inspect.isfunction):
        theirs = getattr(BasePrefixCache, name, None)
        if theirs is None or name.startswith("__"):
            continue
        mine = [p.name for p in inspect.signature(method).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        expected = [p.name for p in inspect.signature(theirs).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert mine[: len(expected)] == expected, name


def test_the_host_s_switch_that_forces_a_miss_is_honoured(host: Host) -> None:
    """``SGLANG_RADIX_FORCE_MISS``: what is cached is not used, and what is computed again gets no second place."""
    for row in (1, 2):
        req = host.admit("first", PROMPT, row)
        host.extend(req)
        host.finish(req)
        if row == 1:
            assert len(host.matched(PROMPT)) == 8
    with envs.SGLANG_RADIX_FORCE_MISS.override(True):
        req = host.admit("missed", PROMPT)
        assert len(req.prefix_indices) == 0
        host.extend(req)
        host.finish(req)
    assert len(host.matched(PROMPT)) == 8 == host.cache.total_size()
    assert host.is_balanced()
