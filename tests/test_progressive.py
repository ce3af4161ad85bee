import gc
import logging
import random
import threading
import weakref

import numpy as np
import pytest
import torch

from lynx_backend import metrics
from lynx_backend.codec import Codec, CodecSpec
from lynx_backend.errors import InvalidInputError
from lynx_backend.keys import CacheIdentity, ChunkKey, ObjectName, Part, chunk_keys
from lynx_backend.progressive import ProgressiveRequest, State
from lynx_backend.store import ChunkStore, StoredObjects
from lynx_backend.testing import ScriptedSource
from lynx_backend.tiers import MemoryTier
from lynx_backend.transport.local import LocalTransport

WAIT = 30.0
CHUNK = 32
TOKENS = 75  # two whole chunks and one of 11 tokens
SHAPES = {"k_and_v": (2, 3, TOKENS, 2, 16), "latent": (1, 3, TOKENS, 1, 24)}


class WatchedCodec(Codec):
    """A real codec that says when it begins to decode an anchor and can be held up there."""

    def __init__(self) -> None:
        super().__init__(CodecSpec(), threads=1)
        self.decoding = threading.Semaphore(0)
        self.proceed = threading.Event()
        self.proceed.set()

    def decode(self, *args, **kwargs):
        self.decoding.release()
        assert self.proceed.wait(WAIT)
        return super().decode(*args, **kwargs)


class WatchedTransport(LocalTransport):
    """A real link that says when something was asked of it and when it ended."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.asked = threading.Semaphore(0)
        self.ended = threading.Semaphore(0)
        self.cancelled = threading.Semaphore(0)
        self.buffers: list[weakref.ref] = []

    def cancel(self, request):
        self.cancelled.release()
        super().cancel(request)

    def fetch(self, request, name, out):
        future = super().fetch(request, name, out)
        self.buffers.append(weakref.ref(out.obj))
        future.add_done_callback(lambda _: self.ended.release())
        self.asked.release()
        return future


def times(count: int, semaphore: threading.Semaphore) -> None:
    """Wait until ``semaphore`` was released ``count`` times more."""
    for _ in range(count):
        assert semaphore.acquire(timeout=WAIT)


class Prompt:
    """A prompt's objects at the far end of a link, and what they decode to."""

    def __init__(self, shape=SHAPES["k_and_v"], seed=0, rate=None) -> None:
        self.codec = WatchedCodec()
        self.store = ChunkStore(self.codec, [MemoryTier(1 << 24)])
        identity = CacheIdentity("model", "bfloat16", "layout", self.codec.spec.fingerprint)
        self.keys = chunk_keys(identity, range(seed, seed + TOKENS), CHUNK)
        self.original = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
        self.source = ScriptedSource()
        coder = Codec(CodecSpec(), threads=1)
        coarse, full = [], []
        for key, part in zip(self.keys, self.original.split(CHUNK, dim=2), strict=True):
            anchor, residual = coder.encode(part, key.digest)
            self.source.objects[key.object(Part.ANCHOR)] = bytes(anchor.numpy())
            self.source.objects[key.object(Part.RESIDUAL)] = bytes(residual.numpy())
            coarse.append(coder.decode(anchor))
            full.append(coder.decode(anchor, residual))
        self.coarse, self.full = torch.cat(coarse, dim=2), torch.cat(full, dim=2)
        self.transport = WatchedTransport(self.source, rate, fragment_bytes=1024)
        self.kv = torch.zeros_like(self.original)

    def anchor(self, i: int) -> ObjectName:
        return self.keys[i].object(Part.ANCHOR)

    def residual(self, i: int) -> ObjectName:
        return self.keys[i].object(Part.RESIDUAL)

    def hold(self, name: ObjectName) -> threading.Event:
        self.source.held[name] = event = threading.Event()
        return event

    def start(self, request_id="r", kv=None) -> ProgressiveRequest:
        kv = self.kv if kv is None else kv
        return ProgressiveRequest(self.store, self.transport, request_id, self.keys, kv, CHUNK)

    def close(self) -> None:
        self.codec.proceed.set()
        for event in self.source.held.values():
            event.set()
        self.transport.close()


@pytest.fixture
def prompt():
    made = Prompt()
    yield made
    made.close()


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def errors(kind: str) -> float:
    return metrics.REGISTRY.get_sample_value("lynx_errors_total", {"kind": kind}) or 0.0


