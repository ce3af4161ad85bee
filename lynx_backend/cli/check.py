"""``lynx check``: does this configuration work, and how fast is what lies beneath it."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..codec import CodecSpec
from ..config import LynxConfig
from ..errors import TierError, TransportError
from ..keys import CacheIdentity, ChunkKey, Part, chunk_keys
from ..layout import KVLayout
from ..store import ChunkStore
from ..tiers import Tier
from ..transport.member import Member
from .options import ConfigOption

_ROUNDS = 5
#: Most squared error of the decoded cache, as a share of its squares. Zeros in place of the cache
#: have 1, other numbers 2; what a model can use is far below a tenth.
_MOST_ERROR = 0.5


def check(config: ConfigOption = None) -> None:
    """Prove that a configuration works: a chunk through every tier and back, with timings.

    Prints each setting and where it came from, the codec's speed, and for every tier the time and
    throughput of writing, finding and reading one chunk of 256 tokens: of the calibrated model's
    shape, or 8 MB of BF16 cache. It is removed again. Connects to every other node that is named or
    found in the directory. Exits with 1 when a tier, the directory or a node failed, or the decoded
    cache is not like what was encoded.
    """
    console = Console()
    settings = LynxConfig.load(config)
    store = ChunkStore.from_config(settings)
    _show_settings(console, settings, store.codec.spec)
    # A random identity: nothing that anyone stored can have this key.
    known = store.codec.calibration
    layers, heads, head_dim = (8, 8, 128) if known is None else known.priority.shape
    layout = KVLayout(2, layers, 256, heads, head_dim, "bfloat16")
    identity = CacheIdentity("lynx-check", os.urandom(8).hex(), layout.signature, "")
    key = chunk_keys(identity, [0])[0]
    sample = torch.randn(layout.shape).to(torch.bfloat16)
    try:
        objects, accurate = _check_codec(console, store, key, sample)
        healthy = [_check_tier(console, tier, key, objects) for tier in store.tiers]
        peers = _check_peers(console, settings, store.codec.spec.fingerprint)
        stored = store.put(key, sample) and store.flush()
        size = sum(map(len, objects))
        arrived = [
            _check_arrival(console, tier, key, size, settings.tiering.write_behind_bytes)
            for tier, works in zip(store.tiers, healthy, strict=True)
            if works
        ]
        found = store.get(key)
        same = found is not None and torch.equal(found, store.codec.decode(*objects))
    finally:
        store.remove([key])
        store.close()
    if not (accurate and all(healthy) and all(arrived) and peers and stored and same):
        console.print(
            "[red]FAILED[/red]: see above; a tier or a node that fails is skipped by the store."
        )
        raise typer.Exit(1)
    console.print(
        f"[green]ok[/green]: {len(healthy)} tier{'s' * (len(healthy) > 1)}, and a chunk put into "
        "the store came back bit for bit as the codec gives it"
    )


def _show_settings(console: Console, settings: LynxConfig, spec: CodecSpec) -> None:
    table = Table("setting", "value", "from", title="Settings")
    table.columns[1].overflow = "fold"
    table.columns[2].no_wrap = True
    for key, value, origin in settings.describe():
        name = key.removeprefix("codec.")
        if value is None and name != key and name not in ("calibration", "threads"):
            value, origin = getattr(spec, name), f"profile {spec.profile}"
        table.add_row(key, "" if value is None else str(value), origin)
    console.print(table)


def _check_codec(
    console: Console, store: ChunkStore, key: ChunkKey, sample: torch.Tensor
) -> tuple[tuple[torch.Tensor, torch.Tensor], bool]:
    """The sample's objects, and whether what they decode to is like the sample."""
    codec = store.codec
    anchor, residual = codec.encode(sample, key.digest)  # compiles
    out = codec.decode(anchor, residual)
    size = sample.numel() * sample.element_size()
    table = Table("operation", "GB/s of BF16", title="Codec")
    for name, run in {
        "encode": lambda: codec.encode(sample, key.digest),
        "decode anchor": lambda: codec.decode(anchor, out=out),
        "decode full": lambda: codec.decode(anchor, residual, out=out),
    }.items():
        table.add_row(name, f"{size / _median_seconds(run) / 1e9:.2f}")
    console.print(table)
    exact = sample.float()
    error = float((out.float() - exact).square().sum() / exact.square().sum())
    console.print(
        f"{codec.bits_per_element(anchor):.2f} bits an element for the anchor, "
        f"{codec.bits_per_element(anchor, residual):.2f} for both parts, which leave a squared "
        f"error of {error:.1e} of normally distributed numbers"
    )
    accurate = error < _MOST_ERROR  # False of a NaN
    if not accurate:
        console.print(
            f"[red]the codec failed[/red]: no model can use a cache with an error of "
            f"{_MOST_ERROR} or more; leave codec.anchor_bits, codec.residual_bits and codec.alpha "
            "to the profile"
        )
    return (anchor, residual), accurate


