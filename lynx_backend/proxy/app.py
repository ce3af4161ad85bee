"""The proxy's HTTP side: one request to prefill, one to decode, one stream to the client.

The first token is the prefill side's own, and is sent as soon as it is known; drafts, if the client
asked for them, are sent as what they are. The concatenated ordinary text is always what decoding on
the whole cache gives; see ``docs/vllm-progressive.md``.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

from aiohttp import ClientError, ClientResponse, ClientSession, ClientTimeout, web

from .. import metrics
from ..errors import ConfigError, TransportError
from ..logs import warn_limited
from ..side_channel import Listener, News
from . import handoff
from .handoff import Json, Prefilled
from .telling import Clock, Provisional

logger = logging.getLogger(__name__)

_PATHS = {"/v1/completions": False, "/v1/chat/completions": True}
_CONNECT_SECONDS = 5.0
#: Of a request, what its engine has to know; the rest is about the connection to the proxy.
_PASSED_ON = ("Authorization", "Content-Type", "Accept")


@dataclass(frozen=True)
class Sides:
    """Where the engines are, and what the proxy does.

    Attributes:
        prefill, decode: base URLs, such as ``http://10.0.0.1:8000``.
        first_token: whether the first token is the prefill side's; else decode samples it again.
        drafts: address at which decode engines publish drafts; None for no provisional tokens.
        prefill_seconds: how long the prefill side may take; decode then does without it.
    """

    prefill: str
    decode: str
    first_token: bool = True
    drafts: str | None = None
    prefill_seconds: float = 300.0


class Proxy:
    """One pair of engines behind one address.

    Args:
        sides: where they are.
    """

    def __init__(self, sides: Sides) -> None:
        self._sides = sides
        self._listener: Listener | None = None
        self._session: ClientSession

    def app(self) -> web.Application:
        """The application, to be run by aiohttp."""
        app = web.Application(client_max_size=1 << 30)
        app.cleanup_ctx.append(self._running)
        for path in _PATHS:
            app.router.add_post(path, self._answer)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        return app

    async def _running(self, _: web.Application) -> AsyncIterator[None]:
        listening = None
        if self._sides.drafts is not None:
            self._listener = Listener(self._sides.drafts)
            listening = asyncio.create_task(self._listener.run())
        async with ClientSession(timeout=_timeout(None), auto_decompress=True) as self._session:
            yield
        if self._listener is not None and listening is not None:
            listening.cancel()
            self._listener.close()

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        """Models, health, embeddings and the like are the decode side's."""
        url = f"{self._sides.decode}{request.rel_url}"
        headers, body = _headers(request, _PASSED_ON), await request.read()
        out: web.StreamResponse | None = None
        try:
            async with self._session.request(
                request.method, url, headers=headers, data=body or None
            ) as answer:
                out = web.StreamResponse(status=answer.status)
                if "Content-Type" in answer.headers:
                    out.headers["Content-Type"] = answer.headers["Content-Type"]
                await out.prepare(request)
                async for data in answer.content.iter_any():
                    await out.write(data)
        except (ClientError, ConnectionResetError) as e:
            if out is None:
                return _failure(f"the decode side does not answer: {e}", 502)
            if request.transport is not None:
                request.transport.close()  # all that still tells the client that this is not all
        return out

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        try:
            body = await request.json()
            if not isinstance(body, dict):
                raise ValueError("the body must be a JSON object")
            if not isinstance(body.get("kv_transfer_params") or {}, dict):
                raise ValueError("kv_transfer_params must be a JSON object")
        except ValueError as e:
            return _failure(str(e), 400)
        return await _Exchange(self, request, body).answer()


def _headers(request: web.Request, names: Sequence[str]) -> dict[str, str]:
    return {name: request.headers[name] for name in names if name in request.headers}


def _timeout(seconds: float | None) -> ClientTimeout:
    return ClientTimeout(total=seconds, sock_connect=_CONNECT_SECONDS)


def serve(sides: Sides, host: str, port: int) -> None:
    """Run the proxy until Ctrl-C or SIGTERM.

    Raises:
        ConfigError: there cannot be listened.
    """
    try:
        # When a client goes away, so does what was asked of the engines for it.
        web.run_app(Proxy(sides).app(), host=host, port=port, handler_cancellation=True)
    except (OSError, UnicodeError) as e:
        raise ConfigError(
            f"the proxy cannot listen at port {port} of {host}: {e}; choose another --port or "
            "--host"
        ) from None


