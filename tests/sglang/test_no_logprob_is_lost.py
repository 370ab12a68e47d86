"""A request that is retracted before its first token keeps the log-prob of that token."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import MagicMock

import pytest
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.scheduler_components.output_streamer import _GenerationStreamAccumulator

from sglang_k3.integration.seam_stream import _send

pytestmark = pytest.mark.sglang


def accumulator() -> Any:
    return _GenerationStreamAccumulator(
        return_logprob=True,
        return_hidden_states=False,
        return_routed_experts=False,
        return_indexer_topk=False,
        return_sampling_mask=False,
        spec_algorithm=MagicMock(),
        disaggregation_mode=DisaggregationMode.NULL,
        default_stream_interval=1,
        default_force_stream_interval=50,
        get_cached_tokens_details=lambda req: None,
    )


def sent_logprobs(accept: Any) -> list[float]:
    """Of a streamed request whose prefill is handled once in vain and once with its first token."""
    req = MagicMock(stream=True, output_ids=[], send_token_offset=0, send_output_token_logprobs_offset=0)
    req.finished.return_value = False
    req.sampling_params.stream_interval = None
    req.check_match_stop_str_prefix.return_value = False
    req.init_incremental_detokenize.return_value = ([], 0)
    req.logprob.output_token_logprobs_val = []
    sent = []
    for new in ([], [7]):
        req.output_ids = req.output_ids_through_stop = req.output_ids + new
        req.logprob.output_token_logprobs_val.extend(-0.5 for _ in new)
        step = accumulator()
        accept(step, req=req)
        sent += [value for values in step.output_token_logprobs_val for value in values]
    return sent


def test_the_first_logprob_is_sent() -> None:
    assert sent_logprobs(partial(_send, _GenerationStreamAccumulator.accept)) == [-0.5]


def test_without_the_seam_it_is_not() -> None:
    """When this fails, the seam can go."""
    assert sent_logprobs(_GenerationStreamAccumulator.accept) == []
