"""Speed of the codec on a GPU, as a fraction of the device's copy bandwidth in the same run.

    python benchmarks/codec_gpu.py [--tokens N] [--rounds N] [--real FILE] [--json FILE]

Every row counts the bytes that must move: the cache in BF16 once, and the payloads once. Times are
medians of CUDA events over caches of gigabytes, so that nothing stays in the L2 cache. `encode`,
`decode anchor` and `decode full` are the kernels that do it (`encode` of linear with the search for
sinks); `digests` and `verify` are what makes an object whole and what checks it; `call` rows are
whole calls, with Python and everything. Peers in the same run: torch's fp8 cast, which is what
LMCache's fp8 serde does; INT8 and INT4 by token and head in torch; linear's mathematics under
torch.compile. A line says that LMCache's TurboQuant and CacheGen are not among them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from lynx_backend import Codec, CodecSpec
from lynx_backend.codec import Calibration
from lynx_backend.codec.cuda import Kernels
from lynx_backend.codec.cuda_codec import CudaCodec
from lynx_backend.codec.cuda_memory import Place
from lynx_backend.codec.cuda_scheme import CudaScheme
from lynx_backend.codec.paged import PagedCache
from lynx_backend.keys import Part

LAYERS, HEADS, DIM = 64, 8, 128  # Qwen3-32B
Row = dict[str, object]


def seconds(run: Callable[[], object], rounds: int) -> float:
    run()
    times = []
    for _ in range(rounds):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        run()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) / 1e3)
    return statistics.median(times)


def wall(run: Callable[[], object], rounds: int) -> float:
    run()
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def some_cache(
    tokens: int, layers: int = LAYERS, heads: int = HEADS, dim: int = DIM
) -> torch.Tensor:
    g = torch.Generator("cuda").manual_seed(0)
    kv = torch.randn(
        (2, layers, tokens, heads, dim), device="cuda", generator=g, dtype=torch.bfloat16
    )
    kv *= torch.exp(torch.randn((heads, dim), device="cuda", generator=g)).to(torch.bfloat16)
    return kv


def some_calibration(layers: int, heads: int, dim: int) -> Calibration:
    """Rotated like Llama, with queries of different sizes."""
    steps = 5e5 ** -(np.arange(dim // 2) / (dim // 2))
    power = np.exp(np.random.default_rng(0).standard_normal((layers, heads, dim)))
    return Calibration.of([steps], [0] * layers, power)


class Bench:
    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        a, b = (torch.empty(1 << 32, dtype=torch.uint8, device="cuda") for _ in range(2))
        a.random_()
        self.copy = 2 * a.numel() / seconds(lambda: b.copy_(a), rounds)
        self.rows: list[Row] = [
            {"operation": "device copy", "gb_per_s": self.copy / 1e9, "of_copy": 1.0}
        ]

    def add(self, name: str, taken: float, moved: int, raw: int) -> float:
        self.rows.append({
            "operation": name, "us": taken * 1e6, "gb_per_s": moved / taken / 1e9,
            "of_copy": moved / taken / self.copy, "raw_tb_per_s": raw / taken / 1e12,
        })  # fmt: skip
        return taken


def codec_rows(bench: Bench, profile: str, kv: torch.Tensor) -> None:
    calibration = some_calibration(*(kv.shape[i] for i in (1, 3, 4)))
    gpu = Codec(
        CodecSpec(profile),
        device="cuda",
        calibration=calibration if profile == "adaptive" else None,
    )
    assert isinstance(gpu, CudaCodec)
    scheme, record, n = gpu.scheme, gpu.records.take(), bench.rounds
    anchor, residual = (x[136:] for x in gpu.encode(kv))
    both = len(anchor) + len(residual)
    digests = (bytes(8), bytes(8))

    def measure(where: str, source: object, target: object) -> None:
        layout = gpu._layout_of(source)  # type: ignore[arg-type]
        place, to = Place.of(source, layout), Place.of(target, layout)  # type: ignore[arg-type]
        label = f"{profile}{where}"
        spare = torch.empty(
            scheme.sizes(layout, gpu.spec.exact_tokens)[0], dtype=torch.uint8, device="cuda"
        )
        whole = seconds(lambda: scheme.encode(place, spare, residual, record), n)
        digest = seconds(lambda: seal_only(scheme, place, spare, residual, record), n)
        bench.add(f"{label}: encode", whole - digest, kv.nbytes + both, kv.nbytes)
        if not where:
            bench.add(f"{label}: digests", digest, both, kv.nbytes)
            check = seconds(lambda: scheme.verify(to, anchor, residual, digests, record), n)
            bench.add(f"{label}: verify", check, both, kv.nbytes)
        for name, extra in (("decode anchor", None), ("decode full", residual)):
            taken = seconds(lambda e=extra: scheme.decode(to, anchor, e, None), n)
            moved = kv.nbytes + (len(anchor) if extra is None else both)
            bench.add(f"{label}: {name}", taken, moved, kv.nbytes)

    out = torch.empty_like(kv)
    measure("", kv, out)
    objects = gpu.encode(kv)
    loaded = gpu.load(objects[0], Part.ANCHOR), gpu.load(objects[1], Part.RESIDUAL)
    bench.add(
        f"{profile}: call encode",
        seconds(lambda: gpu.start_encode(kv), n),
        kv.nbytes + both,
        kv.nbytes,
    )
    taken = seconds(lambda: gpu.start_decode(loaded[0], out=out), n)
    bench.add(f"{profile}: call decode anchor", taken, kv.nbytes + len(anchor), kv.nbytes)
    taken = seconds(lambda: gpu.start_decode(*loaded, out=out), n)
    bench.add(f"{profile}: call refine", taken, kv.nbytes + both, kv.nbytes)
    tokens, block = kv.shape[2], 16
    blocks = tokens // block + 8
    order = torch.randperm(blocks, device="cuda")[: tokens // block]
    for form, shape in {
        "kv_first": (2, blocks, block, HEADS, DIM),
        "blocks_first": (blocks, 2, block, HEADS, DIM),
        "fused": (blocks, HEADS, block, 2 * DIM),
    }.items():
        pages = torch.empty((kv.shape[1], *shape), dtype=kv.dtype, device="cuda")
        cache = PagedCache.of(list(pages), form)
        slots = cache.at(cache.slots(order, tokens))
        gpu.decode(*objects, out=slots)
        measure(f", pages {form}", slots, slots)


def seal_only(
    scheme: CudaScheme,
    place: Place,
    anchor: torch.Tensor,
    residual: torch.Tensor,
    record: torch.Tensor,
) -> None:
    """The last launch of an encoding alone: the others are left out."""
    launch = Kernels.launch

    def only(self: Kernels, name: str, *args: object, **more: object) -> None:
        if name == "seal":
            launch(self, name, *args, **more)  # type: ignore[arg-type]

    Kernels.launch = only  # type: ignore[method-assign, assignment]
    try:
        scheme.encode(place, anchor, residual, record)
    finally:
        Kernels.launch = launch  # type: ignore[method-assign]


def peer_rows(bench: Bench, kv: torch.Tensor) -> None:
    n, raw = bench.rounds, kv.nbytes
    small = kv.to(torch.float8_e4m3fn)
    bench.add(
        "torch fp8 cast (LMCache fp8): encode",
        seconds(lambda: kv.to(torch.float8_e4m3fn), n),
        raw + small.nbytes,
        raw,
    )
    bench.add(
        "torch fp8 cast (LMCache fp8): decode",
        seconds(lambda: small.to(kv.dtype), n),
        raw + small.nbytes,
        raw,
    )

    def int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = x.abs().amax(-1, keepdim=True) / 127
        return (x / scale).round().to(torch.int8), scale

    def int4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = x.abs().amax(-1, keepdim=True) / 7
        q = (x / scale).round().to(torch.int8) + 8
        return (q[..., ::2] | q[..., 1::2] << 4).to(torch.uint8), scale

    def from_int8(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return q * scale

    def from_int4(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        pair = torch.stack([q & 15, q >> 4], -1).flatten(-2)
        return (pair.to(torch.int8) - 8) * scale

    def linear(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """linear without page scales in fp16, exact tokens, headers and digests."""
        chunks = x.unflatten(2, (-1, 32)).float()
        low, high = chunks.amin(3, keepdim=True), chunks.amax(3, keepdim=True)
        q = ((chunks - low) * (240 / (high - low))).round().clamp(0, 240).to(torch.uint8) + 7
        a, r = q >> 4, q & 15
        a, r = (p[:, :, :, ::2] | p[:, :, :, 1::2] << 4 for p in (a, r))
        return a, r, low.half(), high.half()

    def from_linear(
        a: torch.Tensor, r: torch.Tensor, low: torch.Tensor, high: torch.Tensor
    ) -> torch.Tensor:
        a, r = (torch.stack([p & 15, p >> 4], 4).flatten(3, 4) for p in (a, r))
        q = a.float() * 16 + r.float() - 7
        return (
            (low.float() + q * ((high.float() - low.float()) / 240))
            .flatten(2, 3)
            .to(torch.bfloat16)
        )

    def run(name: str, encode: Callable, decode: Callable, part: torch.Tensor) -> None:
        try:
            made = encode(part)
            size = sum(x.nbytes for x in made)
            bench.add(
                f"{name}: encode", seconds(lambda: encode(part), n), part.nbytes + size, part.nbytes
            )
            bench.add(
                f"{name}: decode",
                seconds(lambda: decode(*made), n),
                part.nbytes + size,
                part.nbytes,
            )
        except Exception as e:  # what cannot be compiled here is said, not hidden
            print(f"{name}: {type(e).__name__}: {str(e)[:200]}", file=sys.stderr)

    part = kv[:, :16].contiguous()
    run("torch INT8", int8, from_int8, part)
    run("torch INT4", int4, from_int4, part)
    run("torch.compile INT8", torch.compile(int8), torch.compile(from_int8), part)
    run("torch.compile INT4", torch.compile(int4), torch.compile(from_int4), part)
    run("torch.compile linear", torch.compile(linear), torch.compile(from_linear), part)
    for name, module in (("CacheGen", "storage_backend"), ("TurboQuant", "v1")):
        found = find_spec("lmcache") is not None
        why = (
            f"its serde in lmcache.{module} takes LMCache's own memory objects"
            if found
            else "no LMCache here"
        )
        print(f"LMCache {name}: not measured, {why}", file=sys.stderr)


def host_rows(bench: Bench, kv: torch.Tensor, profile: str) -> None:
    """Anchors in pinned memory, one for 256 tokens, into pages: bound by the link, or by us?"""
    gpu = Codec(CodecSpec(profile), device="cuda")
    assert isinstance(gpu, CudaCodec)
    starts = range(0, kv.shape[2], 256)
    anchors = [gpu.start_encode(kv[:, :, s : s + 256], host=True).wait()[0] for s in starts]
    size = sum(map(len, anchors))
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(size, dtype=torch.uint8, device="cuda")
    link = size / wall(lambda: there.copy_(pinned, non_blocking=True), bench.rounds)
    tokens, block = kv.shape[2], 16
    pages = torch.empty(
        (kv.shape[1], 2, tokens // block, block, *kv.shape[3:]), dtype=kv.dtype, device="cuda"
    )
    cache = PagedCache.of(list(pages), "kv_first")
    slots = cache.slots(torch.randperm(tokens // block, device="cuda"), tokens)
    targets = [cache.at(slots[s : s + 256].contiguous()) for s in starts]

    def run() -> None:
        pending = [
            gpu.start_decode(gpu.load(a, Part.ANCHOR), out=t)
            for a, t in zip(anchors, targets, strict=True)
        ]
        for decoding in pending:
            decoding.wait()

    taken = wall(run, bench.rounds)
    shape = "x".join(map(str, kv.shape))
    row: Row = {"operation": f"{profile}: host anchors to pages, {shape}", "us": taken * 1e6}
    row |= {"gb_per_s": size / taken / 1e9, "of_link": size / taken / link}
    bench.rows.append(row | {"raw_tb_per_s": kv.nbytes / taken / 1e12})


def small_rows(bench: Bench) -> None:
    """One page of SmolLM2: launches, not bytes."""
    kv = some_cache(256, 30, 3, 64)
    for profile in ("linear", "adaptive"):
        gpu = Codec(CodecSpec(profile), device="cuda")
        assert isinstance(gpu, CudaCodec)
        objects = gpu.encode(kv)
        loaded = gpu.load(objects[0], Part.ANCHOR), gpu.load(objects[1], Part.RESIDUAL)
        out = torch.empty_like(kv)
        jobs = {
            "encode": partial(gpu.start_encode, kv),
            "refine": partial(gpu.start_decode, *loaded, out=out),
        }
        for name, job in jobs.items():
            bench.add(
                f"{profile}, one page of SmolLM2: call {name}",
                seconds(job, 30),
                kv.nbytes,
                kv.nbytes,
            )


def identity(real: Path | None) -> dict[str, bool]:
    found = {}
    caches = {"random": some_cache(300, 2, 3, 64).cpu()}
    if real is not None:
        caches[real.stem] = torch.load(real)
    for name, kv in caches.items():
        for profile in ("linear", "paper", "adaptive"):
            cpu, gpu = (Codec(CodecSpec(profile), device=d) for d in ("cpu", "cuda"))
            ours, theirs = gpu.encode(kv.cuda()), cpu.encode(kv)
            same = all(torch.equal(a.cpu(), b) for a, b in zip(ours, theirs, strict=True))
            for parts in (1, 2):
                a, b = gpu.decode(*ours[:parts]).cpu(), cpu.decode(*theirs[:parts])
                same &= torch.equal(a.view(torch.int16), b.view(torch.int16))
            found[f"{name}, {profile}"] = same
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--real", type=Path, help="a captured cache, saved by torch: bf16, five axes"
    )
    parser.add_argument("--json", type=Path, default=Path("out/codec_gpu.json"))
    args = parser.parse_args()
    bench = Bench(args.rounds)
    same = identity(args.real)
    kv = some_cache(args.tokens)
    for profile in ("linear", "adaptive", "paper"):
        codec_rows(bench, profile, kv)
    for profile in ("linear", "adaptive"):
        host_rows(bench, kv, profile)
        host_rows(bench, some_cache(8192, 30, 3, 64), profile)
    small_rows(bench)
    peer_rows(bench, kv)
    columns = {"us": "µs", "gb_per_s": "GB/s", "of_copy": "of copy", "of_link": "of link"}
    columns["raw_tb_per_s"] = "raw TB/s"
    digits = {"us": 0, "gb_per_s": 0, "of_copy": 2, "of_link": 2, "raw_tb_per_s": 3}
    table = Table("operation", *columns.values(), title=torch.cuda.get_device_name())
    for row in bench.rows:
        cells = ("" if row.get(k) is None else f"{row[k]:.{digits[k]}f}" for k in columns)
        table.add_row(str(row["operation"]), *cells)
    Console(width=110).print(table)
    print("byte and bit identity with the CPU:", same)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    result = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    result |= {"rounds": args.rounds, "shape": list(kv.shape), "identity": same, "rows": bench.rows}
    args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