class _Exchange:
    """One request and its answer."""

    def __init__(self, proxy: Proxy, request: web.Request, body: Json) -> None:
        self._sides, self._session = proxy._sides, proxy._session
        self._listener = proxy._listener
        self._request, self._body = request, body
        self._chat = _PATHS[request.path]
        self._headers = _headers(request, ["Authorization"])
        self._clock = Clock("decode")
        self._first: Prefilled | None = None
        self._continued = False
        self._tag = None if self._listener is None else uuid.uuid4().hex

    async def answer(self) -> web.StreamResponse:
        refused = await self._prefill()
        if refused is not None:
            return refused
        first = self._first
        if (
            first is not None
            and self._sides.first_token
            and first.token is not None
            and handoff.can_continue(self._body)
        ):
            if handoff.is_whole(self._body, first, self._chat):
                return await self._prefill_alone(first)
            self._continued = first.text is not None
        self._clock.first_token_from = "prefill" if self._continued else "decode"
        metrics.PROXY_REQUESTS.labels(self._clock.first_token_from).inc()
        return await (self._stream() if self._body.get("stream") else self._at_once())

    async def _prefill(self) -> web.Response | None:
        """Have the prompt computed; what to answer if the prefill side refuses the request."""
        asked = handoff.prefill_request(self._body)
        try:
            async with self._post(
                self._sides.prefill, asked, self._sides.prefill_seconds
            ) as answer:
                if answer.status == 200:
                    self._first = handoff.prefilled(await _parsed(answer))
                elif 400 <= answer.status < 500:
                    return await _copied(answer)
                else:
                    raise TransportError(f"status {answer.status}")
        except (ClientError, TransportError, asyncio.TimeoutError) as e:
            # The decode side can do without it.
            metrics.ERRORS.labels("PrefillError").inc()
            warn_limited(logger, "proxy-prefill", "the prefill side failed: %s", e)
        return None

    async def _prefill_alone(self, first: Prefilled) -> web.StreamResponse:
        """The answer ends with its first token: nothing is left to decode."""
        self._clock.first_token_from = "prefill"
        self._clock.count(1)
        metrics.PROXY_REQUESTS.labels("prefill").inc()
        body = _public(first.body) | {"lynx": self._clock.told()}
        if not self._body.get("stream"):
            return web.json_response(body)
        out = await self._open()
        choice = handoff.delta(self._chat, first.text or "", opening=True)
        reason = body["choices"][0].get("finish_reason")
        chunk = self._chunk(choice | {"finish_reason": reason})
        await _send(out, chunk | {"lynx": self._clock.told()})
        if (self._body.get("stream_options") or {}).get("include_usage"):
            await _send(out, self._chunk() | {"usage": body["usage"]})
        await out.write(b"data: [DONE]\n\n")
        return out

    async def _at_once(self) -> web.Response:
        if self._continued:
            self._clock.count(1)
        try:
            with self._following() as news:
                async with self._post(self._sides.decode, self._decode_request()) as answer:
                    if answer.status != 200:
                        return await _copied(answer)
                    body = await _parsed(answer)
                while not news.empty():
                    self._clock.hear(news.get_nowait())
        except (ClientError, TransportError) as e:
            return _failure(f"the decode side failed: {e}", 502)
        self._clock.count(sum(len(each.get("token_ids") or ()) for each in body["choices"]))
        if self._continued and self._first is not None:
            (choice,) = body["choices"]
            if self._chat:
                message = choice["message"]
                message["content"] = (self._first.text or "") + (message.get("content") or "")
            else:
                choice["text"] = (self._first.text or "") + choice["text"]
            handoff.count_first_token(body["usage"])
            choice["token_ids"] = [self._first.token, *(choice.get("token_ids") or ())]
        if not self._body.get("return_token_ids"):
            body = _public(body)
        return web.json_response(body | {"lynx": self._clock.told()})

    # -- streaming ---------------------------------------------------------------------------------

    async def _stream(self) -> web.StreamResponse:
        out: web.StreamResponse | None = None
        if self._continued and self._first is not None:
            self._clock.count(1)
            out = await self._open()
            opening = handoff.delta(self._chat, self._first.text or "", opening=True)
            await _send(out, self._chunk(opening) | {"lynx": {"first_token_from": "prefill"}})
        try:
            with self._following() as news:
                async with self._post(self._sides.decode, self._decode_request()) as answer:
                    if answer.status != 200 and out is None:
                        return await _copied(answer)
                    if answer.status == 200 and answer.content_type != "text/event-stream":
                        raise TransportError(f"no stream but {answer.content_type}")
                    out = out or await self._open()
                    if answer.status != 200:
                        await out.write(b"data: " + await answer.read() + b"\n\n")
                    else:
                        await self._relay(out, answer, news)
        except ConnectionResetError:  # the client has gone
            if out is not None:
                return out
            raise
        except (ClientError, TransportError) as e:
            why = f"the decode side failed: {e}"
            if out is None:
                return _failure(why, 502)
            await _send(out, _error(why, 502))
        await out.write(b"data: [DONE]\n\n")
        return out

    async def _relay(
        self, out: web.StreamResponse, answer: ClientResponse, news: asyncio.Queue[News]
    ) -> None:
        """Send on what the decode side says, and before that the drafts that it makes."""
        events = _events(answer)
        provisional = self._provisional()
        waiting_for: dict[asyncio.Future[Any], str] = {}
        try:
            while True:
                if "chunk" not in waiting_for.values():
                    waiting_for[asyncio.ensure_future(anext(events, None))] = "chunk"
                if "news" not in waiting_for.values():
                    waiting_for[asyncio.ensure_future(news.get())] = "news"
                done, _ = await asyncio.wait(waiting_for, return_when=asyncio.FIRST_COMPLETED)
                for future in done:
                    if waiting_for.pop(future) == "news":
                        said = [future.result()]
                        while not news.empty():
                            said.append(news.get_nowait())
                        for shown in await provisional.of(said):
                            await _send(out, self._chunk(handoff.delta(self._chat, "")) | shown)
                        continue
                    chunk = future.result()
                    if chunk is None:
                        return
                    await _send(out, self._edited(chunk, provisional))
        finally:
            for future in waiting_for:
                future.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await future
            await events.aclose()

    def _edited(self, chunk: Json, provisional: Provisional) -> Json:
        """A chunk of the decode side as part of this answer."""
        if "choices" not in chunk:
            return chunk
        choices = chunk["choices"]
        tokens = [token for each in choices for token in each.get("token_ids") or ()]
        self._clock.count(len(tokens))
        provisional.verified |= bool(tokens)
        if self._first is not None and self._continued:
            chunk["id"] = self._first.body["id"]
            if chunk.get("usage"):
                handoff.count_first_token(chunk["usage"])
        if any(each.get("finish_reason") for each in choices):
            chunk["lynx"] = self._clock.told()
        return chunk if self._body.get("return_token_ids") else _public(chunk)

    def _following(self) -> AbstractContextManager[asyncio.Queue[News]]:
        if self._listener is None or self._tag is None:
            return nullcontext(asyncio.Queue())
        return self._listener.following(self._tag)

    def _decode_request(self) -> Json:
        return handoff.decode_request(
            self._body, self._chat, self._first, self._continued, self._tag
        )

    # -- parts -------------------------------------------------------------------------------------

    def _post(self, side: str, asked: Mapping[str, Any], seconds: float | None = None) -> Any:
        url, limit = f"{side}{self._request.path}", _timeout(seconds)
        return self._session.post(url, json=asked, headers=self._headers, timeout=limit)

    async def _open(self) -> web.StreamResponse:
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await out.prepare(self._request)
        return out

    def _chunk(self, choice: Json | None = None) -> Json:
        """A chunk of our own."""
        said = self._first.body if self._first is not None else {}
        return {
            "id": said.get("id", "lynx"),
            "object": "chat.completion.chunk" if self._chat else "text_completion",
            "created": said.get("created", int(time.time())),
            "model": said.get("model", self._body.get("model")),
            "choices": [] if choice is None else [choice],
        }

    def _provisional(self) -> Provisional:
        first = self._first
        before = list(first.prompt) if first is not None else []
        if first is not None and first.token is not None and self._continued:
            before.append(first.token)
        return Provisional(self._clock, self._text, before, handoff.wants_drafts(self._body))

    async def _text(self, tokens: Sequence[int]) -> str | None:
        """What tokens stand for, by the decode side's tokenizer; None if it does not say."""
        asked = {"model": self._body.get("model"), "tokens": [*tokens]}
        url = f"{self._sides.decode}/detokenize"
        try:
            async with self._session.post(url, json=asked, headers=self._headers) as answer:
                answer.raise_for_status()
                return str((await answer.json())["prompt"])
        except (ClientError, ValueError, LookupError, TypeError) as e:
            warn_limited(logger, "proxy-detokenize", "drafts cannot be shown: %s", e)
            return None


