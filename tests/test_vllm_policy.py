"""How many drafts pay, and when a residual is expected; pure logic."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lynx_backend.integrations.vllm.arrivals import Arrivals
from lynx_backend.integrations.vllm.policy import PRIOR, Policy
from lynx_backend.keys import Part
from lynx_backend.states import State

seconds = st.floats(1e-6, 100.0)
counts = st.integers(0, 300)
probabilities = st.floats(0.0, 1.0)


def policy(step: float, token: float, acceptance: float | None = None, limit: int = 64) -> Policy:
    made = Policy("auto", limit)
    made.step, made.token = step, token
    if acceptance is not None:
        made._tried = 1e9
        made._accepted = acceptance * 1e9
    return made


def balance(one: Policy, drafts: int, rest: int, others: int) -> float:
    """Seconds gained by everybody together, written down without the policy's shortcuts."""
    p, total = one.acceptance, 0.0
    kept = sum(p**k for k in range(1, drafts + 1))
    total += kept * one.step - drafts * one.token
    twice = rest + 2 * drafts - kept
    return total - others * one.token * twice


@given(seconds, seconds, probabilities, seconds, counts, counts)
def test_what_auto_decides_pays(step, token, acceptance, wait, rest, others):
    """And what it declines would not have paid with any number of drafts that fits the wait."""
    one = policy(step, token, acceptance)
    most = one.drafts(wait, rest, others)
    assert 0 <= most <= 64
    fitting = min(64, int(max(0.0, (wait - rest * token) / step)))
    best = max((balance(one, n, rest, others) for n in range(fitting + 1)), default=0.0)
    scale = (1 + others) * (step + token) * (65 + rest)
    if most:
        assert balance(one, min(most, fitting), rest, others) >= best - 1e-9 * scale
        assert best > -1e-9 * scale
    else:
        assert best <= 1e-9 * scale


@given(seconds, seconds, probabilities, seconds, counts, counts, seconds, counts)
def test_waiting_longer_or_with_fewer_others_never_pays_less(
    step, token, acceptance, wait, rest, others, more_wait, more_others
):
    one = policy(step, token, acceptance)
    drafts = one.drafts(wait, rest, others)
    if drafts:
        assert one.drafts(wait + more_wait, rest, others) == drafts
    assert one.drafts(wait, rest, others + more_others) <= drafts


@given(probabilities, probabilities, seconds, counts)
def test_a_better_anchor_gets_no_fewer_drafts(one, other, token, others):
    low, high = sorted((one, other))
    step = 20 * token
    worse = policy(step, token, low).drafts(math.inf, 0, others)
    assert worse <= policy(step, token, high).drafts(math.inf, 0, others)


def test_numbers():
    """Steps of 20 ms, 0.1 ms a further token."""
    assert policy(0.02, 0.0001).drafts(1.0, 30, others=0) == 50  # 0.9^51 * 20 ms < 0.1 ms
    assert policy(0.02, 0.0001).drafts(0.01, 30, others=0) == 0  # not even one fits
    assert policy(0.02, 0.0001).drafts(math.inf, 5000, others=64) == 0  # the rest, for 64 others
    assert policy(0.02, 0.0001, 0.0).drafts(math.inf, 0, others=0) == 0
    assert policy(0.02, 0.0001, 1.0).drafts(math.inf, 0, others=8) == 64
    assert policy(0.02, 0.0001, 1.0, limit=5).drafts(math.inf, 0, others=8) == 5


def test_before_anything_is_measured_it_drafts_if_there_is_a_wait():
    assert Policy("auto").drafts(math.inf, 10, 3) == 64
    assert Policy("auto").drafts(0.0, 10, 3) == 0


@given(seconds, counts, counts)
def test_switches(wait, rest, others):
    assert Policy("always", 7).drafts(0.0, rest, others) == 7
    assert Policy("never", 7).drafts(wait, rest, others) == 0


