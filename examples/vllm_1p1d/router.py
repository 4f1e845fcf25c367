"""A router: it sends each request to a prefill engine, and then, with `kv_transfer_params`, to a decode engine.

Any router for NixlConnector will do. If possible, this one asks both engines at once, and the decode engine reads the
prompt's cache while it is computed. For that the router draws a name for the transfer. A prefill engine's answer to an
earlier request shows whether it accepts such names.

As long as the client has no token, a failure costs it only time. If a decode engine is lost, another one gets the same
`kv_transfer_params`, which are good until somebody has read the blocks or their lease has ended. Other failures say
where to send the request again (`retry: same | other | never`), and then it is prefilled anew there.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import itertools
import json
import re
import resource
import secrets
import socket
import uuid
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
REMOTE_DECODE: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


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


OK = 200
MAX_TRIES = 3
SAME, OTHER, NEVER = "same", "other", "never"
"""Where an engine's failure says that a request may be sent again; see `kvconnector.errors.Retry`."""
_RETRY = re.compile(r'\bretry"?: ?"?(same|other|never)\b')
_BUSY = frozenset({408, 429})
EVENT = b"data: "
EVENT_OF_ERROR = b'data: {"error"'
END_OF_EVENT = b"\n\n"


class Prefilled(NamedTuple):
    """A prefill engine's answer: the parameters for the decode engine, if it sends any."""

    params: dict[str, Any] | None


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
    """A request failed before the client has got anything: the answer for it, and where to try again."""

    def __init__(self, answer: web.Response, retry: str) -> None:
        super().__init__(answer.status)
        self.answer, self.retry = answer, retry

    @classmethod
    def of(cls, answer: aiohttp.ClientResponse, content: bytes) -> Failed:
        """The failure that an engine answers."""
        copy = web.Response(status=answer.status, body=content, content_type=answer.content_type)
        # a stream that begins with an error had begun well
        return cls(copy, retry_of(500 if answer.status == OK else answer.status, content))


def retry_of(status: int, content: bytes) -> str:
    """Return where to send a request again. An engine's text says it; without that, a server's failure is its own."""
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


