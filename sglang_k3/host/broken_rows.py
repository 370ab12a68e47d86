"""A row of logits from which no token can be drawn ends its own request, not the scheduler.

NaN of an overflow, or a grammar that allows no token: to draw from such a row ends the process, or returns token 0 as
if it were an answer. Here the row is made harmless, a mark takes the place of its token, and the request is aborted
when the mark arrives on the host, which is one step later under overlap scheduling.

By then the prefix cache has all chunks of the prompt but the last, and NaN in one of them is in every state that comes
after it. So the cache gives up what it has of the request: were the NaN of the moment only, it would stay there.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from http import HTTPStatus
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

logger = logging.getLogger(__name__)

# Marks in place of token ids.
NOT_FINITE = -1
NONE_ALLOWED = -2

_REASONS = {
    NOT_FINITE: (
        HTTPStatus.INTERNAL_SERVER_ERROR,
        "The model's logits are not finite. If this happens again, check the checkpoint and --dtype.",
    ),
    NONE_ALLOWED: (
        HTTPStatus.BAD_REQUEST,
        "The grammar, schema or logit_bias of this request allows no next token. Ask for something that has an end.",
    ),
}


class Filled(NamedTuple):
    """Rows without a token, ``[B]`` bool: all of them, and those of which no token is allowed."""

    rows: torch.Tensor
    not_allowed: torch.Tensor

    def mark(self, token_ids: torch.Tensor) -> torch.Tensor:
        """``token_ids [B]`` with marks in place of what was drawn from these rows."""
        return token_ids.masked_fill(self.rows, NOT_FINITE).masked_fill_(self.not_allowed, NONE_ALLOWED)


def disarm(logits: torch.Tensor) -> Filled:
    """Fill the rows of ``logits [B, V]``, any floating dtype, that no token can be drawn from with zeros, in place.

    Nothing waits for the device. Every decode step waits for these launches, so they are few.
    """
    largest = logits.amax(dim=-1)  # NaN if any element is
    rows = largest - largest != 0  # NaN and infinity are not 0 less themselves
    logits.masked_fill_(rows.unsqueeze(-1), 0.0)
    return Filled(rows, largest == -math.inf)


def abort_if_marked(req: Req, *_: object, **__: object) -> None:
    """Let a request whose newest token is a mark finish as aborted, and keep its states out of the prefix cache.

    It runs before ``Req.update_finish_state`` and is given the same arguments.
    """
    if not req.output_ids or req.output_ids[-1] >= 0 or req.finished():
        return
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    status, message = _REASONS[req.output_ids[-1]]
    logger.error("Request %s is aborted after %d tokens: %s", req.rid, len(req.output_ids) - 1, message)
    req.output_ids[-1] = 0  # what the host decodes must be a token
    req.to_finish = FINISH_ABORT(message, status, status.phrase)
    req.grammar = None  # it would be asked to accept the mark
    req.skip_radix_cache_insert = True


def unmark_logprobs(req: Req) -> None:
    """Name a token in place of a mark beside the last log-prob, which the host decodes to text when it is sent."""
    ids = req.logprob.output_token_logprobs_idx
    if ids and ids[-1] in _REASONS:
        ids[-1] = 0


def is_broken(req: Req) -> bool:
    """Whether a request was aborted for NaN."""
    return getattr(req.finished_reason, "message", None) == _REASONS[NOT_FINITE][1]


def drop_broken_states(tree: UnifiedRadixCache, req: Req) -> None:
    """Take the prefix of a request that was aborted for NaN out of the cache, up to where another request needs it.

    If that one has NaN from it too, it ends here as well.

    Args:
        req: its own slots and locks are given back by now.
    """
    if not is_broken(req):
        return
    node = req.last_node
    while node in tree.evictable_device_leaves:
        parent = node.parent
        tree._evict_device_leaf(node, Counter())
        node = parent
