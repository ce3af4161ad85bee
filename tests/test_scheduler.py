import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lynx_backend.errors import InvalidInputError
from lynx_backend.keys import ChunkKey, ObjectName, Part
from lynx_backend.transport.scheduler import Fragment, Scheduler

QUANTUM = 100
REQUESTS = ["a", "b", "c", "d"]


def name(i: int, part: Part = Part.ANCHOR) -> ObjectName:
    return ChunkKey(bytes(16), i.to_bytes(16, "little")).object(part)


def drain(scheduler: Scheduler) -> list[Fragment]:
    return list(iter(scheduler.next, None))


class AnyOrderOfCalls(RuleBasedStateMachine):
    """Against a model that knows what is queued, but not how the scheduler chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(QUANTUM)
        self.count = 0
        # (part, request) -> names in order; name -> (size, bytes sent)
        self.queues: dict[tuple[Part, str], list[ObjectName]] = {}
        self.objects: dict[tuple[str, ObjectName], list[int]] = {}
        # Lead of one flow over another in bytes since both have been waiting.
        self.lead: dict[tuple[Part, str, str], int] = {}
        # Requests whose far end takes nothing more for now, by part.
        self.blocked: set[tuple[str, Part]] = set()

    def room(self, request: str, part: Part) -> int:
        return 0 if (request, part) in self.blocked else QUANTUM

    def able(self, part: Part) -> list[str]:
        return [r for r in self.waiting(part) if self.room(r, part)]

    def waiting(self, part: Part) -> list[str]:
        return [r for r in REQUESTS if self.queues.get((part, r))]

    def drop(self, part: Part, request: str, target: ObjectName) -> None:
        self.queues[part, request].remove(target)
        del self.objects[request, target]
        if not self.queues[part, request]:
            self.lead = {k: v for k, v in self.lead.items() if k[0] != part or request not in k[1:]}

    @rule(
        request=st.sampled_from(REQUESTS),
        part=st.sampled_from(list(Part)),
        size=st.one_of(st.integers(0, 3 * QUANTUM), st.sampled_from([QUANTUM, 20 * QUANTUM])),
    )
    def submit(self, request: str, part: Part, size: int) -> None:
        self.count += 1
        target = name(self.count, part)
        if not self.queues.get((part, request)):
            for other in self.waiting(part):
                self.lead[part, request, other] = self.lead[part, other, request] = 0
        self.queues.setdefault((part, request), []).append(target)
        self.objects[request, target] = [size, 0]
        self.scheduler.submit(request, target, size)

    @precondition(lambda self: self.objects)
    @rule(data=st.data())
    def submit_again(self, data: st.DataObject) -> None:
        request, target = data.draw(st.sampled_from(sorted(self.objects)))
        with pytest.raises(InvalidInputError, match="already waits"):
            self.scheduler.submit(request, target, 5)

    @rule(request=st.sampled_from(REQUESTS))
    def cancel(self, request: str) -> None:
        self.scheduler.cancel(request)
        for r, target in list(self.objects):
            if r == request:
                self.drop(target.part, request, target)

    @precondition(lambda self: self.objects)
    @rule(data=st.data())
    def cancel_one(self, data: st.DataObject) -> None:
        request, target = data.draw(st.sampled_from(sorted(self.objects)))
        self.scheduler.cancel(request, target)
        self.drop(target.part, request, target)

    @rule(request=st.sampled_from(REQUESTS), part=st.sampled_from(list(Part)))
    def block_or_free(self, request: str, part: Part) -> None:
        self.blocked ^= {(request, part)}
        # Nobody gets ahead of one that cannot send: what counts is from now on.
        for r, a, b in list(self.lead):
            if request in (a, b) and r == part:
                self.lead[r, a, b] = 0

    @rule(times=st.integers(1, 30))
    def send(self, times: int) -> None:
        for _ in range(times):
            fragment = self.scheduler.next(self.room)
            if fragment is None:
                assert not any(map(self.able, Part)), "something was lost"
                return
            assert (fragment.request, fragment.name.part) not in self.blocked
            self.check(fragment)

    def check(self, f: Fragment) -> None:
        part = f.name.part
        assert part == Part.ANCHOR or not self.able(Part.ANCHOR), "an anchor had to wait"
        assert self.queues[part, f.request][0] == f.name, "not first in, first out"
        size, sent = self.objects[f.request, f.name]
        assert f.offset == sent, "sent twice or out of order"
        assert f.length == min(QUANTUM, size - sent)
        assert f.last == (f.offset + f.length == size)
        for other in self.able(part):
            if other != f.request:
                self.lead[part, f.request, other] += f.length
                self.lead[part, other, f.request] -= f.length
        self.objects[f.request, f.name][1] += f.length
        if f.last:
            self.drop(part, f.request, f.name)

    @invariant()
    def fair(self) -> None:
        assert all(lead <= 3 * QUANTUM for lead in self.lead.values())

    def teardown(self) -> None:
        self.blocked.clear()
        self.lead = dict.fromkeys(self.lead, 0)
        while (fragment := self.scheduler.next()) is not None:
            self.check(fragment)
            self.fair()
        assert not self.objects, "something was lost"


TestAnyOrderOfCalls = AnyOrderOfCalls.TestCase
TestAnyOrderOfCalls.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True
)


def test_an_anchor_that_comes_late_overtakes_a_residual_under_way():
    s = Scheduler(QUANTUM)
    s.submit("a", name(1, Part.RESIDUAL), 250)
    assert s.next() == Fragment("a", name(1, Part.RESIDUAL), 0, 100, False)
    s.submit("b", name(2), 150)
    assert drain(s) == [
        Fragment("b", name(2), 0, 100, False),
        Fragment("b", name(2), 100, 50, True),
        Fragment("a", name(1, Part.RESIDUAL), 100, 100, False),
        Fragment("a", name(1, Part.RESIDUAL), 200, 50, True),
    ]


def test_a_short_request_does_not_wait_for_a_long_one():
    s = Scheduler(QUANTUM)
    for i in range(50):
        s.submit("long", name(i), 10 * QUANTUM)
    s.next()
    s.submit("short", name(100), 2 * QUANTUM)
    sent = drain(s)
    done = next(i for i, f in enumerate(sent) if f.request == "short" and f.last)
    assert done <= 5


def test_one_that_cannot_send_holds_up_nobody():
    s = Scheduler(QUANTUM)
    s.submit("stuck", name(1), 500)
    s.submit("free", name(2), 50)
    s.submit("free", name(3, Part.RESIDUAL), 50)

    def room(request: str, part: Part) -> int:
        return 0 if request == "stuck" else QUANTUM

    assert [f.name for f in iter(lambda: s.next(room), None)] == [name(2), name(3, Part.RESIDUAL)]
    assert s.next(lambda request, part: 300) == Fragment("stuck", name(1), 0, 300, False)
    assert drain(s)[-1] == Fragment("stuck", name(1), 400, 100, True)


def test_many_small_objects_get_no_more_than_few_large_ones():
    s = Scheduler(QUANTUM)
    for i in range(1000):
        s.submit("small", name(i), 1)
    s.submit("large", name(5000), 1000)
    bytes_of = {"small": 0, "large": 0}
    for f in drain(s)[:900]:
        bytes_of[f.request] += f.length
    assert abs(bytes_of["small"] - bytes_of["large"]) <= 3 * QUANTUM


def test_cancelling_frees_the_place_at_once():
    s = Scheduler(QUANTUM)
    s.submit("a", name(1), 500)
    s.submit("a", name(2, Part.RESIDUAL), 500)
    s.submit("b", name(1), 50)
    assert s.next() == Fragment("a", name(1), 0, 100, False)
    s.cancel("a")
    assert s.next() == Fragment("b", name(1), 0, 50, True)
    assert s.next() is None
    s.submit("a", name(1), 80)
    assert s.next() == Fragment("a", name(1), 0, 80, True)


def test_an_empty_object_is_one_empty_fragment():
    s = Scheduler(QUANTUM)
    s.submit("a", name(1), 0)
    assert drain(s) == [Fragment("a", name(1), 0, 0, True)]


def test_impossible_sizes_are_refused():
    with pytest.raises(InvalidInputError, match="fragment_bytes"):
        Scheduler(0)
    with pytest.raises(InvalidInputError, match="negative"):
        Scheduler().submit("a", name(1), -1)


def test_what_is_upcoming_is_told_about_in_the_order_of_sending_and_stays_queued():
    scheduler = Scheduler(QUANTUM)
    queued = [("a", 0, Part.RESIDUAL), ("a", 1, Part.ANCHOR), ("a", 2, Part.ANCHOR)]
    queued += [("b", 3, Part.ANCHOR), ("b", 4, Part.RESIDUAL)]
    for request, i, part in queued:
        scheduler.submit(request, name(i, part), 10)
    upcoming = list(scheduler.upcoming())
    assert upcoming == [(request, name(i, part)) for request, i, part in (
        ("a", 1, Part.ANCHOR), ("b", 3, Part.ANCHOR), ("a", 2, Part.ANCHOR),
        ("a", 0, Part.RESIDUAL), ("b", 4, Part.RESIDUAL),
    )]  # fmt: skip
    sent = [scheduler.next() for _ in upcoming]
    assert sorted((f.request, f.name) for f in sent) == sorted(upcoming)
