"""What the proxy does with answers that are not vLLM's, and with paths that it does not know.

With real engines: integration_tests/test_vllm_proxy.py.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="the proxy needs aiohttp")

from aiohttp import ClientPayloadError, ClientSession, web
from aiohttp.test_utils import TestServer

from lynx_backend.proxy.app import Proxy, Sides

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
COMPLETIONS = "/v1/completions"
ASKED = {"model": "m", "prompt": "a"}
WHOLE: dict[str, Any] = {"choices": [{"index": 0, "text": "b"}], "usage": {}}


@asynccontextmanager
async def served(app: web.Application) -> AsyncIterator[str]:
    server = TestServer(app)
    await server.start_server()
    try:
        yield str(server.make_url("")).rstrip("/")
    finally:
        await server.close()


def engine(answer: Handler) -> web.Application:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    return app


async def asked(
    prefill: Handler, decode: Handler, method: str, path: str, **options: Any
) -> tuple[int, str, bytes]:
    """Status, content type and body of what a client gets of a proxy before these engines."""
    async with (
        served(engine(prefill)) as first,
        served(engine(decode)) as second,
        served(Proxy(Sides(first, second)).app()) as proxy,
        ClientSession() as client,
        client.request(method, f"{proxy}{path}", **options) as answer,
    ):
        return answer.status, answer.headers.get("Content-Type", ""), await answer.read()


async def unused(request: web.Request) -> web.StreamResponse:
    raise AssertionError(f"{request.path} is not for this side")


def says(body: Any) -> Handler:
    async def answer(_: web.Request) -> web.StreamResponse:
        return web.json_response(body)

    return answer


def mumbles(text: str, kind: str = "application/json") -> Handler:
    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response(text=text, content_type=kind)

    return answer


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v1/models?limit=2", b""),
        ("POST", "/tokenize", b'{"prompt": "a"}'),
        ("POST", "/v1/embeddings", b"\x00 no JSON"),
        ("DELETE", "/v1/responses/7", b""),
    ],
)
def test_other_paths_are_the_decode_sides(method: str, path: str, body: bytes):
    async def decode(request: web.Request) -> web.StreamResponse:
        seen.append((request.method, str(request.rel_url), await request.read()))
        if request.headers.get("Authorization") != "Bearer key":
            return web.Response(status=401)
        kind = {"Content-Type": f"{request.headers['Content-Type']}; charset=utf-8"}
        return web.Response(status=202, body=b"\x01as it is", headers=kind)

    seen: list[tuple[str, str, bytes]] = []
    headers = {"Authorization": "Bearer key", "Content-Type": "text/x-this"}
    got = asyncio.run(asked(unused, decode, method, path, data=body, headers=headers))
    assert seen == [(method, path, body)]
    assert got == (202, "text/x-this; charset=utf-8", b"\x01as it is")


def test_what_is_passed_on_is_passed_on_as_it_comes_and_its_end_is_told():
    async def scene() -> None:
        more = asyncio.Event()

        async def decode(request: web.Request) -> web.StreamResponse:
            out = web.StreamResponse()
            await out.prepare(request)
            await out.write(b"first")
            await more.wait()
            assert request.transport is not None
            request.transport.abort()  # as an engine that is killed
            return out

        async with (
            served(engine(decode)) as side,
            served(Proxy(Sides(side, side)).app()) as proxy,
            ClientSession() as client,
            client.post(f"{proxy}/v1/responses") as answer,
        ):
            assert await answer.content.readany() == b"first"
            more.set()
            with pytest.raises(ClientPayloadError):
                await answer.read()

    asyncio.run(asyncio.wait_for(scene(), 30))


def test_a_decode_side_that_is_not_there_is_said():
    async def scene() -> tuple[int, bytes]:
        async with (
            served(Proxy(Sides("http://127.0.0.1:1", "http://127.0.0.1:1")).app()) as proxy,
            ClientSession() as client,
            client.post(f"{proxy}/tokenize") as answer,
        ):
            return answer.status, await answer.read()

    status, body = asyncio.run(scene())
    assert status == 502
    assert "does not answer" in json.loads(body)["error"]["message"]


@pytest.mark.parametrize("text", ["not JSON", "\ufffd", "[]", "{}", '{"choices": null}'])
def test_decode_does_without_a_prefill_side_that_says_something_else(text: str):
    got = asyncio.run(asked(mumbles(text), says(WHOLE), "POST", COMPLETIONS, json=ASKED))
    assert got[0] == 200
    assert json.loads(got[2])["choices"] == WHOLE["choices"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", ["not JSON", "[]", "{}"])
def test_a_decode_side_that_says_something_else_has_failed(text: str, stream: bool):
    body = ASKED | {"stream": stream}
    status, _, got = asyncio.run(asked(says(WHOLE), mumbles(text), "POST", COMPLETIONS, json=body))
    assert status == 502
    assert "the decode side failed" in json.loads(got)["error"]["message"]


def test_a_stream_of_something_else_ends_with_an_error():
    decode = mumbles("data: not JSON\n\n", "text/event-stream")
    body = ASKED | {"stream": True}
    status, _, got = asyncio.run(asked(says(WHOLE), decode, "POST", COMPLETIONS, json=body))
    assert status == 200
    error, done = got.decode().strip().split("\n\n")
    assert "an event is not JSON" in json.loads(error.removeprefix("data: "))["error"]["message"]
    assert done == "data: [DONE]"