@given(st.lists(st.tuples(seconds, st.integers(1, 64), st.integers(0, 4096)), max_size=50))
def test_measured_costs_stay_within_what_was_measured(steps):
    one = Policy()
    for took, requests, further in steps:
        one.measured(took, requests + further, requests)
    decoding = [took for took, _, further in steps if not further]
    if decoding:
        assert min(decoding) * 0.999 <= one.step <= max(decoding) * 1.001
    else:
        assert one.step == 0.0
    assert one.token >= 0.0


def test_costs_follow():
    one = Policy()
    for _ in range(200):
        one.measured(0.02, 8, 8)
        one.measured(0.12, 1008, 8)
    assert one.step == pytest.approx(0.02)
    assert one.token == pytest.approx(0.0001)


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(0, 64)), max_size=100))
def test_acceptance_is_a_probability(requests):
    one = Policy()
    for drafted, accepted in requests:
        one.verified(drafted, min(drafted, accepted))
        assert 0.0 < one.acceptance < 1.0


def test_acceptance_follows_and_is_forgotten():
    one = Policy()
    assert one.acceptance == pytest.approx(PRIOR)
    for _ in range(500):
        one.verified(64, 1)  # one accepted, one rejected, 62 that say nothing
    assert one.acceptance == pytest.approx(0.6, abs=0.05)
    low = one.acceptance
    for _ in range(500):
        one.waited()
    assert low < one.acceptance
    assert one.acceptance == pytest.approx(PRIOR)


@given(st.integers(0, 64), seconds)
def test_gains(accepted, step):
    assert policy(step, 0.0).gained(64, accepted) == pytest.approx(accepted * step)
    assert policy(step, step).gained(64, accepted) <= 0.0


# -- arrivals --------------------------------------------------------------------------------------


def arriving(anchor: int, residual: int, landed: tuple[int, int] = (0, 0)) -> Any:
    return SimpleNamespace(
        bytes_expected={Part.ANCHOR: anchor, Part.RESIDUAL: residual},
        bytes_received=dict(zip(Part, landed, strict=True)),
        state=State.ABSENT,
    )


def test_anchors_first_then_residuals_in_order():
    one = Arrivals()
    requests = {"a": arriving(100, 300), "b": arriving(100, 50)}
    assert one.waits(requests) == {"a": math.inf, "b": math.inf}
    one.observe(10.0, requests)
    requests["a"].bytes_received[Part.ANCHOR] = 100
    one.observe(11.0, requests)
    assert one.rate == pytest.approx(100.0)
    waits = one.waits(requests)
    assert waits["a"] == pytest.approx((100 + 300) / 100)
    assert waits["b"] == pytest.approx((100 + 300 + 50) / 100)


def test_time_in_which_nothing_is_awaited_does_not_count():
    one = Arrivals()
    first = {"a": arriving(100, 0)}
    one.observe(0.0, first)
    first["a"].bytes_received[Part.ANCHOR] = 100
    first["a"].state = State.FULL
    one.observe(1.0, first)
    assert one.waits(first) == {"a": 0.0}
    one.observe(2.0, {})
    second = {"b": arriving(50, 50)}
    one.observe(1000.0, second)
    assert one.rate == pytest.approx(100.0)
    assert one.waits(second)["b"] == pytest.approx(1.0)


@given(st.lists(st.tuples(st.floats(0.001, 1.0), st.integers(0, 10**6)), min_size=1, max_size=40))
def test_the_rate_is_one_that_was_seen(steps):
    one, request = Arrivals(), {"a": arriving(10**9, 10**9)}
    now = 0.0
    one.observe(now, request)
    for passed, landed in steps:
        now += passed
        request["a"].bytes_received[Part.ANCHOR] += landed
        one.observe(now, request)
    rates = [landed / passed for passed, landed in steps]
    assert min(rates) * 0.999 <= one.rate <= max(rates) * 1.001


def test_a_link_that_stops_is_noticed():
    one, request = Arrivals(), {"a": arriving(100, 100)}
    one.observe(0.0, request)
    request["a"].bytes_received[Part.ANCHOR] = 100
    one.observe(1.0, request)
    before = one.waits(request)["a"]
    for now in range(2, 60):
        one.observe(float(now), request)
    assert one.waits(request)["a"] > 1000 * before