async def _events(answer: ClientResponse) -> Any:
    """The JSON of each event of a stream, up to its end."""
    buffer = b""
    async for data in answer.content.iter_any():
        *lines, buffer = (buffer + data).split(b"\n")
        for line in lines:
            payload = line.strip().removeprefix(b"data: ")
            if payload == b"[DONE]":
                return
            if line.startswith(b"data: "):
                try:
                    yield json.loads(payload)
                except ValueError as e:
                    raise TransportError(f"an event is not JSON: {e}") from None


async def _parsed(answer: ClientResponse) -> Json:
    """An engine's answer; TransportError when it is not one of vLLM's."""
    try:
        body = await answer.json()
    except ValueError as e:
        raise TransportError(f"its answer is not JSON: {e}") from None
    if not isinstance(body, dict) or not isinstance(body.get("choices"), list):
        raise TransportError("its answer has no choices, as vLLM's have")
    return body


async def _send(out: web.StreamResponse, chunk: Json) -> None:
    await out.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")


async def _copied(answer: ClientResponse) -> web.Response:
    return web.Response(
        status=answer.status, body=await answer.read(), content_type=answer.content_type
    )


def _error(message: str, status: int) -> Json:
    return {"error": {"message": message, "type": "proxy", "code": status}}


def _failure(message: str, status: int) -> web.Response:
    return web.json_response(_error(message, status), status=status)


def _public(body: Json) -> Json:
    """Without what only the proxy has asked for."""
    hidden = ("prompt_token_ids", "token_ids", "kv_transfer_params")
    found = {name: value for name, value in body.items() if name not in hidden}
    found["choices"] = [
        {name: value for name, value in choice.items() if name not in hidden}
        for choice in body["choices"]
    ]
    return found
