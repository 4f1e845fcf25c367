"""A router: each request goes to a prefill engine, then with its `kv_transfer_params` to a decode engine.

Nothing in it is kvconnector's own: any router that works with NixlConnector does.
"""

from __future__ import annotations

import argparse
import itertools
import json
import socket
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web

TIMEOUT = aiohttp.ClientTimeout(total=600, connect=10)
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


class Router:
    """Round robin over both kinds of engines, given by their base URLs."""

    def __init__(self, prefill_urls: list[str], decode_urls: list[str]) -> None:
        self._prefill = itertools.cycle(prefill_urls)
        self._decode = itertools.cycle(decode_urls)
        self._session: aiohttp.ClientSession | None = None

    def app(self) -> web.Application:
        """The HTTP application."""
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
        connector = aiohttp.TCPConnector(socket_factory=_watched_socket)
        async with aiohttp.ClientSession(timeout=TIMEOUT, connector=connector) as self._session:
            yield

    async def health(self, request: web.Request) -> web.Response:
        """GET /health: the router itself."""
        return web.json_response({"status": "ok"})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """POST: prefill with one token, then decode; the decode engine's answer is passed on as it comes."""
        try:
            body = await request.json()
        except json.JSONDecodeError as error:
            raise web.HTTPBadRequest(text=f"the body is not JSON: {error}") from error
        headers = {"X-Request-Id": request.headers.get("X-Request-Id", uuid.uuid4().hex)}
        if "Authorization" in request.headers:
            headers["Authorization"] = request.headers["Authorization"]
        short = {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": REMOTE_DECODE}
        # the prompt is prefilled once, however many completions are asked
        for option in ("stream_options", "n"):
            short.pop(option, None)
        if "max_completion_tokens" in body:
            short["max_completion_tokens"] = 1
        async with self._post(next(self._prefill) + request.path, short, headers) as answer:
            if answer.status != 200:
                return web.Response(
                    status=answer.status, body=await answer.read(), content_type=answer.content_type
                )
            params = (await answer.json()).get("kv_transfer_params")
        full = {**body, "kv_transfer_params": params} if params else body
        return await self._relay(request, next(self._decode) + request.path, full, headers)

    async def _relay(
        self, request: web.Request, url: str, body: dict[str, Any], headers: dict[str, str]
    ) -> web.StreamResponse:
        async with self._post(url, body, headers) as answer:
            response = web.StreamResponse(
                status=answer.status, headers={"Content-Type": answer.headers["Content-Type"]}
            )
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response

    @asynccontextmanager
    async def _post(
        self, url: str, body: dict[str, Any], headers: dict[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        if self._session is None:
            raise web.HTTPServiceUnavailable(text="the router is not running")
        try:
            async with self._session.post(url, json=body, headers=headers) as response:
                yield response
        except (aiohttp.ClientError, TimeoutError) as error:
            raise web.HTTPBadGateway(text=f"{url} did not answer: {error!r}") from error


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--prefill", action="append", required=True, help="base URL; repeatable")
    parser.add_argument("--decode", action="append", required=True, help="base URL; repeatable")
    arguments = parser.parse_args()
    router = Router(arguments.prefill, arguments.decode)
    web.run_app(router.app(), host=arguments.host, port=arguments.port, print=None)


if __name__ == "__main__":
    main()
