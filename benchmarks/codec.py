"""Speed of the CPU codec, as a ratio to a memcpy of the same bytes by one thread in the same run.

    python benchmarks/codec.py [--rounds N] [--json FILE]

Every round times the memcpy and then every operation once, in random order, so that a noisy
neighbour slows both; ratios are medians over the rounds. Peers: LMCache's fp8 serde and CacheGen,
in its own classes, when they can be imported (``benchmarks/README.md`` says how), and torch's cast
to fp8. CacheGen is timed once, on a single page: it needs seconds for it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from lynx_backend import Codec, CodecSpec

SHAPES = {
    "Llama-3.1-8B, one chunk of 256 tokens": (2, 32, 256, 8, 128),
    "SmolLM2-135M, 2048 tokens": (2, 30, 2048, 3, 64),
}
PAGE = (2, 80, 256, 8, 128)  # one LMCache chunk of a 70B model
T = TypeVar("T")
Operations = dict[str, Callable[[], object]]


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def operations(kv: torch.Tensor, threads: int, profile: str) -> Operations:
    codec = Codec(CodecSpec(profile), threads=threads)
    anchor, residual = codec.encode(kv)
    out = torch.empty_like(kv)
    label = f"{profile}, {threads} thread{'s' * (threads > 1)}"
    return {
        f"{label}: encode": lambda: codec.encode(kv),
        f"{label}: decode anchor": lambda: codec.decode(anchor, out=out),
        f"{label}: decode full": lambda: codec.decode(anchor, residual, out=out),
        f"{label}: refine": lambda: codec.refine(out, anchor, residual),
    }


def lmcache_fp8(kv: torch.Tensor) -> Operations:
    try:
        from lmcache.v1.distributed.serde.fp8 import (
            Fp8QuantizationDeserializer,
            Fp8QuantizationSerializer,
        )
    except ImportError:
        return {}
    source, target = SimpleNamespace(tensor=kv), SimpleNamespace(tensor=torch.empty_like(kv))
    stored = SimpleNamespace(tensor=torch.empty(kv.numel(), dtype=torch.uint8))
    encode, decode = Fp8QuantizationSerializer(), Fp8QuantizationDeserializer()
    return {
        "LMCache fp8: encode": lambda: encode.serialize(source, stored, None),
        "LMCache fp8: decode": lambda: decode.deserialize(stored, target, None),
    }


def lmcache_cachegen(page: torch.Tensor) -> Operations:
    try:
        from lmcache.storage_backend.serde.cachegen_decoder import CacheGenDeserializer
        from lmcache.storage_backend.serde.cachegen_encoder import CacheGenSerializer
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.metadata import LMCacheMetadata
    except ImportError:
        return {}
    layers, tokens, heads, dim = page.shape[1:]
    config = LMCacheEngineConfig.from_defaults(chunk_size=tokens)
    shape = (layers, 2, tokens, heads, dim)
    meta = LMCacheMetadata("meta-llama/Llama-3.1-8B-Instruct", 1, 1, 0, 0, page.dtype, shape)
    encoder = CacheGenSerializer(config, meta)
    decoder = CacheGenDeserializer(config, meta, page.dtype)
    theirs = page.transpose(0, 1).contiguous()
    stored: list[bytes] = []
    return {
        "LMCache CacheGen: encode": lambda: stored.append(encoder.to_bytes(theirs)),
        "LMCache CacheGen: decode": lambda: decoder.from_bytes(stored[0]),
    }


def torch_fp8(kv: torch.Tensor) -> Operations:
    small = kv.to(torch.float8_e4m3fn)
    return {
        "torch fp8 cast: encode": lambda: kv.to(torch.float8_e4m3fn),
        "torch fp8 cast: decode": lambda: small.to(kv.dtype),
    }


def measure(kv: torch.Tensor, jobs: Operations, rounds: int) -> list[dict[str, object]]:
    source = kv.view(torch.uint8).numpy().reshape(-1)
    target = np.empty_like(source)
    times: dict[str, list[float]] = {name: [] for name in jobs}
    copies: list[float] = []
    for job in jobs.values():
        job()  # compiles, and faults memory in
    order = list(jobs)
    for _ in range(rounds):
        random.shuffle(order)  # what comes first pays for memory that the system took back
        copies.append(seconds(lambda: np.copyto(target, source)))
        for name in order:
            times[name].append(seconds(jobs[name]))
    gigabytes = source.nbytes / 1e9
    rows = [{"operation": "memcpy, 1 thread", "gb_per_s": gigabytes / statistics.median(copies)}]
    for name, taken in times.items():
        ratios = [copy / t for copy, t in zip(copies, taken, strict=True)]
        rows.append(
            {
                "operation": name,
                "gb_per_s": gigabytes / statistics.median(taken),
                "ratio": statistics.median(ratios),
                "ratio_min": min(ratios),
                "ratio_max": max(ratios),
            }
        )
    return rows


def peak_scratch(pipe: multiprocessing.connection.Connection) -> None:
    """Growth of the peak resident size while one page is encoded and decoded, outputs excluded."""
    torch.set_num_threads(1)
    kv, codec = torch.randn(PAGE).to(torch.bfloat16), Codec(CodecSpec(), threads=1)
    codec.decode(*codec.encode(kv[:, :1]))  # compiles
    out = torch.zeros_like(kv)

    def growth(run: Callable[[], T]) -> tuple[int, T]:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts from what is resident now
        before = status("VmHWM")
        result = run()
        return status("VmHWM") - before, result

    encode, objects = growth(lambda: codec.encode(kv))
    decode, _ = growth(lambda: codec.decode(*objects, out=out))
    outputs = sum(map(len, objects))
    pipe.send((kv.numel() * 2, max(0, encode - outputs), decode))


def status(field: str) -> int:
    """A size from /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9, help="rounds to take medians over")
    parser.add_argument("--json", type=Path, default=Path("out/codec.json"), help="raw numbers")
    args = parser.parse_args()
    torch.set_num_threads(1)
    random.seed(0)
    console = Console(width=None if Console().is_terminal else 100)
    result: dict[str, object] = {
        "machine": f"{cpu_name()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "rounds": args.rounds,
    }
    for title, shape in SHAPES.items():
        kv = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
        jobs: Operations = {}
        for profile, threads in (("linear", 1), ("linear", 2), ("adaptive", 1), ("adaptive", 2)):
            jobs |= operations(kv, threads, profile)
        jobs |= operations(kv, 1, "paper") | lmcache_fp8(kv) | torch_fp8(kv)
        rows = measure(kv, jobs, args.rounds)
        cachegen = lmcache_cachegen(kv[:, :, :256]) if shape[1] == 32 else {}
        if cachegen:
            rows += measure_once(kv[:, :, :256].contiguous(), cachegen)
        result[title] = rows
        show(console, f"{title}, bfloat16, {kv.numel() * 2 / 1e6:.0f} MB", rows)
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=peak_scratch, args=(theirs,))
    child.start()
    page, encode, decode = ours.recv()
    child.join()
    result["scratch"] = {"page_bytes": page, "encode_bytes": encode, "decode_bytes": decode}
    console.print(
        f"Scratch memory for one page of an 80-layer model ({page / 1e6:.0f} MB): "
        f"encode {encode / 1e6:.1f} MB, decode {decode / 1e6:.1f} MB"
    )
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(result, indent=1))
    console.print(f"Raw numbers: {args.json}")


def measure_once(page: torch.Tensor, jobs: Operations) -> list[dict[str, object]]:
    source = page.view(torch.uint8).numpy().reshape(-1)
    target = np.empty_like(source)
    copy = statistics.median(seconds(lambda: np.copyto(target, source)) for _ in range(9))
    rows: list[dict[str, object]] = []
    for name, job in jobs.items():
        taken = seconds(job)
        rows.append(
            {
                "operation": f"{name} (one page)",
                "gb_per_s": source.nbytes / 1e9 / taken,
                "ratio": copy / taken,
            }
        )
    return rows


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def show(console: Console, title: str, rows: list[dict[str, object]]) -> None:
    table = Table("operation", "GB/s of BF16", "of memcpy", "min to max", title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        spread = f"{row['ratio_min']:.3f} to {row['ratio_max']:.3f}" if "ratio_min" in row else ""
        ratio = f"{row['ratio']:.4f}" if "ratio" in row else ""
        table.add_row(str(row["operation"]), f"{row['gb_per_s']:.4g}", ratio, spread)
    console.print(table)


if __name__ == "__main__":
    main()
