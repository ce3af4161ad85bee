"""How much of a request's cache there is. Apart from the rest, so that it costs no import."""

from __future__ import annotations

from enum import IntEnum


class State(IntEnum):
    """How much of a request's cache is in its tensor."""

    #: the tensor's contents mean nothing yet
    ABSENT = 0
    #: every chunk is Q_anchor: draft on it, publish nothing
    COARSE = 1
    #: every chunk is Q_full
    FULL = 2
    #: the tensor's contents mean nothing and will not: recompute
    FAILED = 3
