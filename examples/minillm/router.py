"""`python -m minillm.router`: each completion goes to a prefill engine, and to a decode engine with its params.

Where the prefill engine streams, both are asked at once: the router names the transfer, and knows that engine by its
answer to an earlier request. Otherwise the decode engine gets the prefill engine's answer. It keeps no state of
a request beyond its two HTTP calls and never sees a token's KV.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import itertools
import json
import logging
import resource
import secrets
import signal
import socket
import sys
import uuid
from typing import Any

import aiohttp
from aiohttp import web

from kvconnector.errors import PeerUnreachableError
from minillm.http_api import MAX_BODY_BYTES, ApiError, error_middleware
from minillm.http_serving import add_server_arguments, run_app
from minillm.processes import die_with_parent, log_to_stderr, run_until_signal

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 10.0
UPSTREAM_TIMEOUT_S = 300.0
SILENT_HOST_S = 10
"""A server's host that acknowledges nothing for so long is gone. The server itself may say nothing for longer."""
UNREACHABLE = PeerUnreachableError.__name__
"""The cause in a decode engine's answer if no prefill engine listens where one was."""
REMOTE_DECODE_PARAMS: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


CONFIRM_S = 5.0
"""How long a prefill engine may take to end its answer after the decode engine's has ended."""


class Router:
    """Round robin over prefill and over decode servers, given by their base URLs."""

    def __init__(
        self, session: aiohttp.ClientSession, prefill_urls: list[str], decode_urls: list[str]
    ) -> None:
        self._session = session
        self._prefill = itertools.cycle(prefill_urls)
        self._decode = itertools.cycle(decode_urls)
        self._streaming: dict[str, dict[str, Any]] = {}
        """What a decode engine needs to find each prefill engine that takes the names of transfers."""

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions: prefill and decode; the decode engine's answer is passed on as it comes."""
        try:
            body = json.loads(await request.read())
        except ValueError as error:
            raise ApiError(400, f"the body is not JSON: {error}") from error
        if not isinstance(body, dict):
            raise ApiError(400, "the body must be a JSON object")
        prefill, decode = next(self._prefill), next(self._decode)
        names = {"transfer_id": uuid.uuid4().hex, "transfer_secret": secrets.token_hex(16)}
        prefilled = asyncio.create_task(self._prefill_params(prefill, body, names))
        try:
            found = self._streaming.get(prefill)
            if found is not None:
                params = {"do_remote_prefill": True, **found, **names}
                streamed = {**body, "kv_transfer_params": params}
                answer = await self._relay_unless(prefilled, request, prefill, decode, streamed)
                if answer is not None:
                    await self._confirm(prefill, prefilled)
                    return answer
            finished = {**body, "kv_transfer_params": await prefilled}
            return await self._relay(request, decode, finished)
        finally:
            prefilled.cancel()

    async def _confirm(self, url: str, prefilled: asyncio.Task[dict[str, Any] | None]) -> None:
        """Wait for what the prefill engine says of itself, once the client has its whole answer.

        A decode engine that does not reach it, since it was restarted, may compute a short prompt itself and be done
        before. Without a word from it the next request asks it first, and learns where it is.
        """
        await asyncio.wait({prefilled}, timeout=CONFIRM_S)
        if not prefilled.done() or prefilled.exception() is not None:
            self._streaming.pop(url, None)

    async def _relay_unless(
        self,
        prefilled: asyncio.Task[dict[str, Any] | None],
        request: web.Request,
        prefill: str,
        decode: str,
        body: dict[str, Any],
    ) -> web.StreamResponse | None:
        """The decode engine's answer; None if it finds no prefill engine where one was.

        Raises:
            ApiError: either engine fails before the answer begins.
        """
        opened = asyncio.create_task(self._post(decode, body))
        try:
            await asyncio.wait({opened, prefilled}, return_when=asyncio.FIRST_COMPLETED)
            if not opened.done():
                await prefilled  # raises if it failed; otherwise the decode engine answers soon
            upstream = await opened
        except BaseException:
            opened.cancel()
            raise
        async with upstream:
            if upstream.status == 200:
                return await self._pass_on(request, upstream)
            text = await upstream.text()
        if upstream.status >= 500:
            # a prefill engine that was restarted has another address: its next answer says which
            self._streaming.pop(prefill, None)
        error = _error_of(text)
        cause = str(error.get("cause", ""))
        if cause == UNREACHABLE:
            return None
        raise ApiError(upstream.status, f"decode: {error.get('message', text)}", cause)

    async def _prefill_params(
        self, url: str, body: dict[str, Any], names: dict[str, str]
    ) -> dict[str, Any] | None:
        prefill_body = {
            **body,
            "max_tokens": 1,
            "n": 1,
            "stream": False,
            "kv_transfer_params": {**REMOTE_DECODE_PARAMS, **names},
        }
        try:
            posted = await self._post(url, prefill_body)
        except ApiError:
            self._streaming.pop(url, None)  # another one may take its place
            raise
        async with posted as response:
            try:
                answer: dict[str, Any] = await response.json()
            except (TimeoutError, aiohttp.ClientError) as error:
                raise ApiError(502, f"{url} broke off its answer: {error!r}") from error
            if response.status != 200:
                message = answer.get("error", {}).get("message", "no reason given")
                raise ApiError(response.status, f"prefill: {message}")
        params: dict[str, Any] | None = answer.get("kv_transfer_params")
        self._learn(url, params or {}, names["transfer_id"])
        return params

    def _learn(self, url: str, params: dict[str, Any], transfer_id: str) -> None:
        """An engine that streams answers with the name that it was given."""
        name, _, rest = str(params.get("remote_request_id")).partition("|")
        if name != transfer_id:
            self._streaming.pop(url, None)
            return
        keys = ("remote_engine_id", "remote_host", "remote_port")
        address = {key: params[key] for key in keys}
        self._streaming[url] = {**address, "remote_public_key": rest.split("|")[1]}

    async def _relay(
        self, request: web.Request, url: str, body: dict[str, Any]
    ) -> web.StreamResponse:
        async with await self._post(url, body) as upstream:
            return await self._pass_on(request, upstream)

    async def _pass_on(
        self, request: web.Request, upstream: aiohttp.ClientResponse
    ) -> web.StreamResponse:
        response = web.StreamResponse(
            status=upstream.status, headers={"Content-Type": upstream.content_type}
        )
        await response.prepare(request)
        try:
            async for chunk in upstream.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
        except (TimeoutError, aiohttp.ClientError, ConnectionError) as error:
            # the status is out: a broken connection is the one way left to say that it ended early
            logger.warning("stream from %s broke off: %r", upstream.url, error)
            if request.transport is not None:
                request.transport.abort()
        return response

    async def _post(self, url: str, body: dict[str, Any]) -> aiohttp.ClientResponse:
        try:
            return await self._session.post(f"{url}/v1/completions", json=body)
        except (TimeoutError, aiohttp.ClientError) as error:
            raise _unanswered(url, error) from error


