"""The prefix cache in the host's Prometheus endpoint (``--enable-metrics``, ``/metrics``).

Nothing is counted here: what the engine has counted is carried over, and only what has changed since. The names and
what they say are ``METRICS``, from which the README has its table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sglang_k3.mem import checkpoints
from sglang_k3.mem.engine import CheckpointEngine

if TYPE_CHECKING:
    from prometheus_client import Counter, Gauge


class Metric(NamedTuple):
    """One name of the endpoint; a counter ends in ``_total`` there.

    Attributes:
        label: what tells its series apart, beside the host's labels of the rank.
        values: of that label.
    """

    name: str
    documentation: str
    label: str | None = None
    values: tuple[str, ...] = ()
    is_gauge: bool = False


STARTS: Final = Metric("sglang:k3_prefix_starts", "Requests that began to compute, again after each retraction.")
STATE_HITS: Final = Metric("sglang:k3_state_hits", "Of these, started from a cached recurrent state.")
STATE_HIT_TOKENS: Final = Metric("sglang:k3_state_hit_tokens", "Prompt tokens that these states saved.")
KV_ONLY_HITS: Final = Metric(
    "sglang:k3_kv_hits_without_state", "Starts of prompts whose KV was cached deeper than any state."
)
KV_ONLY_TOKENS: Final = Metric("sglang:k3_kv_tokens_without_state", "Tokens of that KV, from which nothing can start.")
REPLAYED: Final = Metric("sglang:k3_replayed_tokens", "Of these, computed again so far.")
PLANTED: Final = Metric(
    "sglang:k3_checkpoints_planted", "States that came into the tree: where prompts part, or not.", "kind",
    ("fork", "plain"),
)  # fmt: skip
SKIPPED: Final = Metric(
    "sglang:k3_checkpoints_skipped",
    "States that were due and are not kept.",
    "reason",
    (*checkpoints.SKIPPED, "duplicate"),
)
EVICTED: Final = Metric("sglang:k3_checkpoints_evicted", "States that left the tree.", "reason", checkpoints.EVICTED)
SLOTS: Final = Metric(
    "sglang:k3_state_slots",
    "State slots: a snapshot is of a running request and not in the tree yet; a protected state is in the tree, and "
    "about to be started from or kept for a session.",
    "owner",
    ("free", "working", "snapshot", "cached", "protected"),
    is_gauge=True,
)
METRICS: Final = (
    STARTS, STATE_HITS, STATE_HIT_TOKENS, KV_ONLY_HITS, KV_ONLY_TOKENS, REPLAYED, PLANTED, SKIPPED, EVICTED, SLOTS,
)  # fmt: skip


class PrefixCacheMetrics:
    """One rank's series.

    Args:
        labels: the host's, of this rank.
    """

    def __init__(self, labels: Mapping[str, Any]) -> None:
        # Not before: the library decides at its import whether the figures of several processes are added.
        from prometheus_client import Counter, Gauge

        self.metrics: dict[str, Counter | Gauge] = {}
        for metric in METRICS:
            names = [*labels, *([metric.label] if metric.label else [])]
            if metric.is_gauge:
                self.metrics[metric.name] = Gauge(
                    metric.name, metric.documentation, names, multiprocess_mode="mostrecent"
                )
            else:
                self.metrics[metric.name] = Counter(metric.name, metric.documentation, names)
        self._labels = dict(labels)
        self._series: dict[tuple[str, str], Any] = {}
        self._published: dict[tuple[str, str], int] = {}

    def update(self, engine: CheckpointEngine) -> None:
        """Carry over what has changed: ten microseconds or so, and a write for each figure that did."""
        for metric, value, reading in readings(engine):
            key = metric.name, value
            before = self._published.get(key)
            if reading == before:
                continue
            if metric.is_gauge:
                self._of(metric, value).set(reading)
            else:
                self._of(metric, value).inc(reading - (before or 0))
            self._published[key] = reading

    def _of(self, metric: Metric, value: str) -> Any:
        key = metric.name, value
        if key not in self._series:
            labels = {**self._labels, metric.label: value} if metric.label else self._labels
            self._series[key] = self.metrics[metric.name].labels(**labels)
        return self._series[key]


def readings(engine: CheckpointEngine) -> Iterator[tuple[Metric, str, int]]:
    """Every series, by the value of its own label (empty if it has none), and what it stands at."""
    counts = engine.cache.counts
    yield STARTS, "", counts.starts
    yield STATE_HITS, "", counts.state_hits
    yield STATE_HIT_TOKENS, "", counts.state_hit_tokens
    yield KV_ONLY_HITS, "", counts.kv_only_hits
    yield KV_ONLY_TOKENS, "", counts.kv_only_tokens
    yield REPLAYED, "", counts.replayed_tokens
    yield PLANTED, "fork", counts.planted_forks
    yield PLANTED, "plain", counts.planted - counts.planted_forks
    yield SKIPPED, "duplicate", counts.duplicates
    for metric, by_value in ((SKIPPED, counts.skipped), (EVICTED, counts.evicted), (SLOTS, engine.slots_by_owner)):
        for value, count in by_value.items():
            yield metric, value, count