def ended(request: ProgressiveRequest) -> bool:
    """Whether the request's thread is gone."""
    for t in threading.enumerate():
        if t.name == f"lynx-{request.request_id}":
            t.join(WAIT)
            return not t.is_alive()
    return True


# -- the good way ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_coarse_then_full_bit_for_bit(shape):
    prompt = Prompt(shape)
    release = prompt.hold(prompt.residual(0))
    request = prompt.start()
    assert request.wait(State.COARSE, WAIT)
    assert request.state == State.COARSE
    assert same(prompt.kv, prompt.coarse)
    assert not request.residual_ready()
    assert request.refine() is False
    assert request.state == State.COARSE
    assert same(prompt.kv, prompt.coarse)
    release.set()
    assert request.residual_ready(WAIT)
    assert same(prompt.kv, prompt.coarse), "refined without being asked to"
    assert request.refine() is True
    assert request.state == State.FULL
    assert same(prompt.kv, prompt.full)
    assert request.wait(State.COARSE, 0)
    assert request.wait(State.FULL, 0)
    assert request.refine() is True
    assert not request.residual_ready()
    request.cancel()
    assert request.state == State.FULL
    assert request.error is None
    assert ended(request)
    prompt.close()


def test_the_tensor_may_be_a_view_with_other_memory_around_it(prompt):
    wide = torch.full((2, 5, TOKENS + 9, 2, 16), 7.0).bfloat16()
    kv = wide[:, 1:4, 4 : 4 + TOKENS]
    request = prompt.start(kv=kv)
    assert request.residual_ready(WAIT) or request.wait(State.FULL, WAIT)
    assert request.refine()
    assert same(kv, prompt.full)
    kv.fill_(7.0)
    assert torch.all(wide == 7.0)


def test_from_a_real_store(prompt):
    for key, part in zip(prompt.keys, prompt.original.split(CHUNK, dim=2), strict=True):
        assert prompt.store.put(key, part)
    link = LocalTransport(StoredObjects(prompt.store))
    request = ProgressiveRequest(prompt.store, link, "r", prompt.keys, prompt.kv, CHUNK)
    assert request.wait(State.COARSE, WAIT)
    assert request.residual_ready(WAIT) or request.state == State.FULL
    assert request.refine()
    assert same(prompt.kv, prompt.full)
    link.close()


def test_timeline_and_bytes(prompt):
    release = prompt.hold(prompt.residual(0))
    request = prompt.start()
    assert request.wait(State.COARSE, WAIT)
    at = request.timeline
    assert at.residual is None
    assert at.full is None
    assert at.residuals == [None] * 3
    release.set()
    assert request.residual_ready(WAIT)
    assert request.refine()
    assert at.started <= min(at.anchors)
    assert max(at.anchors) <= at.coarse <= min(at.residuals)
    assert max(at.residuals) <= at.residual <= at.full
    for part in Part:
        sizes = [len(v) for k, v in prompt.source.objects.items() if k.part == part]
        assert request.bytes_received[part] == sum(sizes)


def test_an_anchor_is_decoded_while_the_next_is_on_its_way(prompt):
    release = prompt.hold(prompt.anchor(1))
    request = prompt.start()
    assert prompt.codec.decoding.acquire(timeout=WAIT)
    assert request.state == State.ABSENT
    assert request.timeline.anchors[1] is None
    release.set()
    assert request.wait(State.COARSE, WAIT)


def test_goes_straight_to_full_when_all_is_there_before_the_anchors_are_decoded(prompt):
    prompt.codec.proceed.clear()
    request = prompt.start()
    assert prompt.codec.decoding.acquire(timeout=WAIT)
    times(6, prompt.transport.ended)
    # The link tells of one end after the other: when it has told of this one, the request knows.
    prompt.transport.fetch("later", prompt.anchor(0), np.zeros(1, np.uint8).data).result(WAIT)
    prompt.codec.proceed.set()
    assert request.wait(State.FULL, WAIT)
    assert same(prompt.kv, prompt.full)
    assert request.timeline.coarse == request.timeline.full


