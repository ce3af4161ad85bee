"""``lynx proxy``: one OpenAI-compatible address before a prefill and a decode engine."""

from __future__ import annotations

from enum import Enum
from typing import Annotated
from urllib.parse import urlsplit

import typer

from .. import metrics
from ..errors import InvalidInputError, UnsupportedError


class FirstToken(str, Enum):
    """Whose first token a client gets."""

    prefill = "prefill"
    decode = "decode"


def proxy(
    prefill: Annotated[str, typer.Option(help="URL of the prefill engine's server.")],
    decode: Annotated[str, typer.Option(help="URL of the decode engine's server.")],
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at.")] = 8080,
    first_token: Annotated[
        FirstToken,
        typer.Option(
            help="prefill: the first token is the one that the prefill engine sampled on the exact "
            "cache, and waits for no transfer. decode: it is sampled again on the loaded cache."
        ),
    ] = FirstToken.prefill,
    drafts: Annotated[
        str | None,
        typer.Option(
            help="Where decode engines publish drafts (their lynx.provisional), such as "
            "tcp://127.0.0.1:5570; clients may then ask for provisional tokens."
        ),
    ] = None,
    prefill_seconds: Annotated[
        float,
        typer.Option(
            min=0.1, help="How long prefill may take; decode then computes the prompt itself."
        ),
    ] = 300.0,
    metrics_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Show Prometheus metrics at this port.")
    ] = None,
) -> None:
    """Answer OpenAI requests by a prefill engine and a decode engine, which goes on from there.

    Both are `vllm serve`; the cache crosses by way of Lynx's store. A client gets what the decode
    engine has verified, after the prefill engine's own first token. That is /v1/completions and
    /v1/chat/completions; every other path is the decode engine's, and passed on to it.
    """
    try:
        from ..proxy.app import Sides, serve
    except ImportError as e:
        raise UnsupportedError(
            f"the proxy needs {e.name}: pip install 'lynx-backend[proxy]'"
        ) from e
    sides = Sides(
        _url("--prefill", prefill),
        _url("--decode", decode),
        first_token is FirstToken.prefill,
        drafts,
        prefill_seconds,
    )
    if metrics_port is not None:
        metrics.serve(metrics_port)
    serve(sides, host, port)


def _url(option: str, text: str) -> str:
    """The base URL of an engine's server, without a slash at its end."""
    try:
        url = urlsplit(text)
        is_one = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:  # no port
        is_one = False
    if not is_one or "?" in text or "#" in text:
        raise InvalidInputError(
            f"{option} must be the URL of a server, such as http://10.0.0.1:8000, got {text!r}"
        )
    return text.rstrip("/")
