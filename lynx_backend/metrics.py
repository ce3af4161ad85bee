"""What happened, as Prometheus metrics in the host process's default registry.

Base units, and no label whose values grow with keys or requests. Without ``prometheus-client``
every metric is a no-op with the same methods, so callers never ask whether it is installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from .errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from prometheus_client import REGISTRY, Counter, Gauge, Histogram
else:
    try:
        from prometheus_client import REGISTRY, Counter, Gauge, Histogram
    except ImportError:

        class _Ignored:
            """Stands in for a metric, and for the registry, when nothing can collect them."""

            def __init__(self, *args: Any, **kwargs: Any) -> None: ...

            def labels(self, *args: str, **kwargs: str) -> _Ignored:
                return self

            def inc(self, amount: float = 1) -> None: ...

            def set(self, value: float) -> None: ...

            def observe(self, amount: float) -> None: ...

            def collect(self) -> tuple[()]:
                return ()

        REGISTRY = _Ignored()
        Counter = Gauge = Histogram = _Ignored

_M = TypeVar("_M", Counter, Gauge, Histogram)


def _register(
    kind: type[_M], name: str, doc: str, labels: Sequence[str] = (), **options: Any
) -> _M:
    # A registry refuses a second metric of one name, and this module may be imported again
    # (reload, a plugin loader): the metrics made first are kept where the second import finds them.
    made: dict[str, Any] = vars(REGISTRY).setdefault("lynx_backend_metrics", {})
    if name not in made:
        made[name] = kind(name, doc, labels, **options)
    metric: _M = made[name]
    return metric


OBJECTS = _register(
    Counter,
    "lynx_objects_total",
    "Objects put, got, promoted, evicted or sent to other nodes (tier served), by what came of it",
    ("part", "tier", "op", "result"),
)
BYTES = _register(
    Counter,
    "lynx_bytes_total",
    "Bytes of objects put into (in) or read from (out) a tier, brought (in) by a link, or sent to "
    "other nodes (served, out)",
    ("part", "tier", "direction"),
)
OP_SECONDS = _register(
    Histogram,
    "lynx_op_seconds",
    "Duration of one operation on one object",
    ("part", "tier", "op"),
    buckets=(1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0),
)
# In the multi-process mode that servers use, each living process reports its own gauges: a sum
# would count a folder that two processes share twice.
TIER_BYTES = _register(
    Gauge,
    "lynx_tier_bytes",
    "Bytes that count against the tier's capacity",
    ("tier",),
    multiprocess_mode="liveall",
)
TIER_CAPACITY_BYTES = _register(
    Gauge,
    "lynx_tier_capacity_bytes",
    "The limit the tier keeps",
    ("tier",),
    multiprocess_mode="liveall",
)
ANCHOR_ONLY_CHUNKS = _register(
    Gauge,
    "lynx_anchor_only_chunks",
    "Chunks whose anchor is held and whose residual is not",
    ("tier",),
    multiprocess_mode="liveall",
)
READY = _register(
    Gauge, "lynx_ready", "1 while this node serves its peers, else 0", multiprocess_mode="liveall"
)
PEER_CONNECTIONS = _register(
    Gauge,
    "lynx_peer_connections",
    "Peers connected to this node's server",
    multiprocess_mode="liveall",
)
PEERS_CONNECTED = _register(
    Gauge,
    "lynx_peers_connected",
    "Peers that this process was connected to when it last asked them",
    multiprocess_mode="liveall",
)
DIRECTORY_NODES = _register(
    Gauge,
    "lynx_directory_nodes",
    "Nodes with a lease when the directory was last read",
    multiprocess_mode="liveall",
)
DISCARDED_WORKERS = _register(
    Counter,
    "lynx_ucx_discarded_workers_total",
    "Connections lost in the middle of a message, whose UCX worker was destroyed with it",
)
BREAKER_OPEN = _register(
    Gauge,
    "lynx_breaker_open",
    "1 while reading from or writing to the tier is paused because it failed, else 0",
    ("tier",),
    multiprocess_mode="liveall",
)
ERRORS = _register(
    Counter,
    "lynx_errors_total",
    "Failures that ended in a miss, in a peer refused or in doing without what failed",
    ("kind",),
)
DRAFT_TOKENS = _register(
    Counter,
    "lynx_draft_tokens_total",
    "Tokens drafted on the anchor, by what verification said",
    ("result",),
)
DRAFT_DECISIONS = _register(
    Counter,
    "lynx_draft_decisions_total",
    "Requests that drafted or did not, by why",
    ("reason",),
)
PROXY_REQUESTS = _register(
    Counter,
    "lynx_proxy_requests_total",
    "Requests that the proxy answered, by the side that gave the first token",
    ("first_token",),
)
ANCHOR_LEAD_SECONDS = _register(
    Histogram,
    "lynx_anchor_lead_seconds",
    "Time by which a request's last anchor arrived before its last residual",
    buckets=(1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0),
)


def counts(metric: str, label: str, **wanted: str) -> dict[str, int]:
    """A counter's values in this process, summed up for each value of one label.

    Args:
        metric: its name, with ``_total``.
        wanted: values that other labels must have.
    """
    found: dict[str, int] = {}
    for family in REGISTRY.collect():
        for sample in family.samples:
            if sample.name == metric and wanted.items() <= sample.labels.items():
                name = sample.labels[label]
                found[name] = found.get(name, 0) + int(sample.value)
    return found


def serve(port: int, host: str = "127.0.0.1") -> None:
    """Show all metrics of this process at http://``host``:``port``/.

    Raises:
        UnsupportedError: ``prometheus-client`` is not installed.
        ConfigError: there cannot be listened.
    """
    try:
        from prometheus_client import start_http_server
    except ImportError:
        raise UnsupportedError(
            "showing metrics needs prometheus-client: pip install 'lynx-backend[metrics]'"
        ) from None
    try:
        start_http_server(port, host)
    except (OSError, OverflowError, UnicodeError) as e:  # no port at all; no name of a host
        raise ConfigError(f"metrics cannot be shown at port {port} of {host}: {e}") from None
