import importlib
import subprocess
import sys

import pytest

prometheus_client = pytest.importorskip("prometheus_client")

from lynx_backend import metrics  # noqa: E402
from lynx_backend.errors import ConfigError  # noqa: E402

# Every metric with its labels, used once each; run with and without prometheus-client.
USE_ALL = """
from lynx_backend import metrics as m
m.OBJECTS.labels(part="anchor", tier="t", op="get", result="hit").inc()
m.BYTES.labels(part="anchor", tier="t", direction="out").inc(7)
m.OP_SECONDS.labels(part="anchor", tier="t", op="get").observe(0.002)
m.TIER_BYTES.labels(tier="t").set(11)
m.TIER_CAPACITY_BYTES.labels(tier="t").set(13)
m.ANCHOR_ONLY_CHUNKS.labels(tier="t").set(2)
m.BREAKER_OPEN.labels(tier="t").set(1)
m.ERRORS.labels(kind="corrupt").inc()
m.DRAFT_TOKENS.labels(result="accepted").inc(5)
m.DRAFT_DECISIONS.labels(reason="drafted").inc()
m.ANCHOR_LEAD_SECONDS.observe(0.25)
"""


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("port", "host"),
    [(70000, "127.0.0.1"), (-1, "127.0.0.1"), (0, "192.0.2.1"), (0, "a" * 64), (0, "a..b")],
)
def test_metrics_that_cannot_be_shown_there_are_an_error(port: int, host: str):
    with pytest.raises(ConfigError, match=f"metrics cannot be shown at port {port} of {host}: "):
        metrics.serve(port, host)


def test_the_host_registry_exposes_every_metric_under_its_documented_name():
    out = run(
        USE_ALL + "from prometheus_client import generate_latest\nprint(generate_latest().decode())"
    )
    for line in [
        'lynx_objects_total{op="get",part="anchor",result="hit",tier="t"} 1.0',
        'lynx_bytes_total{direction="out",part="anchor",tier="t"} 7.0',
        'lynx_op_seconds_sum{op="get",part="anchor",tier="t"} 0.002',
        'lynx_op_seconds_bucket{le="0.003",op="get",part="anchor",tier="t"} 1.0',
        'lynx_tier_bytes{tier="t"} 11.0',
        'lynx_tier_capacity_bytes{tier="t"} 13.0',
        'lynx_anchor_only_chunks{tier="t"} 2.0',
        'lynx_breaker_open{tier="t"} 1.0',
        'lynx_errors_total{kind="corrupt"} 1.0',
        'lynx_draft_tokens_total{result="accepted"} 5.0',
        'lynx_draft_decisions_total{reason="drafted"} 1.0',
        "lynx_anchor_lead_seconds_sum 0.25",
    ]:
        assert line in out.splitlines()


def test_without_prometheus_client_the_same_calls_do_nothing():
    block = "import sys\nsys.modules['prometheus_client'] = None\n"
    after = "assert m.OBJECTS.labels('a', 'b', 'c', 'd').inc() is None\nprint('done')"
    assert run(block + USE_ALL + after) == "done\n"


def test_reloading_keeps_the_metrics_and_their_counts():
    metrics.ERRORS.labels(kind="test-reload").inc()
    again = importlib.reload(metrics)
    again.ERRORS.labels(kind="test-reload").inc()
    value = prometheus_client.REGISTRY.get_sample_value
    assert value("lynx_errors_total", {"kind": "test-reload"}) == 2


def test_a_second_import_under_fresh_modules_shares_the_metrics(monkeypatch):
    for name in [m for m in sys.modules if m.split(".")[0] == "lynx_backend"]:
        monkeypatch.delitem(sys.modules, name)
    again = importlib.import_module("lynx_backend.metrics")
    assert again is not metrics
    assert again.OBJECTS is metrics.OBJECTS


def test_counts_are_summed_over_the_other_labels():
    for part, tier, direction, size in (
        ("anchor", "counts-a", "in", 3),
        ("residual", "counts-a", "in", 4),
        ("anchor", "counts-a", "out", 100),
        ("anchor", "counts-b", "in", 5),
    ):
        metrics.BYTES.labels(part, tier, direction).inc(size)
    found = metrics.counts("lynx_bytes_total", "tier", direction="in")
    assert (found["counts-a"], found["counts-b"]) == (7, 5)