def _check_tier(
    console: Console, tier: Tier, key: ChunkKey, objects: tuple[torch.Tensor, torch.Tensor]
) -> bool:
    datas = {part: o.numpy().data for part, o in zip(Part, objects, strict=True)}
    names = [key.object(part) for part in Part]
    received = {name: bytearray(len(datas[name.part])) for name in names}
    size = sum(map(len, datas.values()))

    def put() -> None:
        for part in reversed(Part):
            tier.put(key.object(part), datas[part])

    def get() -> None:
        for name in names:
            data = tier.get(name)
            if data is None:
                raise TierError("what was just written is gone; is max_bytes below 10 MB?")
            received[name][:] = data  # as a reader would: out of the tier, into its own memory

    table = Table("operation", "ms", "MB/s", title=f"Tier {tier.name}: {size / 1e6:.1f} MB a chunk")
    try:
        for operation, run, moved in (
            ("write", put, size),
            ("find", lambda: tier.sizes(names), 0),
            ("read", get, size),
        ):
            taken = _median_seconds(run)
            table.add_row(
                operation, f"{taken * 1e3:.2f}", f"{moved / taken / 1e6:.0f}" if moved else ""
            )
        if any(received[name] != bytes(datas[name.part]) for name in names):
            raise TierError("the bytes read are not the bytes written; test disk and memory")
        tier.delete(names)
    except TierError as e:
        console.print(f"[red]tier {tier.name} failed[/red]: ", end="")
        console.print(str(e), markup=False)
        return False
    console.print(table)
    stats = tier.stats()
    used = f"{stats.used_bytes / 1e6:.1f} of {stats.capacity_bytes / 1e6:.0f} MB"
    if tier.keeps_capacity:
        console.print(
            f"holds {stats.objects} objects, {used}; {stats.anchor_only} chunks have only their "
            "anchor"
        )
    else:
        console.print(f"the server uses {used}")
    return True


def _check_arrival(
    console: Console, tier: Tier, key: ChunkKey, size: int, queue_bytes: int
) -> bool:
    """Whether a tier holds the chunk that was put into the store and flushed."""
    try:
        if None not in tier.sizes([key.object(part) for part in Part]):
            return True
        why = "the log says why"
    except TierError as e:
        why = str(e)
    if not tier.in_memory and 0 < queue_bytes < size:
        why = (
            f"its {size} bytes never fit the queue of tiering.write_behind_bytes={queue_bytes}; "
            "raise that to many chunks, or set 0 to wait for every write"
        )
    console.print(f"[red]tier {tier.name} failed[/red]: ", end="")
    console.print(
        f"a chunk put into the store did not arrive there: {why}", markup=False, soft_wrap=True
    )
    return False


def _check_peers(console: Console, settings: LynxConfig, codec: str) -> bool:
    nodes, directory = settings.peers.nodes, settings.directory
    if nodes is None and not directory.enabled:
        return True
    # Each needs a package that not everybody has.
    from ..peers import link_options, named
    from ..transport.client import UcxTransport

    place = "peers.nodes"
    try:
        if directory.enabled:
            from ..directory import Directory

            place = "directory"
            members = Directory(settings.redis, codec).members()
        else:
            members = named(nodes or "")
    except TransportError as e:
        console.print("[red]the directory failed[/red]: ", end="")
        console.print(str(e), markup=False)
        return False
    table = Table("node", "connected in ms", title=f"Nodes of {place}: {len(members)}")
    table.columns[1].overflow = "fold"
    options = link_options(settings.peers, codec)
    there = True

    def connect(member: Member) -> str:
        nonlocal there
        transport = UcxTransport(member.host, member.port, options, member.node)
        started = time.perf_counter()
        try:
            transport.connect()
            return f"{(time.perf_counter() - started) * 1e3:.1f}"
        except TransportError as e:
            there = False
            return str(e)
        finally:
            transport.close()

    for member in members:
        table.add_row(member.address, Text(connect(member)))
    console.print(table)
    return there


def _median_seconds(run: Callable[[], object]) -> float:
    times = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
