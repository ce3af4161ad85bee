import logging

import pytest

from lynx_backend.logs import WarningLimiter

LOGGER = logging.getLogger("lynx_backend.test_logs")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def limiter(clock: Clock) -> WarningLimiter:
    return WarningLimiter(interval=30.0, clock=clock)


def test_one_line_each_interval_and_the_next_says_how_many_were_dropped(limiter, clock, caplog):
    for i in range(5):
        limiter.warn(LOGGER, "nvme", "read of %s failed", i)
        clock.now += 5
    assert caplog.messages == ["read of 0 failed"]
    clock.now = 1030.0
    limiter.warn(LOGGER, "nvme", "read of %s failed", "x")
    clock.now = 1060.0
    limiter.warn(LOGGER, "nvme", "read of %s failed", "y")
    assert caplog.messages[1:] == [
        "read of x failed (4 more like this since the last such line)",
        "read of y failed",
    ]
    assert {r.levelname for r in caplog.records} == {"WARNING"}


def test_kinds_do_not_silence_each_other(limiter, caplog):
    limiter.warn(LOGGER, "nvme", "a")
    limiter.warn(LOGGER, "link", "b")
    limiter.warn(LOGGER, "nvme", "a")
    assert caplog.messages == ["a", "b"]


def test_a_percent_sign_without_arguments_is_text(limiter, clock, caplog):
    for _ in range(3):
        limiter.warn(LOGGER, "full", "disk 100% full")
        clock.now += 20
    assert caplog.messages == [
        "disk 100% full",
        "disk 100% full (1 more like this since the last such line)",
    ]