@pytest.mark.parametrize("how", ["full", "cancelled", "failed"])
def test_no_buffer_outlives_the_transfer(prompt, how):
    if how == "failed":
        prompt.source.objects[prompt.residual(1)] = bytes(5)
    release = prompt.hold(prompt.residual(0))
    request = prompt.start()
    assert request.wait(State.COARSE, WAIT)
    if how == "cancelled":
        request.cancel()
    release.set()
    assert request.residual_ready(WAIT) == (how == "full")
    assert request.refine() == (how == "full")
    assert ended(request)
    prompt.transport.close()
    gc.collect()
    assert len(prompt.transport.buffers) == 6
    assert not any(buffer() is not None for buffer in prompt.transport.buffers)


def test_anchors_of_all_requests_come_before_residuals_of_any(prompt):
    plug = ChunkKey(bytes(16), bytes(16)).object(Part.ANCHOR)
    prompt.source.objects[plug] = b"x"
    release = prompt.hold(plug)
    prompt.transport.fetch("plug", plug, np.zeros(1, np.uint8).data)
    requests = [prompt.start(f"r{i}", torch.zeros_like(prompt.kv)) for i in range(3)]
    times(1 + 3 * 6, prompt.transport.asked)
    release.set()
    for request in requests:
        assert request.residual_ready(WAIT) or request.wait(State.FULL, WAIT)
    last_anchor = max(t for r in requests for t in r.timeline.anchors)
    assert last_anchor <= min(t for r in requests for t in r.timeline.residuals)


# -- objects that are absent or wrong --------------------------------------------------------------


def test_an_absent_anchor_fails_at_once_and_fetches_nothing(prompt, caplog):
    del prompt.source.objects[prompt.anchor(2)]
    request = prompt.start()
    assert not request.wait(State.COARSE, WAIT)
    assert request.state == State.FAILED
    assert "is not there" in request.error
    assert ended(request)
    assert not request.residual_ready(WAIT)
    assert request.refine() is False
    assert not prompt.transport.asked.acquire(blocking=False)
    assert same(prompt.kv, torch.zeros_like(prompt.kv))
    assert not caplog.records, "a plain miss is no warning"


def test_an_absent_residual_is_reported_and_leaves_the_cache_coarse(prompt):
    del prompt.source.objects[prompt.residual(1)]
    request = prompt.start()
    assert request.wait(State.COARSE, WAIT)
    assert request.residual_lost
    assert not request.residual_ready(WAIT)
    assert not request.wait(State.FULL, WAIT)
    assert request.refine() is False
    assert request.state == State.COARSE
    assert same(prompt.kv, prompt.coarse)
    assert {n.part for n in prompt.source.reading} == {Part.ANCHOR}
    assert ended(request)
    request.cancel()
    assert request.state == State.FAILED


@pytest.mark.parametrize("part", list(Part))
def test_an_object_that_goes_between_lookup_and_fetch(prompt, part):
    target = prompt.keys[1].object(part)
    sizes = prompt.source.sizes
    known = dict(prompt.source.objects)
    prompt.source.sizes = lambda names: [len(known[n]) for n in names]
    del prompt.source.objects[target]
    request = prompt.start()
    assert sizes([target]) == [None]
    if part == Part.ANCHOR:
        assert not request.wait(State.COARSE, WAIT)
        assert "is gone" in request.error
    else:
        assert request.wait(State.COARSE, WAIT)
        assert not request.residual_ready(WAIT)
        assert request.residual_lost
        assert same(prompt.kv, prompt.coarse)


def flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]


@pytest.mark.parametrize("part", list(Part))
@pytest.mark.parametrize("where", [0.0, 0.02, 0.3, 0.6, 1.0])
def test_a_damaged_object_fails_the_request(prompt, part, where, caplog):
    target = prompt.keys[2].object(part)
    data = prompt.source.objects[target]
    prompt.source.objects[target] = flip(data, int(where * (len(data) - 1)))
    before = sum(errors(k) for k in ("CorruptObjectError", "FormatMismatchError"))
    with caplog.at_level(logging.WARNING):
        release = prompt.hold(prompt.residual(0))
        request = prompt.start()
        assert request.wait(State.COARSE, WAIT) == (part == Part.RESIDUAL)
        release.set()
        assert not request.residual_ready(WAIT)
        assert request.state == State.FAILED
    assert "Error" in request.error
    assert request.refine() is False
    assert ended(request)
    assert sum(errors(k) for k in ("CorruptObjectError", "FormatMismatchError")) == before + 1


