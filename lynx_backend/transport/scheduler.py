"""Who sends next on a link: pure logic, without I/O, threads or a clock.

Two rules. Parts are strict classes: while any request has anchor bytes to send, no residual moves.
Inside a class requests share the link by deficit round robin over bytes, so that a long prompt does
not hold back a short one. Objects are cut into fragments, which bounds what an anchor that arrives
late has to wait for: what was already handed out. Requests may lead to different far ends; one that
takes nothing more for now is passed over, so that it holds up nobody else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple

from ..errors import InvalidInputError
from ..keys import ObjectName, Part

FRAGMENT_BYTES = 256 * 1024

#: Most bytes that a request may send of a part now; 0 for none.
Room = Callable[[str, Part], int]


class Fragment(NamedTuple):
    """Bytes ``[offset, offset + length)`` of one object; ``last`` when they are its end."""

    request: str
    name: ObjectName
    offset: int
    length: int
    last: bool


@dataclass(slots=True)
class _Queued:
    size: int
    sent: int = 0


@dataclass(slots=True)
class _Flow:
    """One request's objects of one part, in the order in which they were submitted."""

    objects: OrderedDict[ObjectName, _Queued] = field(default_factory=OrderedDict)
    deficit: int = 0


class Scheduler:
    """Decides the order in which the fragments of many requests' objects are sent.

    Not thread-safe: its owner holds a lock.

    Args:
        fragment_bytes: most bytes of one fragment, and what a request may send in one turn. While
            two requests both have objects of a part waiting and may send, neither gets ahead of
            the other by more than three of these (or of the larger fragments it is given room for).
    """

    def __init__(self, fragment_bytes: int = FRAGMENT_BYTES) -> None:
        if fragment_bytes < 1:
            raise InvalidInputError(f"fragment_bytes must be at least 1, got {fragment_bytes}")
        self._quantum = fragment_bytes
        # In each class the first flow is the one whose turn it is.
        self._classes: dict[Part, OrderedDict[str, _Flow]] = {p: OrderedDict() for p in Part}

    def submit(self, request: str, name: ObjectName, size: int) -> None:
        """Queue an object of ``size`` bytes behind the request's others of the same part.

        An empty object is sent as one empty fragment.

        Raises:
            InvalidInputError: the request already has this object queued, or the size is negative.
        """
        if size < 0:
            raise InvalidInputError(f"size of {name} must not be negative, got {size}")
        flows = self._classes[name.part]
        flow = flows.get(request)
        if flow is None:
            # A newcomer's first turn is worth as much as anyone's.
            flow = flows[request] = _Flow(deficit=self._quantum)
        elif name in flow.objects:
            raise InvalidInputError(
                f"request {request!r} already waits for {name}; cancel it first or use another "
                "request id"
            )
        flow.objects[name] = _Queued(size)

    def next(self, room: Room | None = None) -> Fragment | None:
        """The fragment to send now, or None when nothing is queued that may be sent.

        It counts as sent. A residual is handed out only when no anchor may be sent.

        Args:
            room: asked for each request whose turn it is; without it, every request may send a
                fragment of ``fragment_bytes``.
        """
        for part, flows in self._classes.items():
            fragment = self._take(part, flows, room)
            if fragment is not None:
                return fragment
        return None

    def upcoming(self) -> Iterator[tuple[str, ObjectName]]:
        """Requests and names of what is queued, about in the order of sending."""
        for flows in self._classes.values():
            for turn in zip_longest(*(flow.objects for flow in flows.values())):
                for request, name in zip(flows, turn, strict=True):
                    if name is not None:
                        yield request, name

    def cancel(self, request: str, name: ObjectName | None = None) -> None:
        """Forget one queued object of a request, or all of them; absent ones are no error."""
        for part in Part if name is None else (name.part,):
            flows = self._classes[part]
            flow = flows.get(request)
            if flow is None:
                continue
            if name is not None:
                flow.objects.pop(name, None)
            if name is None or not flow.objects:
                del flows[request]

    def _take(
        self, part: Part, flows: OrderedDict[str, _Flow], room: Room | None
    ) -> Fragment | None:
        passed = 0
        while passed < len(flows):
            request, flow = next(iter(flows.items()))
            name, queued = next(iter(flow.objects.items()))
            most = self._quantum if room is None else room(request, part)
            length = min(most, queued.size - queued.sent)
            if most and length <= flow.deficit:
                return self._send(flows, request, name, length)
            if most:
                flow.deficit += self._quantum
                passed = 0
            else:
                passed += 1
            flows.move_to_end(request)
        return None

    def _send(
        self, flows: OrderedDict[str, _Flow], request: str, name: ObjectName, length: int
    ) -> Fragment:
        flow = flows[request]
        queued = flow.objects[name]
        offset = queued.sent
        queued.sent += length
        flow.deficit -= length
        last = queued.sent == queued.size
        if last:
            del flow.objects[name]
        if not flow.objects:
            # What an emptied flow did not use is lost: idle time earns nothing.
            del flows[request]
        return Fragment(request, name, offset, length, last)
