"""What the routers of the examples share: asking engines over HTTP, passing answers on, and trying requests again.

As long as the client has received nothing, a failure costs it only time. Only `Router.complete` decides what happens
after a failure: the failure says where to retry the request (`retry: same | other | never`). Each example's router says
in `_tried` what two engines are asked.

A client that goes away cancels its handler. Whatever a handler has asked of engines ends with it, and they abort it.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import itertools
import json
import re
import resource
import socket
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import aiohttp
from aiohttp import web

TOTAL_TIMEOUT_S = 600.0
CONNECT_TIMEOUT_S = 10.0
BACKLOG = 4096
"""Number of connections that may wait to be accepted."""
SILENT_HOST_S = 10
MAX_BODY_BYTES = 64 << 20
OK = 200
MAX_TRIES = 3
SAME, OTHER, NEVER = "same", "other", "never"
"""Where an engine's failure says that a request may be sent again; see `kvconnector.errors.Retry`."""
_RETRY = re.compile(r'\bretry"?: ?"?(same|other|never)\b')
_BUSY = frozenset({408, 429})
EVENT = b"data: "
EVENT_OF_ERROR = b'data: {"error"'
END_OF_EVENT = b"\n\n"


class Asked(NamedTuple):
    """A client's request: its body without the client's own transfer parameters, and the headers that engines get."""

    request: web.Request
    body: dict[str, Any]
    headers: dict[str, str]


class Prefilled(NamedTuple):
    """A prefill engine's answer.

    Args:
        params: The parameters for the decode engine, if it sends any.
        has_moved: A different engine has answered than the one at whose known address the decode engine waits: it was
            restarted, or several engines share one URL.
    """

    params: dict[str, Any] | None = None
    has_moved: bool = False


class Begun(NamedTuple):
    """A decode engine's answer, and the first bytes of its content, since headers may arrive before any token."""

    response: aiohttp.ClientResponse
    content: bytes

    @property
    def is_good(self) -> bool:
        """False if it is an error. A stream has its status before its load has ended, so its first event says it."""
        event, _, rest = self.content.partition(END_OF_EVENT)
        event = rest if _has_only_role(event) else event
        return self.response.status == OK and not event.startswith(EVENT_OF_ERROR)


class Failed(Exception):
    """A request failed before the client has received anything: the answer for the client, and where to try again.

    `is_unanswered`: the engine has said nothing.
    """

    def __init__(self, answer: web.Response, retry: str) -> None:
        super().__init__(answer.status)
        self.answer, self.retry, self.is_unanswered = answer, retry, False

    @classmethod
    def because(cls, text: str, retry: str = OTHER, status: int = 502) -> Failed:
        """A failure that the router itself reports: engines are missing, or do not fit together."""
        return cls(web.Response(status=status, text=text), retry)

    @classmethod
    def of(cls, answer: aiohttp.ClientResponse, content: bytes) -> Failed:
        """The failure that an engine answers."""
        copy = web.Response(status=answer.status, body=content, content_type=answer.content_type)
        # a stream that begins with an error had status 200
        return cls(copy, retry_of(500 if answer.status == OK else answer.status, content))


def retry_of(status: int, content: bytes) -> str:
    """Return where to send a request again. An engine's text says so; without it, a failure of a server (status 5xx)
    counts as that server's own.
    """
    found = _RETRY.search(content.decode(errors="replace"))
    if found is not None:
        return found[1]
    return OTHER if status >= 500 or status in _BUSY else NEVER