async def health(request: web.Request) -> web.Response:
    """GET /health: the router itself; its engines have their own."""
    return web.json_response({"status": "ok"})


def _error_of(body: str) -> dict[str, Any]:
    """The error object of an answer; empty if it is something else."""
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return {}
    return error if isinstance(error, dict) else {}


def _unanswered(url: str, error: Exception) -> ApiError:
    """Why a server did not answer, in words that do not blame it for what the router lacks."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return ApiError(503, f"the router has no file descriptor left, its limit is {limit}")
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return ApiError(502, f"{url} did not answer: no connection within {CONNECT_TIMEOUT_S:g} s")
    if isinstance(error, TimeoutError):
        return ApiError(504, f"{url} did not answer within {UPSTREAM_TIMEOUT_S:g} s")
    return ApiError(502, f"{url} did not answer: {str(error) or type(error).__name__}")


def open_session() -> aiohttp.ClientSession:
    """A session with as many connections as there are requests: a request that waits for a connection of another one
    could not be told from one that its engine does not answer, and engines asked at once would wait for each other.
    """
    # each request takes three: its client's, and one to either engine
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    timeout = aiohttp.ClientTimeout(total=UPSTREAM_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0, socket_factory=_watched_socket)
    return aiohttp.ClientSession(timeout=timeout, connector=connector)


def _watched_socket(address: tuple[Any, ...]) -> socket.socket:
    """A socket whose connection ends when the other host is gone: by itself, TCP would wait for an answer for ever."""
    opened = socket.socket(*address[:3])
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, 2),
        (socket.TCP_KEEPINTVL, 2),
        (socket.TCP_USER_TIMEOUT, SILENT_HOST_S * 1000),
    ):
        opened.setsockopt(socket.IPPROTO_TCP, option, value)
    return opened


async def serve(arguments: argparse.Namespace) -> None:
    """Route until cancelled."""
    async with open_session() as session:
        router = Router(session, arguments.prefill, arguments.decode)
        app = web.Application(middlewares=[error_middleware], client_max_size=MAX_BODY_BYTES)
        app.add_routes(
            [web.post("/v1/completions", router.completions), web.get("/health", health)]
        )
        await run_app(app, arguments.host, arguments.port, arguments.port_file)


def main() -> int:
    """Entry point of the router process."""
    parser = argparse.ArgumentParser(prog="minillm router")
    add_server_arguments(parser)
    parser.add_argument("--prefill", action="append", required=True, help="base URL; repeatable")
    parser.add_argument("--decode", action="append", required=True, help="base URL; repeatable")
    arguments = parser.parse_args()
    die_with_parent(signal.SIGTERM)
    log_to_stderr()
    run_until_signal(serve(arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
