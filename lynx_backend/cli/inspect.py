"""``lynx inspect``: what is stored, and what an object's bytes say of themselves."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from .. import wire
from ..codec import CodecSpec
from ..config import LynxConfig
from ..errors import ConfigError, CorruptObjectError, FormatMismatchError, InvalidInputError
from ..keys import ObjectName, Part
from ..tiers import NvmeTier, Tier
from .options import ConfigOption

_MOST_LISTED = 50


def inspect(
    key: Annotated[
        str | None,
        typer.Argument(
            help="A chunk key (or its first digits), an object name, or the path of a file that "
            "holds an object. Without one, what is stored is listed.",
            show_default=False,
        ),
    ] = None,
    config: ConfigOption = None,
) -> None:
    """Show stored objects: header, sizes, and whether every byte is as it was written.

    Exits with 1 when nothing is found, or when an object shown is damaged.
    """
    console = Console()
    if key is not None and Path(key).is_file():
        raise typer.Exit(0 if _show(console, key, Path(key).read_bytes(), None) else 1)
    settings = LynxConfig.load(config)
    if settings.nvme.path is None:
        raise ConfigError(
            "no tier outlives its process: set nvme.path (file) or LYNX_NVME_PATH, or give the "
            "path of a file that holds an object"
        )
    nvme = settings.nvme
    tier = NvmeTier(settings.nvme.path, nvme.max_bytes, nvme.min_free_bytes)
    try:
        ok = _list(console, tier) if key is None else _show_matching(console, tier, key)
    finally:
        tier.close()
    raise typer.Exit(0 if ok else 1)


def _list(console: Console, tier: Tier) -> bool:
    chunks: dict[str, set[Part]] = defaultdict(set)
    for name in tier.names():
        chunks[str(name.key)].add(name.part)
    table = Table("chunk key", *(part.label for part in Part), title=f"Tier {tier.name}")
    table.columns[0].overflow = "fold"
    for text in sorted(chunks)[:_MOST_LISTED]:
        table.add_row(text, *("yes" if part in chunks[text] else "" for part in Part))
    console.print(table)
    more = max(0, len(chunks) - _MOST_LISTED)
    stats = tier.stats()
    console.print(
        f"{len(chunks)} chunks{f' ({more} not shown)' if more else ''}, {stats.objects} objects, "
        f"{stats.used_bytes / 1e6:.1f} of {stats.capacity_bytes / 1e6:.0f} MB"
    )
    return True


def _show_matching(console: Console, tier: Tier, text: str) -> bool:
    names = sorted(name for name in tier.names() if str(name).startswith(text))
    if len({name.key for name in names}) > 1:
        raise InvalidInputError(f"{text!r} fits several chunks; give more digits of the key")
    if not names:
        console.print(f"nothing is stored under {text!r}; `lynx inspect` lists the keys")
        return False
    intact = []
    for name in names:
        data = tier.get(name)
        if data is not None:  # evicted since it was listed
            intact.append(_show(console, str(name), data, name))
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