def _has_only_role(event: bytes) -> bool:
    """Return True for the event with which vLLM begins a chat, before it has a token or knows of a failure."""
    try:
        choices = json.loads(event.removeprefix(EVENT))["choices"]
        return all(
            choice["delta"].keys() <= {"role", "content"} and not choice["delta"].get("content")
            for choice in choices
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return False


def _is_before_words(content: bytes) -> bool:
    """Return True if the first event of a stream, or what follows a role, is not complete."""
    event, _, rest = content.partition(END_OF_EVENT)
    return END_OF_EVENT not in (rest if _has_only_role(event) else content)


class Router(ABC):
    """Routes requests round robin over prefill and decode engines, given by their base URLs."""

    def __init__(self, prefill_urls: list[str], decode_urls: list[str]) -> None:
        self._prefill = itertools.cycle(prefill_urls)
        self._decode = itertools.cycle(decode_urls)
        self._num_decode = len(decode_urls)
        self._has_others = len(prefill_urls) + len(decode_urls) > 2
        self._session: aiohttp.ClientSession

    def app(self) -> web.Application:
        """Return the HTTP application."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.cleanup_ctx.append(self._open_session)
        app.add_routes(
            [
                web.post("/v1/completions", self.complete),
                web.post("/v1/chat/completions", self.complete),
                web.get("/health", self.health),
            ]
        )
        return app

    async def _open_session(self, app: web.Application) -> AsyncIterator[None]:
        # three descriptors per request, and no limit on connections: a request that waits for another one's connection
        # would look like one that its engine does not answer
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        connector = aiohttp.TCPConnector(limit=0, socket_factory=_watched_socket)
        timeout = aiohttp.ClientTimeout(total=TOTAL_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as self._session:
            yield

    async def health(self, request: web.Request) -> web.Response:
        """Handle GET /health, for the router itself."""
        return web.json_response({"status": "ok"})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Handle POST: have two engines serve the request, and other engines if a failure says so."""
        body = await body_of(request)
        headers = {"X-Request-Id": request.headers.get("X-Request-Id", uuid.uuid4().hex)}
        if "Authorization" in request.headers:
            headers["Authorization"] = request.headers["Authorization"]
        asked = Asked(request, body, headers)
        prefill, decode = next(self._prefill), next(self._decode)
        for number in range(1, MAX_TRIES + 1):
            try:
                return await self._tried(asked, prefill, decode)
            except Failed as failed:
                is_last = number == MAX_TRIES or (failed.retry == OTHER and not self._has_others)
                if is_last or failed.retry == NEVER:
                    return failed.answer
                if failed.retry == OTHER:
                    prefill, decode = next(self._prefill), next(self._decode)
        raise AssertionError("the last try returns")

    @abstractmethod
    async def _tried(self, asked: Asked, prefill: str, decode: str) -> web.StreamResponse:
        """Serve a request with these two engines. Raises: Failed: the client has received nothing."""

    async def _from_both(
        self, asked: Asked, prefilled: asyncio.Task[Prefilled], begun: asyncio.Task[Begun]
    ) -> web.StreamResponse:
        """Pass on the decode engine's answer, where both engines are asked at once. Ends both requests if it fails.

        Raises:
            Failed: the client has got nothing.
        """
        try:
            answer = await self._passed_on(asked, await self._first_of(prefilled, begun))
            # it ends a moment later; cancelled now, it would count as aborted
            await asyncio.wait([prefilled])
            return answer
        finally:
            prefilled.cancel()

    async def _first_of(
        self, prefilled: asyncio.Task[Prefilled], begun: asyncio.Task[Begun]
    ) -> Begun:
        """Wait until the decode engine's answer begins, unless it cannot come.

        Raises:
            Failed: the decode engine is lost; or, before it has answered, the prefill engine has failed or moved.
        """
        try:
            await asyncio.wait({begun, prefilled}, return_when=asyncio.FIRST_COMPLETED)
            if not begun.done() and (await prefilled).has_moved:
                text = "the prefill engine was started anew, or several engines share its URL"
                raise Failed.because(text, SAME)
            return await begun
        finally:
            begun.cancel()

    async def _passed_on(self, asked: Asked, begun: Begun) -> web.StreamResponse:
        """Pass on a decode engine's answer. Raises Failed: it is an error, of which the client has got nothing."""
        async with begun.response:
            if not begun.is_good:
                raise Failed.of(begun.response, begun.content + await _rest_of(begun.response))
            return await self._pass_on(asked.request, begun.response, begun.content)

    async def _begun(self, url: str, asked: Asked, body: dict[str, Any]) -> Begun:
        """Ask a decode engine, and wait for the first words. Raises Failed: it is lost."""
        upstream = await self._post(url, asked, body)
        try:
            content = await upstream.content.readany()
            while content.startswith(EVENT) and _is_before_words(content):
                more = await upstream.content.readany()
                if not more:
                    break
                content += more
            return Begun(upstream, content)
        except (aiohttp.ClientError, TimeoutError) as error:
            upstream.close()
            raise _unanswered(url, error) from error
        except BaseException:
            upstream.close()
            raise

    async def _pass_on(
        self, request: web.Request, upstream: aiohttp.ClientResponse, first: bytes
    ) -> web.StreamResponse:
        response = web.StreamResponse(
            status=upstream.status, headers={"Content-Type": upstream.headers["Content-Type"]}
        )
        await response.prepare(request)
        await response.write(first)
        async for chunk in upstream.content.iter_any():
            await response.write(chunk)
        await response.write_eof()
        return response

    async def _post(self, url: str, asked: Asked, body: dict[str, Any]) -> aiohttp.ClientResponse:
        """Send a body to an engine, at the client's path. Raises Failed: it does not answer."""
        try:
            target = url + asked.request.path
            return await self._session.post(target, json=body, headers=asked.headers)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _unanswered(url, error) from error

    async def _whole(self, url: str, asked: Asked, body: dict[str, Any]) -> bytes:
        """Have a prefill engine compute a prompt. Returns its answer.

        Raises:
            Failed: it does not answer, or with an error.
        """
        try:
            async with await self._post(url, asked, body) as answer:
                content = await answer.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _unanswered(url, error) from error
        if answer.status != OK:
            raise Failed.of(answer, content)
        return content


def _watched_socket(address: tuple[Any, ...]) -> socket.socket:
    """Return a socket whose connection ends when the other host is lost. By default TCP would wait forever."""
    opened = socket.socket(*address[:3])
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, 2),
        (socket.TCP_KEEPINTVL, 2),
        (socket.TCP_USER_TIMEOUT, SILENT_HOST_S * 1000),
    ):
        opened.setsockopt(socket.IPPROTO_TCP, option, value)
    return opened


