"""The stream of a request that is retracted, and aborted before it runs again, ends with all that it has said.

The outputs pass through the host's own tokenizer manager, as a client of ``/generate`` sees them.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
from array import array
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from sglang.srt.managers.io_struct import AbortReq, BatchStrOutput, GenerateReqInput
from sglang.srt.managers.tokenizer_manager import ReqState, TokenizerManager

from sglang_k3.integration.seam_stream import _end_waiting

pytestmark = pytest.mark.sglang
STEPS = ((238, "a"), (125, "b"), (337, "c"))
End = Callable[[TokenizerManager, AbortReq], None]


def host_end(manager: TokenizerManager, message: AbortReq) -> None:
    """The host's own method, also where another test has loaded the plugin."""
    inspect.unwrap(TokenizerManager._handle_abort_req)(manager, message)


def our_end(manager: TokenizerManager, message: AbortReq) -> None:
    _end_waiting(host_end, manager, message)


def tokenizer_manager(request: GenerateReqInput, *, is_incremental: bool, is_k3: bool = True) -> Any:
    manager = TokenizerManager.__new__(TokenizerManager)
    manager.server_args = MagicMock(
        is_k3=is_k3, weight_version="1", batch_notify_size=16, speculative_algorithm=None, skip_tokenizer_init=False
    )
    manager.incremental_streaming_output = is_incremental
    manager.enable_metrics = manager.enable_lora = manager.skip_tokenizer_init = False
    manager.dump_requests_folder = manager.crash_dump_folder = ""
    manager.request_logger = MagicMock()
    manager.request_metrics_exporter_manager = SimpleNamespace(exporter_enabled=lambda: False)
    times = MagicMock(first_token_time=0.0)
    times.get_e2e_latency.return_value = 0.0
    manager.rid_to_state = {request.rid: ReqState([], False, asyncio.Event(), request, times)}
    return manager


def step_output(rid: str, token: int, text: str) -> BatchStrOutput:
    """What the detokenizer sends of one decode step."""
    fields: dict[str, Any] = dict.fromkeys(BatchStrOutput.__struct_fields__)
    counts = ("prompt_tokens", "completion_tokens", "reasoning_tokens", "cached_tokens", "retraction_counts")
    fields |= dict.fromkeys(counts, [1])
    fields |= {"input_token_logprobs_val": [None], "output_token_logprobs_val": [[-0.5]]}
    fields |= {"output_token_logprobs_idx": [[token]]}
    fields |= {"rids": [rid], "finished_reasons": [None], "output_strs": [text], "output_ids": [array("q", [token])]}
    return BatchStrOutput(**fields)


async def outputs(end: End, *, is_incremental: bool, reads_along: bool, is_k3: bool = True) -> list[dict[str, Any]]:
    """Everything that the client is sent. One that does not read along gets several outputs at once."""
    request = GenerateReqInput(input_ids=[1], rid="r", stream=True, return_logprob=True)
    request.normalize_batch_and_arguments()
    manager = tokenizer_manager(request, is_incremental=is_incremental, is_k3=is_k3)
    state = manager.rid_to_state["r"]
    client = asyncio.create_task(read(manager._wait_one_response(request)))
    await asyncio.sleep(0)
    for token, text in STEPS:
        await manager._handle_batch_output(step_output("r", token, text))
        while reads_along and state.out_list:
            await asyncio.sleep(0)
    end(manager, AbortReq(rid="r"))
    assert not manager.rid_to_state
    sent = await client
    assert sent[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    return sent


async def read(stream: AsyncIterator[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events of a stream; each is written out before the next comes."""
    return [copy.deepcopy(output) async for output in stream]


def answer(sent: list[dict[str, Any]], *, is_incremental: bool) -> tuple[list[int], str, int]:
    """Tokens, text and number of log-probs that a client has in the end."""
    read = sent if is_incremental else sent[-1:]
    ids = [token for output in read for token in output["output_ids"]]
    num_logprobs = sum(len(output["meta_info"]["output_token_logprobs"]) for output in read)
    return ids, "".join(output["text"] for output in read), num_logprobs


WHOLE = ([token for token, _ in STEPS], "".join(text for _, text in STEPS), len(STEPS))


@pytest.mark.parametrize("is_incremental", [False, True], ids=["so_far", "incremental"])
@pytest.mark.parametrize("reads_along", [True, False], ids=["reads_along", "reads_late"])
def test_it_ends_with_all_that_it_has_said(*, is_incremental: bool, reads_along: bool) -> None:
    sent = asyncio.run(outputs(our_end, is_incremental=is_incremental, reads_along=reads_along))
    assert answer(sent, is_incremental=is_incremental) == WHOLE


@pytest.mark.parametrize("is_incremental", [False, True], ids=["so_far", "incremental"])
@pytest.mark.parametrize("reads_along", [True, False], ids=["reads_along", "reads_late"])
def test_without_the_seam_it_does_not(*, is_incremental: bool, reads_along: bool) -> None:
    """When this fails, the seam can go."""
    sent = asyncio.run(outputs(host_end, is_incremental=is_incremental, reads_along=reads_along))
    assert answer(sent, is_incremental=is_incremental) != WHOLE


def test_other_models_are_left_alone() -> None:
    by_host, by_us = (
        asyncio.run(outputs(end, is_incremental=False, reads_along=True, is_k3=False)) for end in (host_end, our_end)
    )
    assert by_us == by_host


def test_a_request_that_is_over_is_left_alone() -> None:
    request = GenerateReqInput(input_ids=[1], rid="r", stream=True)
    manager = tokenizer_manager(request, is_incremental=False)
    our_end(manager, AbortReq(rid="another"))
    assert manager.rid_to_state["r"].out_list == []
