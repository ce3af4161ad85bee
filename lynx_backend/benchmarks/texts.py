"""The texts of the benchmarks: what they are and which of them a quantizer may be tuned on."""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import sys
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

from ..texts import default_text

DATA = Path(__file__).parent / "data"


def _file(name: str) -> str:
    return (DATA / f"{name}.txt").read_text(encoding="utf-8")


TUNING: dict[str, Callable[[], str]] = {
    "book": partial(_file, "book"),
    "chat": partial(_file, "chat"),
    "code": partial(inspect.getsource, argparse),
}
HELD_OUT: dict[str, Callable[[], str]] = {
    "speech": partial(_file, "speech"),
    "chat_held_out": partial(_file, "chat_held_out"),
    "code_held_out": partial(inspect.getsource, tarfile),
    "docs": default_text,
}
TEXTS = TUNING | HELD_OUT

# -- prompts to draft after: 32 of each kind, none of them seen in tuning --------------------------


@dataclass(frozen=True)
class Prompt:
    """A text whose first tokens are a prompt; ``source`` tells prompts of a kind apart."""

    kind: str
    source: str
    text: str


PER_KIND = 32
_MODULES = (
    "ast", "asyncio.base_events", "bdb", "calendar", "codecs", "collections", "configparser",
    "csv", "dataclasses", "datetime", "decimal", "difflib", "dis", "doctest", "email.message",
    "enum", "ftplib", "gettext", "http.client", "imaplib", "inspect", "ipaddress", "logging",
    "mailbox", "optparse", "pathlib", "pickle", "pstats", "random", "shutil", "socketserver",
    "statistics", "subprocess", "tempfile", "textwrap", "threading", "tokenize", "traceback",
    "turtle", "typing", "unittest.case", "uuid", "zipfile",
)  # fmt: skip
_CHARACTERS = 9000


def _stored(kind: str) -> list[Prompt]:
    lines = (DATA / "prompts" / f"{kind}.jsonl").read_text(encoding="utf-8").splitlines()
    return [Prompt(kind.replace("_", " "), **json.loads(line)) for line in lines]


def _code() -> list[Prompt]:
    """Sources of the running Python's library, from the first definition on."""
    prompts = []
    for name in _MODULES:
        path = Path(inspect.__file__).parent.joinpath(*name.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        text = path.read_text(encoding="utf-8")
        kinds = (ast.ClassDef, ast.FunctionDef)
        first = next((n.lineno for n in ast.parse(text).body if isinstance(n, kinds)), 1)
        body = "".join(text.splitlines(keepends=True)[first - 1 :])
        if len(body) >= _CHARACTERS:
            prompts.append(Prompt("code", name, body[:_CHARACTERS]))
    return prompts[:PER_KIND]


def _manual() -> list[Prompt]:
    """Pieces of Python's language reference, far apart; the text ``docs`` is its beginning."""
    text = default_text()
    step = len(text) // (PER_KIND + 1)
    starts = [text.index("\n\n", i * step) + 2 for i in range(1, PER_KIND + 1)]
    return [Prompt("manual", str(at), text[at : at + _CHARACTERS]) for at in starts]


def draft_prompts() -> list[Prompt]:
    """All prompts, one of each kind in turn, so that the first few are a fair choice of all."""
    stored = map(_stored, ("prose", "chat", "multiple_choice", "tables", "languages"))
    kinds = [*stored, _code(), _manual()]
    return list(chain.from_iterable(zip(*kinds, strict=True)))


PYTHON = ".".join(map(str, sys.version_info[:3]))