class Router:
    """Routes requests round robin over prefill and decode engines, given by their base URLs."""

    def __init__(self, prefill_urls: list[str], decode_urls: list[str]) -> None:
        self._prefill = itertools.cycle(prefill_urls)
        self._decode = itertools.cycle(decode_urls)
        self._num_decode = len(decode_urls)
        self._has_others = len(prefill_urls) + len(decode_urls) > 2
        self._session: aiohttp.ClientSession
        self._streaming: dict[str, dict[str, Any]] = {}
        """By base URL, the address for decode engines of each prefill engine that accepts names of transfers."""

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
        """Handle POST: prefill with one token, decode, and stream the decode engine's answer to the client."""
        body = await body_of(request)
        headers = {"X-Request-Id": request.headers.get("X-Request-Id", uuid.uuid4().hex)}
        if "Authorization" in request.headers:
            headers["Authorization"] = request.headers["Authorization"]
        prefill, decode = next(self._prefill), next(self._decode)
        for number in range(1, MAX_TRIES + 1):
            try:
                return await self._tried(request, body, headers, prefill, decode)
            except Failed as failed:
                is_last = number == MAX_TRIES or (failed.retry == OTHER and not self._has_others)
                if is_last or failed.retry == NEVER:
                    return failed.answer
                if failed.retry == OTHER:
                    prefill, decode = next(self._prefill), next(self._decode)
        raise AssertionError("the last try returns")

    async def _tried(
        self,
        request: web.Request,
        body: dict[str, Any],
        headers: dict[str, str],
        prefill: str,
        decode: str,
    ) -> web.StreamResponse:
        """Serve a request with these two engines.

        Raises:
            Failed: the client has got nothing.
        """
        names = {"transfer_id": uuid.uuid4().hex, "transfer_secret": secrets.token_hex(16)}
        prefilled = asyncio.create_task(
            self._prefilled(prefill, request.path, body, names, headers)
        )
        try:
            if prefill in self._streaming:
                known = {"do_remote_prefill": True, **self._streaming[prefill], **names}
                full = {**body, "kv_transfer_params": known}
                begun = asyncio.create_task(self._begun(decode + request.path, full, headers))
                answer = await self._streamed(request, begun, prefilled, prefill)
                if answer is not None:
                    return answer
            params = (await prefilled).params
            full = {**body, "kv_transfer_params": params} if params else body
            return await self._decoded(request, full, headers, decode)
        finally:
            prefilled.cancel()

    async def _decoded(
        self, request: web.Request, full: dict[str, Any], headers: dict[str, str], decode: str
    ) -> web.StreamResponse:
        """Pass on a decode engine's answer. If it is lost, the next one gets the same parameters."""
        for number in range(1, self._num_decode + 1):
            try:
                upstream, first = await self._begun(decode + request.path, full, headers)
                break
            except Failed:
                if number == self._num_decode:
                    raise
                decode = next(self._decode)
        async with upstream:
            if not Begun(upstream, first).is_good:
                raise Failed.of(upstream, first + await _rest_of(upstream))
            return await self._pass_on(request, upstream, first)

    async def _streamed(
        self,
        request: web.Request,
        begun: asyncio.Task[Begun],
        prefilled: asyncio.Task[Prefilled],
        prefill: str,
    ) -> web.StreamResponse | None:
        """Return the decode engine's answer, None if it failed.

        The decode engine waits for the prefill engine that answered last. If another one answers this time, because
        several share one URL or after a restart, there is nothing to wait for.

        Raises:
            Failed: the prefill engine has failed first.
        """
        known = self._streaming[prefill]
        try:
            await asyncio.wait({begun, prefilled}, return_when=asyncio.FIRST_COMPLETED)
            if not begun.done():
                await prefilled
                if self._streaming.get(prefill) != known:
                    return None
            try:
                upstream, first = await begun
            except Failed:
                return None  # it is lost: another one gets what the prefill engine offers
            async with upstream:
                is_good = Begun(upstream, first).is_good
                return await self._pass_on(request, upstream, first) if is_good else None
        finally:
            begun.cancel()

    async def _begun(self, url: str, body: dict[str, Any], headers: dict[str, str]) -> Begun:
        upstream = await self._post(url, body, headers)
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

    async def _prefilled(
        self,
        url: str,
        path: str,
        body: dict[str, Any],
        names: dict[str, str],
        headers: dict[str, str],
    ) -> Prefilled:
        short = {**body, "max_tokens": 1, "stream": False}
        # the prompt is prefilled once, however many completions are requested
        for option in ("stream_options", "n"):
            short.pop(option, None)
        if body.get("min_tokens"):
            short["min_tokens"] = 1  # an engine refuses more than max_tokens
        if "max_completion_tokens" in body:
            short["max_completion_tokens"] = 1
        short["kv_transfer_params"] = {**REMOTE_DECODE, **names}
        try:
            async with await self._post(url + path, short, headers) as answer:
                content = await answer.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            self._streaming.pop(url, None)
            raise _unanswered(url, error) from error
        except Failed:
            self._streaming.pop(url, None)  # another engine may be there next time
            raise
        if answer.status != OK:
            raise Failed.of(answer, content)
        params = json.loads(content).get("kv_transfer_params")
        self._learn(url, params or {}, names["transfer_id"])
        return Prefilled(params)

    def _learn(self, url: str, params: dict[str, Any], transfer_id: str) -> None:
        """Remember an engine's address if it streams: its answer then has the transfer's name that it was sent."""
        name, _, rest = str(params.get("remote_request_id")).partition("|")
        self._streaming.pop(url, None)
        if name == transfer_id:
            keys = ("remote_engine_id", "remote_host", "remote_port")
            public_key = {"remote_public_key": rest.split("|")[1]}
            self._streaming[url] = {key: params[key] for key in keys} | public_key

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

    async def _post(
        self, url: str, body: dict[str, Any], headers: dict[str, str]
    ) -> aiohttp.ClientResponse:
        try:
            return await self._session.post(url, json=body, headers=headers)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _unanswered(url, error) from error


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
    """Return the rest of a failure's text, or what came of it."""
    try:
        return await answer.read()
    except (aiohttp.ClientError, TimeoutError):
        return b""


def _unanswered(url: str, error: Exception) -> Failed:
    """Return the failure of a request whose engine did not answer, or for which the router had no descriptor left."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        text = f"the router has no file descriptor left, its limit is {limit}"
        return Failed(web.Response(status=503, text=text), NEVER)
    reason = str(error) or type(error).__name__
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        reason = f"no connection within {CONNECT_TIMEOUT_S:g} s"
    elif isinstance(error, TimeoutError):
        # it may still be busy with the request, so another engine is not burdened with it, too
        text = f"{url} did not answer within {TOTAL_TIMEOUT_S:g} s"
        return Failed(web.Response(status=504, text=text), NEVER)
    return Failed(web.Response(status=502, text=f"{url} did not answer: {reason}"), OTHER)


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--prefill", action="append", required=True, help="base URL; repeatable")
    parser.add_argument("--decode", action="append", required=True, help="base URL; repeatable")
    arguments = parser.parse_args()
    app = Router(arguments.prefill, arguments.decode).app()
    serve(app, arguments.host, arguments.port)


def serve(app: web.Application, host: str, port: int) -> None:
    """Serve until interrupted. A client that goes away cancels its handler, whose requests both engines then abort."""
    web.run_app(app, host=host, port=port, print=None, backlog=BACKLOG, handler_cancellation=True)


if __name__ == "__main__":
    main()