async def body_of(request: web.Request) -> dict[str, Any]:
    """Return a completion's body without the client's transfer parameters. Raises HTTPBadRequest: no JSON object."""
    try:
        body = json.loads(await request.read())
    except (ValueError, RecursionError) as error:
        raise web.HTTPBadRequest(text=f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise web.HTTPBadRequest(text="the body must be a JSON object")
    body.pop("kv_transfer_params", None)
    return body


async def _rest_of(answer: aiohttp.ClientResponse) -> bytes:
    """Return the rest of a failure's text, or as much of it as arrived."""
    try:
        return await answer.read()
    except (aiohttp.ClientError, TimeoutError):
        return b""


def _unanswered(url: str, error: Exception) -> Failed:
    """Return the failure of a request whose engine did not answer, or for which the router had no descriptor left."""
    reason, retry, status = str(error) or type(error).__name__, OTHER, 502
    text = f"{url} did not answer: {reason}"
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        text, retry, status = (
            f"the router has no file descriptor left, its limit is {limit}",
            NEVER,
            503,
        )
    elif isinstance(error, aiohttp.ConnectionTimeoutError):
        text = f"{url} did not answer: no connection within {CONNECT_TIMEOUT_S:g} s"
    elif isinstance(error, TimeoutError):
        # it may still be busy with the request, so the request is not given to another engine as well
        text, retry, status = f"{url} did not answer within {TOTAL_TIMEOUT_S:g} s", NEVER, 504
    failed = Failed.because(text, retry, status)
    failed.is_unanswered = True
    return failed


def parser_of(description: str | None, engine: str = "base URL") -> argparse.ArgumentParser:
    """Return a parser of the options that each router has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--prefill", action="append", required=True, help=f"{engine}; repeatable")
    parser.add_argument("--decode", action="append", required=True, help=f"{engine}; repeatable")
    return parser


def serve(app: web.Application, host: str, port: int) -> None:
    """Serve until interrupted. A client that goes away cancels its handler, whose requests both engines then abort."""
    web.run_app(app, host=host, port=port, print=None, backlog=BACKLOG, handler_cancellation=True)
