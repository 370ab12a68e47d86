"""A row that no token can be drawn from: what becomes of its logits, its token and its request."""

from __future__ import annotations

from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_k3.host.broken_rows import NONE_ALLOWED, NOT_FINITE, abort_if_marked, disarm, unmark_logprobs
from sglang_k3.integration import seam_requests
from sglang_k3.integration.seam_requests import _relay, _release, _sample

pytestmark = pytest.mark.sglang
NAN, INFINITY = float("nan"), float("inf")
ROWS = [
    ([0.0, 1.0, 2.0], 0),
    ([0.0, -INFINITY, 2.0], 0),
    ([0.0, NAN, 2.0], NOT_FINITE),
    ([NAN, NAN, NAN], NOT_FINITE),
    ([0.0, INFINITY, 2.0], NOT_FINITE),
    ([-INFINITY, -INFINITY, -INFINITY], NONE_ALLOWED),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_broken_rows_are_filled_and_marked_and_no_other_is_touched(dtype: torch.dtype) -> None:
    logits = torch.tensor([row for row, _ in ROWS], dtype=dtype)
    before = logits.clone()
    assert disarm(logits).mark(torch.zeros(len(ROWS), dtype=torch.int32)).tolist() == [mark for _, mark in ROWS]
    for i, (_, mark) in enumerate(ROWS):
        assert torch.equal(logits[i], before[i] if mark == 0 else torch.zeros(3, dtype=dtype))


def test_a_marked_row_does_not_disturb_the_drawing_of_the_others() -> None:
    """``multinomial`` refuses a whole batch with one NaN in it."""

    def draw(_: Any, output: Any) -> torch.Tensor:
        return torch.multinomial(output.next_token_logits.softmax(-1), 1).view(-1).to(torch.int32)

    logits = torch.full((3, 4), -INFINITY)
    logits[0, 2] = 0.0
    logits[1] = NAN
    output = SimpleNamespace(next_token_logits=logits)
    token_ids = _sample(draw, None, output)
    assert token_ids.tolist() == [2, NOT_FINITE, NONE_ALLOWED] and token_ids.dtype == torch.int32


def test_the_next_step_is_given_a_token_and_the_scheduler_the_mark() -> None:
    result = SimpleNamespace(next_token_ids=torch.tensor([5, NOT_FINITE]))
    relayed: list[list[int]] = []
    _relay(lambda _, __, result: relayed.append(result.next_token_ids.tolist()), None, None, result)
    assert relayed == [[5, 0]]
    assert result.next_token_ids.tolist() == [5, NOT_FINITE]


@pytest.mark.parametrize(("last", "sent"), [(7, 7), (NOT_FINITE, 0), (NONE_ALLOWED, 0)])
def test_log_probs_are_sent_of_tokens_only(last: int, sent: int) -> None:
    logprob = SimpleNamespace(output_token_logprobs_idx=[5, last])
    unmark_logprobs(SimpleNamespace(logprob=logprob))
    assert logprob.output_token_logprobs_idx == [5, sent]


def request(*output_ids: int, max_new_tokens: int = 8) -> Req:
    params = SamplingParams(max_new_tokens=max_new_tokens)
    params.normalize(None)
    req = Req("r", "", [1, 2], params, vocab_size=10)
    req.output_ids.extend(output_ids)
    return req


@pytest.mark.parametrize("max_new_tokens", [2, 8])
@pytest.mark.parametrize(
    ("mark", "status"), [(NOT_FINITE, HTTPStatus.INTERNAL_SERVER_ERROR), (NONE_ALLOWED, HTTPStatus.BAD_REQUEST)]
)
def test_a_marked_request_is_aborted(mark: int, status: HTTPStatus, max_new_tokens: int) -> None:
    """Also where the mark is its last token, of which the host would otherwise make an answer."""
    req = request(5, mark, max_new_tokens=max_new_tokens)
    req.grammar = object()  # would fail whoever asks it
    abort_if_marked(req, 1)
    req.update_finish_state(1)
    assert isinstance(req.finished_reason, FINISH_ABORT) and req.finished_reason.status_code == status
    assert list(req.output_ids) == [5, 0]
    assert req.grammar is None and req.skip_radix_cache_insert


def test_marks_are_seen_before_the_host_looks_for_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which then finds a request to finish as aborted, whatever its last token would mean."""
    registered: list[tuple[object, ...]] = []
    monkeypatch.setattr(HookRegistry, "register", lambda *hook: registered.append(hook))
    monkeypatch.setattr(HookRegistry, "apply_hooks", lambda: None)
    seam_requests.install_scheduler()
    target = "sglang.srt.managers.schedule_batch.Req.update_finish_state"
    assert [hook for hook in registered if hook[0] == target] == [(target, abort_if_marked, HookType.BEFORE)]


def test_another_request_is_left_alone() -> None:
    for req in (request(), request(5), request(0)):
        before = list(req.output_ids)
        abort_if_marked(req)
        assert list(req.output_ids) == before and req.to_finish is None and not req.skip_radix_cache_insert


class Tree:
    """A path of nodes that are numbered from the root, 0; those up to ``held`` have another user."""

    def __init__(self, length: int, held: int) -> None:
        self.nodes = [SimpleNamespace(parent=None)]
        for _ in range(length):
            self.nodes.append(SimpleNamespace(parent=self.nodes[-1]))
        self.held = held

    @property
    def evictable_device_leaves(self) -> list[Any]:
        return self.nodes[-1:] if len(self.nodes) > self.held + 1 else []

    def _evict_device_leaf(self, node: Any, freed: dict[str, int]) -> None:
        assert node is self.nodes.pop()
        freed["full"] += 1


@pytest.mark.parametrize(("mark", "left"), [(0, 5), (NONE_ALLOWED, 5), (NOT_FINITE, 2)])
def test_the_cache_gives_up_what_it_has_of_a_request_with_nan(mark: int, left: int) -> None:
    tree = Tree(5, held=2)
    req = request(5, mark, max_new_tokens=2)
    req.last_node = tree.nodes[-1]
    abort_if_marked(req, 1)
    req.update_finish_state(1)
    assert req.finished()
    released = []
    _release(lambda tree, req, is_insert: released.append(len(tree.nodes)), tree, req, is_insert=False)
    assert released == [6] and len(tree.nodes) == left + 1
