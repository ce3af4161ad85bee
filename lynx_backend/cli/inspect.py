"""``lynx inspect``: what is stored, what an object's bytes say of themselves, and removing it."""

from __future__ import annotations

import os
import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from .. import wire
from ..codec import CodecSpec
from ..config import LynxConfig, MemoryConfig, NvmeConfig, RedisConfig
from ..errors import (
    ConfigError,
    CorruptObjectError,
    FormatMismatchError,
    InvalidInputError,
    TierError,
    TierUnavailableError,
)
from ..keys import ObjectName, Part
from ..store import tiers_from_config
from ..tiers import Tier, TierStats
from .options import ConfigOption

_MOST_LISTED = 50
_WHOLE_KEY = re.compile(r"[0-9a-f]{64}(\.[0-9])?")


def inspect(
    key: Annotated[
        str | None,
        typer.Argument(
            help="A chunk key (or its first digits), an object name, or the path of a file that "
            "holds an object (./NAME, if it is called like one). Without one, what is stored is "
            "listed.",
            show_default=False,
        ),
    ] = None,
    config: ConfigOption = None,
    tier: Annotated[
        str | None,
        typer.Option(help="Only this tier: nvme or redis.", show_default=False),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every object and check all of its bytes.")
    ] = False,
    remove: Annotated[
        bool,
        typer.Option(
            "--remove",
            help="Remove the objects of KEY; with --verify, those of them that are damaged.",
        ),
    ] = False,
) -> None:
    """Show stored objects: header, sizes, and whether every byte is as it was written.

    Exits with 1 when nothing is found, or when an object shown or verified is damaged, cannot be
    read, or is of another format.
    """
    console = Console()
    # A whole key means what is stored, even in the very folder that holds the files.
    if key is not None and not _WHOLE_KEY.fullmatch(key) and os.path.isfile(key):
        if remove or verify or tier is not None:
            raise InvalidInputError(
                f"{key} is a file, of which every byte is checked anyway; --remove, --verify and "
                "--tier are for what tiers hold: give the whole key or object name"
            )
        raise typer.Exit(0 if _show(console, key, _read(key), None) else 1)
    if remove and key is None and not verify:
        raise InvalidInputError(
            "--remove needs a KEY, or --verify to remove what is damaged; to remove everything, "
            "delete the folder or flush the server"
        )
    settings = _settings(config, tier)
    # Opening a folder evicts what is above its limit; whoever looks must not.
    endless = replace(settings.nvme, max_bytes=sys.maxsize)
    tiers = tiers_from_config(replace(settings, nvme=endless))
    if not tiers:
        raise ConfigError(
            f"no {tier or 'tier'} is configured that outlives its process: set nvme.path or "
            "redis.url (file), LYNX_NVME_PATH or LYNX_REDIS_URL, or give the path of a file that "
            "holds an object"
        )
    try:
        found = {each.name: _matching(each, key) for each in tiers}
        if key is not None and not any(found.values()):
            console.print(f"nothing is stored under {key!r}; `lynx inspect` lists the keys")
            raise typer.Exit(1)
        ok = True
        for each in tiers:
            names = found[each.name]
            if verify:
                ok = _verify(console, each, names, remove) and ok
            elif remove:
                each.delete(names)
                console.print(f"tier {each.name}: removed {len(names)} objects")
            elif key is None:
                stats = each.stats()
                limit = settings.nvme.max_bytes if each.name == "nvme" else stats.capacity_bytes
                _list(console, each, names, replace(stats, capacity_bytes=limit))
            else:
                ok = _show_all(console, each, names) and ok
    finally:
        for each in tiers:
            each.close()
    raise typer.Exit(0 if ok else 1)


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as e:
        raise InvalidInputError(f"{path} cannot be read: {e.strerror}") from None


def _settings(config: Path | None, tier: str | None) -> LynxConfig:
    """The configuration without tiers that are not asked for, or are in another process."""
    settings = replace(LynxConfig.load(config), memory=MemoryConfig(enabled=False))
    if tier not in (None, "nvme"):
        settings = replace(settings, nvme=NvmeConfig())
    if tier not in (None, "redis"):
        settings = replace(settings, redis=RedisConfig())
    path = settings.nvme.path
    try:
        # The tier would make its folder, and a misspelt path would look like an empty store.
        if path is not None:
            os.stat(path)
    except FileNotFoundError:
        raise ConfigError(
            f"nvme.path {path} does not exist: nothing was stored there, or its file system is not "
            "mounted; correct the path, or choose another tier with --tier"
        ) from None
    except OSError as e:
        raise ConfigError(f"nvme.path {path} cannot be looked into: {e.strerror}") from None
    return settings


