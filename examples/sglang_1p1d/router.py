"""The least that a router for two SGLang engines does: ask both at once, with a room that nobody guesses.

    python router.py --port 8000 --prefill http://127.0.0.1:8001 --bootstrap-port 8998 --decode http://127.0.0.1:8002

The room names the transfer, and the transfer's secret is made from it: it must be drawn anew for every request, by a
generator that cannot be predicted. The prefill engine answers with the first token alone, which the decode engine
has too: the decode engine's answer is passed on, as it comes.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web

PATHS = ("/generate", "/v1/completions", "/v1/chat/completions")
ROOM_BITS = 63
CONNECT_TIMEOUT_S = 10.0
TOTAL_TIMEOUT_S = 600.0
OK = 200


class Router:
    """Between one prefill and one decode engine.

    Args:
        prefill: Its base URL; its host is where the decode engine finds the directory service too.
        bootstrap_port: Its `--disaggregation-bootstrap-port`.
        decode: Its base URL.
    """

    def __init__(self, prefill: str, bootstrap_port: int, decode: str) -> None:
        self._prefill, self._decode = prefill, decode
        self._where = {
            "bootstrap_host": urlsplit(prefill).hostname,
            "bootstrap_port": bootstrap_port,
        }

    def app(self) -> web.Application:
        """The server."""
        app = web.Application()
        app.cleanup_ctx.append(self._open)
        app.add_routes([web.post(path, self._ask_both) for path in PATHS])
        app.router.add_get("/health", _health)
        return app

    async def _open(self, app: web.Application) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=TOTAL_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as self._session:
            yield

    async def _ask_both(self, request: web.Request) -> web.StreamResponse:
        body = {**await request.json(), **self._where}
        body["bootstrap_room"] = secrets.randbits(ROOM_BITS)
        prefilled = asyncio.create_task(self._read(self._prefill + request.path, body))
        try:
            async with self._session.post(self._decode + request.path, json=body) as upstream:
                response = await _pass_on(request, upstream)
            if upstream.status == OK:
                # it ends a moment later; given up now, it would count as aborted
                await asyncio.wait([prefilled])
            return response
        except (aiohttp.ClientError, TimeoutError) as error:
            raise web.HTTPBadGateway(text=f"{self._decode} did not answer: {error}") from error
        finally:
            prefilled.cancel()

    async def _read(self, url: str, body: dict[str, Any]) -> None:
        """The answer has nothing that the decode engine's lacks, errors included."""
        with suppress(aiohttp.ClientError, TimeoutError):
            async with self._session.post(url, json=body) as answer:
                await answer.read()


async def _pass_on(request: web.Request, upstream: aiohttp.ClientResponse) -> web.StreamResponse:
    response = web.StreamResponse(
        status=upstream.status, headers={"Content-Type": upstream.headers["Content-Type"]}
    )
    await response.prepare(request)
    async for chunk in upstream.content.iter_any():
        await response.write(chunk)
    await response.write_eof()
    return response


async def _health(_: web.Request) -> web.Response:
    return web.Response()


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--prefill", required=True, help="base URL")
    parser.add_argument("--bootstrap-port", type=int, default=8998)
    parser.add_argument("--decode", required=True, help="base URL")
    arguments = parser.parse_args()
    router = Router(arguments.prefill, arguments.bootstrap_port, arguments.decode)
    web.run_app(router.app(), host=arguments.host, port=arguments.port, print=None)


if __name__ == "__main__":
    main()