def test_objects_under_a_foreign_name_fail_the_request(prompt):
    objects = prompt.source.objects
    objects[prompt.anchor(0)] = objects[prompt.anchor(1)]
    prompt.hold(prompt.residual(0))
    request = prompt.start()
    assert not request.wait(State.COARSE, WAIT)
    assert "FormatMismatchError" in request.error


@pytest.mark.parametrize("chunk", [0, 2])
def test_a_residual_of_another_encoding_never_makes_full(prompt, chunk):
    other = prompt.original.split(CHUNK, dim=2)[chunk] * 1.5
    foreign = Codec(CodecSpec()).encode(other, prompt.keys[chunk].digest)[1]
    prompt.source.objects[prompt.residual(chunk)] = bytes(foreign.numpy())
    prompt.hold(prompt.residual(0))
    request = prompt.start()
    assert request.wait(State.COARSE, WAIT)
    before = errors("FormatMismatchError")
    prompt.source.held[prompt.residual(0)].set()
    if request.residual_ready(WAIT):
        assert request.refine() is False
    assert request.state == State.FAILED
    assert not request.wait(State.FULL, 0)
    assert request.refine() is False
    assert errors("FormatMismatchError") == before + 1


def test_a_cache_of_another_shape_fails_the_request(prompt):
    kv = torch.zeros(2, 3, TOKENS, 2, 32).bfloat16()
    request = prompt.start(kv=kv)
    assert not request.wait(State.COARSE, WAIT)
    assert request.state == State.FAILED
    assert torch.all(kv == 0)


@pytest.mark.parametrize(
    "sizes",
    [lambda n: [], lambda n: [-1] * len(n), lambda n: [1 << 60] * len(n), lambda n: [5] * len(n)],
    ids=["too_few", "negative", "absurd", "small"],
)
def test_a_lying_lookup_fails_the_request(prompt, sizes):
    prompt.source.sizes = sizes
    request = prompt.start()
    assert not request.wait(State.COARSE, WAIT)
    assert request.state == State.FAILED
    assert ended(request)


# -- a link that fails -----------------------------------------------------------------------------


def test_a_failing_lookup_fails_the_request(prompt):
    prompt.source.broken.add(prompt.residual(2))
    request = prompt.start()
    assert not request.wait(State.COARSE, WAIT)
    assert "scripted failure" in request.error


@pytest.mark.parametrize("part", list(Part))
def test_a_failing_read(prompt, part):
    # Broken after the lookup, at the moment of the read.
    target = prompt.keys[0].object(part)
    release = prompt.hold(target)
    before = errors("TransportError")
    request = prompt.start()
    prompt.source.wait_until_read(target)
    prompt.source.broken.add(target)
    release.set()
    if part == Part.ANCHOR:
        assert not request.wait(State.COARSE, WAIT)
        assert "TransportError" in request.error
    else:
        assert request.wait(State.COARSE, WAIT)
        assert not request.residual_ready(WAIT)
        assert request.residual_lost
        assert request.state == State.COARSE
    assert ended(request)
    assert errors("TransportError") == before + 1


def test_a_link_closed_before_and_in_the_middle(prompt):
    prompt.hold(prompt.anchor(1))
    request = prompt.start()
    prompt.source.wait_until_read(prompt.anchor(1))
    closer = threading.Thread(target=prompt.transport.close)
    closer.start()
    assert not request.wait(State.COARSE, WAIT)
    assert "TransportError" in request.error
    prompt.source.held[prompt.anchor(1)].set()
    closer.join(WAIT)
    late = prompt.start("late")
    assert not late.wait(State.COARSE, WAIT)
    assert "closed" in late.error


# -- giving up -------------------------------------------------------------------------------------


def test_waiting_is_bounded(prompt):
    prompt.hold(prompt.anchor(0))
    request = prompt.start()
    assert not request.wait(State.COARSE, 0.01)
    assert not request.wait(State.FULL, 0.01)
    assert not request.residual_ready(0.01)
    assert request.state == State.ABSENT
    request.cancel()


def test_cancel_frees_the_link_and_is_no_error(prompt, caplog):
    prompt.hold(prompt.anchor(0))
    request = prompt.start()
    times(6, prompt.transport.asked)
    request.cancel()
    assert all(prompt.transport.ended.acquire(blocking=False) for _ in range(6))
    assert request.state == State.FAILED
    assert request.error == "cancelled"
    assert ended(request)
    assert not caplog.records
    prompt.source.held[prompt.anchor(0)].set()
    again = prompt.start()
    assert again.residual_ready(WAIT) or again.wait(State.FULL, WAIT)


