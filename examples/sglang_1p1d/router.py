"""A minimal router for two SGLang engines: it asks both at once, with a room that cannot be guessed.

    python router.py --port 8000 --prefill http://127.0.0.1:8001 --bootstrap-port 8998 --decode http://127.0.0.1:8002

Both engines derive the transfer's name and secret from the room, so every request needs a new one from a generator that
cannot be predicted. The prefill engine answers with the first token only, which the decode engine has too. So the
router streams the decode engine's answer to the client. The HTTP code is that of the router for vLLM.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that any directory may be the current one
from vllm_1p1d import router as vllm

ROOM_BITS = 63


class Router(vllm.Router):
    """Routes requests to one prefill and one decode engine.

    Args:
        prefill: The prefill engine's base URL. Its directory service must be on the same host.
        bootstrap_port: The prefill engine's `--disaggregation-bootstrap-port`.
        decode: The decode engine's base URL.
    """

    def __init__(self, prefill: str, bootstrap_port: int, decode: str) -> None:
        super().__init__([prefill], [decode])
        host = urlsplit(prefill).hostname
        self._where = {"bootstrap_host": host, "bootstrap_port": bootstrap_port}

    def app(self) -> web.Application:
        """Return the HTTP application."""
        app = super().app()
        app.router.add_post("/generate", self.complete)
        return app

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Handle POST: ask both engines, and stream the decode engine's answer to the client."""
        body = {**await vllm.body_of(request), **self._where}
        body["bootstrap_room"] = secrets.randbits(ROOM_BITS)
        prefilled = asyncio.create_task(self._read(next(self._prefill) + request.path, body))
        try:
            upstream, first = await self._begun(next(self._decode) + request.path, body, {})
            async with upstream:
                response = await self._pass_on(request, upstream, first)
            if upstream.status == vllm.OK:
                # it ends a moment later; cancelled now, it would count as aborted
                await asyncio.wait([prefilled])
            return response
        finally:
            prefilled.cancel()

    async def _read(self, url: str, body: dict[str, Any]) -> None:
        """Send the request and discard the answer: the decode engine's has all of it, errors included."""
        with suppress(aiohttp.ClientError, TimeoutError):
            async with self._session.post(url, json=body) as answer:
                await answer.read()


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--prefill", required=True, help="base URL")
    parser.add_argument("--bootstrap-port", type=int, default=8998)
    parser.add_argument("--decode", required=True, help="base URL")
    arguments = parser.parse_args()
    app = Router(arguments.prefill, arguments.bootstrap_port, arguments.decode).app()
    web.run_app(app, host=arguments.host, port=arguments.port, print=None, backlog=vllm.BACKLOG)


if __name__ == "__main__":
    main()
