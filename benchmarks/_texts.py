"""The texts of the benchmarks: what they are and which of them a quantizer may be tuned on."""

from __future__ import annotations

import argparse
import inspect
import tarfile
from collections.abc import Callable
from pathlib import Path

from lynx_backend.texts import default_text

_FOLDER = Path(__file__).parent / "texts"


def _file(name: str) -> Callable[[], str]:
    return lambda: (_FOLDER / f"{name}.txt").read_text(encoding="utf-8")


TUNING: dict[str, Callable[[], str]] = {
    "book": _file("book"),
    "chat": _file("chat"),
    "code": lambda: inspect.getsource(argparse),
}
HELD_OUT: dict[str, Callable[[], str]] = {
    "speech": _file("speech"),
    "chat_held_out": _file("chat_held_out"),
    "code_held_out": lambda: inspect.getsource(tarfile),
    "docs": default_text,
}
TEXTS = TUNING | HELD_OUT
