"""Records without a GPU: an event that a test sets, memory that is not pinned."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import pytest
import torch

from lynx_backend.codec import cuda_memory
from lynx_backend.codec.cuda_memory import Records


class Event:
    """As far as records use one of CUDA's."""

    come = True

    def query(self) -> bool:
        return self.come


class Holder:
    """Gives its record back when it is collected, as what waits for a kernel does."""

    def __init__(self, records: Records, record: torch.Tensor) -> None:
        weakref.finalize(self, records.give_back, record, Event()).atexit = False


@pytest.fixture
def allocating(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is called, each thing once, while memory is allocated."""
    calls: list[Any] = []

    def zeros(*shape: Any, pin_memory: bool, **options: Any) -> torch.Tensor:
        assert pin_memory
        while calls:
            calls.pop()()
        return torch.empty(*shape, **options).zero_()

    monkeypatch.setattr(cuda_memory.torch, "zeros", zeros)
    return calls


def test_a_record_that_comes_back_while_one_is_taken_waits_for_nobody(allocating: list[Any]):
    records = Records()
    holders = [Holder(records, torch.ones(Records.WORDS, dtype=torch.int64))]
    allocating.append(holders.clear)  # as the garbage collector may, in any allocation
    # A thread of its own, which could be left behind.
    thread = threading.Thread(target=records.take, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    assert not holders


def test_a_record_is_used_again_once_its_event_has_come(allocating: list[Any]):
    records = Records()
    taken = [records.take() for _ in range(Records._GROW)]
    used = {record.data_ptr() for record in taken}
    assert len(used) == Records._GROW
    event = Event()
    event.come = False
    records.give_back(taken.pop(), event)
    other = records.take()
    assert other.data_ptr() not in used
    event.come = True
    rest = [records.take().data_ptr() for _ in range(Records._GROW)]
    assert len(used & set(rest)) == 1
