"""What drafting did, on its way to vLLM's own log line and to its ``/metrics``.

vLLM collects a connector's statistics once a step in the scheduler's process and shows them in the
front end's, so they are sums that can be added up and sent. The same events are counted in
:mod:`lynx_backend.metrics`, which sees one process only.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.metrics.utils import create_metric_per_engine

from ... import metrics

SECONDS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


class DraftStats(KVConnectorStats):
    """Since the last report; ``data`` is

    ======================  ========================================================================
    ``drafts``              by result (accepted, rejected, dropped): tokens
    ``decisions``           by reason: requests
    ``gained``              of each verified request, the seconds that its drafts gained
    ``lead``                of each, the seconds between its last anchor and its last residual
    ``withheld``            drafts that nobody has seen yet, now
    ======================  ========================================================================
    """

    data: dict[str, Any]

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data=data or {})
        if not data:
            self.reset()

    def reset(self) -> None:
        self.data = {"drafts": {}, "decisions": {}, "gained": [], "lead": [], "withheld": 0}

    def drafts(self, result: str, count: int) -> None:
        """Count drafts of one request; ``result`` as in ``lynx_draft_tokens_total``."""
        metrics.DRAFT_TOKENS.labels(result).inc(count)
        if count:
            self._add("drafts", {result: count})

    def decided(self, reason: str) -> None:
        """Count a request; ``reason`` as in ``lynx_draft_decisions_total``."""
        metrics.DRAFT_DECISIONS.labels(reason).inc()
        self._add("decisions", {reason: 1})

    def verified(self, gained: float, lead: float) -> None:
        """Note what drafting was good for, for a request that had drafts when they were checked."""
        self.data["gained"].append(gained)
        self.data["lead"].append(lead)

    def take(self, withheld: int) -> DraftStats | None:
        """What has come since the last call, and start again; None if there is nothing to say."""
        self.data["withheld"] = withheld
        if self.is_empty():
            return None
        taken = DraftStats(self.data)
        self.reset()
        return taken

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name in ("drafts", "decisions"):
            self._add(name, other.data[name])
        for name in ("gained", "lead"):
            self.data[name].extend(other.data[name])
        self.data["withheld"] = other.data["withheld"]
        return self

    def reduce(self) -> dict[str, int | float]:
        drafts, decisions = self.data["drafts"], self.data["decisions"]
        shown: dict[str, int | float] = {
            "Lynx requests that drafted": decisions.get("drafted", 0),
            "that waited": decisions.get("waited", 0),
            "recomputed": decisions.get("no_residual", 0),
            "drafts accepted": drafts.get("accepted", 0),
            "rejected": drafts.get("rejected", 0),
            "dropped": drafts.get("dropped", 0),
            "withheld now": self.data["withheld"],
        }
        if self.data["gained"]:
            shown["avg seconds gained"] = _mean(self.data["gained"])
            shown["avg anchor lead (s)"] = _mean(self.data["lead"])
        return shown

    def _add(self, name: str, counts: dict[str, int]) -> None:
        mine = self.data[name]
        for label, count in counts.items():
            mine[label] = mine.get(label, 0) + count


def _mean(values: list[float]) -> float:
    return round(sum(values) / len(values), 4)


class DraftPrometheus(KVConnectorPromMetrics):
    """The same at the front end's ``/metrics``."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            "drafts": self._counter_cls(
                name="vllm:lynx_draft_tokens_total",
                documentation="Tokens drafted on the anchor, by what verification said.",
                labelnames=[*labelnames, "result"],
            ),
            "decisions": self._counter_cls(
                name="vllm:lynx_draft_decisions_total",
                documentation="Requests that drafted or did not, by why.",
                labelnames=[*labelnames, "reason"],
            ),
        }
        self._withheld = create_metric_per_engine(
            self._gauge_cls(
                name="vllm:lynx_withheld_drafts",
                documentation="Drafts that wait for their residual.",
                labelnames=labelnames,
                multiprocess_mode="mostrecent",
            ),
            per_engine_labelvalues,
        )
        self._histograms = {
            "gained": self._seconds("gained", "Seconds that a request's drafts gained it"),
            "lead": self._seconds("anchor_lead", "Seconds from last anchor to last residual"),
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        values = self.per_engine_labelvalues[engine_idx]
        for name, counter in self._counters.items():
            for label, count in transfer_stats_data[name].items():
                counter.labels(*values, label).inc(count)
        for name, histogram in self._histograms.items():
            for seconds in transfer_stats_data[name]:
                histogram[engine_idx].observe(seconds)
        self._withheld[engine_idx].set(transfer_stats_data["withheld"])

    def _seconds(self, name: str, doc: str) -> Any:
        histogram = self._histogram_cls(
            name=f"vllm:lynx_{name}_seconds",
            documentation=f"{doc}.",
            buckets=SECONDS,
            labelnames=self._labelnames,
        )
        return create_metric_per_engine(histogram, self.per_engine_labelvalues)
