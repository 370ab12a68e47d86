"""K3's prefix cache behind the host's interface, over the host's own pools."""

from __future__ import annotations

import inspect
from array import array
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.environ import envs
from sglang.srt.managers.schedule_policy import AddReqResult
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache, EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_k3.host.prefix_cache import K3PrefixCache
from sglang_k3.integration import seam_prefix_cache
from sglang_k3.mem.engine import Refusal
from sglang_k3.mem.limits import CheckpointLimits

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
        self.pool, self.cache = pool, K3PrefixCache(params, limits)

    def admit(self, rid: str, prompt: list[int], row: int = 1) -> Req:
        req = Req(rid, prompt, row)
        assert self.cache.admit(req) is None
        return req

    def extend(self, req: Req, end: int | None = None) -> SimpleNamespace:
        """Launch the forward of a chunk; what the batch carried while it was launched."""
        start, req.extend_range.end = len(req.prefix_indices), end or len(req.origin_input_ids)
        self.pool.req_to_token[req.req_pool_idx, :start] = req.prefix_indices.int()
        new = self.allocator.alloc(req.extend_range.end - start)
        self.pool.req_to_token[req.req_pool_idx, start : req.extend_range.end] = new.int()
        batch = SimpleNamespace(reqs=[req])
        with self.cache.forward(batch):
            seen = SimpleNamespace(**vars(batch))
            self.pool.mamba_allocator.moves.run()
            self.temporal[:, req.mamba_pool_idx] = req.extend_range.end  # the model: here a state is its depth
            if seen.mamba_track_mask is not None:
                self.temporal[:, seen.mamba_track_indices] = seen.mamba_track_seqlens.float()
        assert batch.mamba_track_mask is None
        return seen

    def finish(self, req: Req, *, is_insert: bool = True) -> None:
        self.cache.cache_finished_req(req, is_insert, kv_len_to_handle=len(req.origin_input_ids))

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