def _matching(tier: Tier, text: str | None) -> list[ObjectName]:
    names = [name for name in tier.names() if text is None or str(name).startswith(text)]
    if text is not None and len({name.key for name in names}) > 1:
        raise InvalidInputError(f"{text!r} fits several chunks; give more digits of the key")
    return sorted(names)


def _list(console: Console, tier: Tier, names: Sequence[ObjectName], stats: TierStats) -> None:
    chunks: dict[str, set[Part]] = defaultdict(set)
    for name in names:
        chunks[str(name.key)].add(name.part)
    table = Table("chunk key", *(part.label for part in Part), title=f"Tier {tier.name}")
    table.columns[0].overflow = "fold"
    for text in sorted(chunks)[:_MOST_LISTED]:
        table.add_row(text, *("yes" if part in chunks[text] else "" for part in Part))
    console.print(table)
    more = max(0, len(chunks) - _MOST_LISTED)
    coarse = sum(parts == {Part.ANCHOR} for parts in chunks.values())
    console.print(
        f"{len(chunks)} chunks{f' ({more} not shown)' if more else ''}, {coarse} of them with only "
        f"their anchor, {len(names)} objects, {stats.used_bytes / 1e6:.1f} of "
        f"{stats.capacity_bytes / 1e6:.0f} MB"
    )


def _verify(console: Console, tier: Tier, names: Sequence[ObjectName], remove: bool) -> bool:
    """Read and check objects; whether all of them are whole and of this format."""
    whole = foreign = unread = size = 0
    damaged: list[ObjectName] = []
    absent: set[ObjectName] = set()
    for name in names:
        try:
            data = tier.get(name)
        except TierError as e:
            unread += 1
            if not isinstance(e, TierUnavailableError):  # which says of no object what is wrong
                console.print(f"[red]not read[/red] {name}: ", end="")
                console.print(str(e), markup=False)
            continue
        if data is None:
            absent.add(name)
            continue
        size += len(data)
        try:
            header = wire.verify(data)
            wire.expect(header, name.part, header.spec, name.key.digest)
            whole += 1
        except CorruptObjectError as e:
            damaged.append(name)
            console.print(f"[red]damaged[/red] {name}: ", end="")
            console.print(str(e), markup=False)
        except FormatMismatchError as e:
            foreign += 1
            console.print(f"[yellow]foreign[/yellow] {name}: ", end="")
            console.print(str(e), markup=False)
    # What is listed even now was not evicted: a value that the tier takes for none, and logs.
    for name in sorted(absent.intersection(tier.names())) if absent else []:
        unread += 1
        console.print(f"[red]not read[/red] {name}: what is there cannot be an object")
    if remove and damaged:
        tier.delete(damaged)
    console.print(
        f"tier {tier.name}: {whole} objects whole, {len(damaged)} damaged"
        f"{' and removed' if remove and damaged else ''}, {foreign} of something else, "
        f"{unread} not read, {size / 1e6:.1f} MB read"
    )
    return not (damaged or foreign or unread)


def _show_all(console: Console, tier: Tier, names: Sequence[ObjectName]) -> bool:
    intact = []
    for name in names:
        data = tier.get(name)
        if data is not None:  # evicted since it was listed
            intact.append(_show(console, f"tier {tier.name}: {name}", data, name))
    return all(intact)


def _show(console: Console, title: str, data: wire.Buffer, name: ObjectName | None) -> bool:
    """Print one object; whether it is whole and stored under its own name."""
    table = Table("field", "value", title=title, title_justify="left", show_header=False)
    table.columns[1].overflow = "fold"
    verdict, intact = "whole: every checksum agrees", True
    try:
        header = wire.parse(data)
        for field, value in _describe(header, len(data)):
            table.add_row(field, value)
        wire.verify(data)
        if name is not None:
            wire.expect(header, name.part, header.spec, name.key.digest)
    except (CorruptObjectError, FormatMismatchError) as e:
        verdict, intact = f"{type(e).__name__}: {e}", False
    table.add_row("verdict", verdict, style="green" if intact else "red")
    console.print(table)
    return intact


def _describe(header: wire.Header, size: int) -> list[tuple[str, str]]:
    layout = header.layout
    try:
        spec = str(CodecSpec.unpack(header.spec))
    except FormatMismatchError as e:
        spec = str(e)
    return [
        ("part", header.part.label),
        ("cache", f"{layout.shape} {layout.dtype} [kv, layers, tokens, kv_heads, head_dim]"),
        ("codec", spec),
        ("size", f"{size} bytes, {8 * size / layout.elements:.3f} bits an element"),
        ("chunk key", header.key.hex()),
        ("chunk id", header.chunk_id.hex()),
    ]