@pytest.mark.parametrize("chunk", [0, 2])
def test_cancel_while_an_anchor_is_being_decoded_waits_for_it(prompt, chunk):
    release = prompt.hold(prompt.anchor(chunk))
    request = prompt.start()
    times(chunk, prompt.codec.decoding)
    prompt.codec.proceed.clear()
    release.set()
    times(1, prompt.codec.decoding)
    returned = threading.Event()

    def cancel() -> None:
        request.cancel()
        returned.set()

    threading.Thread(target=cancel).start()
    assert not returned.wait(0.05)
    assert request.state == State.ABSENT, "FAILED may only be seen when nobody writes"
    prompt.codec.proceed.set()
    assert returned.wait(WAIT)
    assert request.state == State.FAILED
    prompt.kv.fill_(3.0)
    assert ended(request)
    assert request.state == State.FAILED
    assert torch.all(prompt.kv == 3.0)


def test_cancel_while_it_is_refined_does_not_wait_for_the_whole(prompt):
    prompt.hold(prompt.residual(0))
    request = prompt.start()
    assert request.wait(State.COARSE, WAIT)
    times(3, prompt.codec.decoding)
    prompt.source.held[prompt.residual(0)].set()
    assert request.residual_ready(WAIT)
    prompt.codec.proceed.clear()
    refiner = threading.Thread(target=request.refine)
    canceller = threading.Thread(target=request.cancel)
    refiner.start()
    times(1, prompt.codec.decoding)
    canceller.start()
    times(1, prompt.transport.cancelled)
    prompt.codec.proceed.set()
    refiner.join(WAIT)
    canceller.join(WAIT)
    assert request.state == State.FAILED
    assert not prompt.codec.decoding.acquire(blocking=False), "went on to the next chunk"


def test_a_request_whose_fetches_others_cancel_ends_without_an_error(prompt, caplog):
    prompt.hold(prompt.anchor(0))
    request = prompt.start()
    times(6, prompt.transport.asked)
    prompt.transport.cancel("r")
    assert not request.wait(State.COARSE, WAIT)
    assert request.error == "cancelled"
    assert ended(request)
    assert not caplog.records


def test_cancelled_at_any_moment_the_tensor_is_never_written_again():
    rng = random.Random(5)
    seen = set()
    for turn in range(60):
        prompt = Prompt(seed=turn, rate=rng.choice([2e6, 10e6, None]))
        request = prompt.start()
        steps = rng.randrange(8)
        times(min(steps, 6), prompt.transport.ended)
        refiner = threading.Thread(target=request.refine)
        if steps == 7:
            request.residual_ready(WAIT)
            refiner.start()
        request.cancel()
        seen.add(request.state)
        written = prompt.kv.clone()
        if request.state == State.FULL:
            assert same(written, prompt.full)
        else:
            assert request.state == State.FAILED
        if refiner.ident:
            refiner.join(WAIT)
        assert ended(request)
        prompt.close()
        assert same(prompt.kv, written)
    assert State.FAILED in seen


# -- the caller's mistakes -------------------------------------------------------------------------


def test_a_call_that_cannot_work_is_refused(prompt):
    with pytest.raises(InvalidInputError, match="3 chunks of 32, got 2"):
        ProgressiveRequest(prompt.store, prompt.transport, "r", prompt.keys[:2], prompt.kv, CHUNK)
    with pytest.raises(InvalidInputError, match="at least one token"):
        ProgressiveRequest(prompt.store, prompt.transport, "r", [], prompt.kv[:, :, :0], CHUNK)
    with pytest.raises(InvalidInputError, match="kv must be"):
        ProgressiveRequest(prompt.store, prompt.transport, "r", prompt.keys, prompt.kv[0], CHUNK)


def test_a_request_id_in_use_is_refused_by_the_link_and_fails(prompt):
    prompt.hold(prompt.anchor(0))
    prompt.start("same")
    prompt.source.wait_until_read(prompt.anchor(0))
    second = prompt.start("same", torch.zeros_like(prompt.kv))
    assert not second.wait(State.COARSE, WAIT)
    assert "InvalidInputError" in second.error
