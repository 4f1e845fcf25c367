"""A minimal router for two SGLang engines: it asks both at once, with a room that cannot be guessed.

    python router.py --port 8000 --prefill http://127.0.0.1:8001 --bootstrap-port 8998 --decode http://127.0.0.1:8002

Both engines derive the transfer's name and secret from the room, so every request needs a new one from a generator that
cannot be predicted. The prefill engine answers with the first token only, which the decode engine has too. So the
router streams the decode engine's answer to the client. The HTTP code is that of the router for vLLM.

A failure before the client has got anything is tried again with a new room, where the failure's text says. SGLang sends
failures of streams as their first event. Engines after the first of each kind are for that, and for more requests.
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
    """Routes requests round robin over prefill and decode engines.

    Args:
        prefill: Base URLs of the prefill engines. Each one's directory service must be on the same host.
        bootstrap_ports: The `--disaggregation-bootstrap-port` of each prefill engine.
        decode: Base URLs of the decode engines.
    """

    def __init__(self, prefill: list[str], bootstrap_ports: list[int], decode: list[str]) -> None:
        super().__init__(prefill, decode)
        self._where = {
            url: {"bootstrap_host": urlsplit(url).hostname, "bootstrap_port": port}
            for url, port in zip(prefill, bootstrap_ports, strict=True)
        }

    def app(self) -> web.Application:
        """Return the HTTP application."""
        app = super().app()
        app.router.add_post("/generate", self.complete)
        return app

    async def _tried(
        self,
        request: web.Request,
        body: dict[str, Any],
        headers: dict[str, str],
        prefill: str,
        decode: str,
    ) -> web.StreamResponse:
        """Ask both engines, and stream the decode engine's answer to the client."""
        room = {"bootstrap_room": secrets.randbits(ROOM_BITS)}
        body = {**body, **self._where[prefill], **room}
        prefilled = asyncio.create_task(self._read(prefill + request.path, body, headers))
        begun = asyncio.create_task(self._begun(decode + request.path, body, headers))
        try:
            await asyncio.wait({begun, prefilled}, return_when=asyncio.FIRST_COMPLETED)
            if prefilled.done():
                await prefilled  # a prefill engine that is gone is not waited for
            upstream, first = await begun
            async with upstream:
                if not vllm.Begun(upstream, first).is_good:
                    raise vllm.Failed.of(upstream, first + await upstream.read())
                response = await self._pass_on(request, upstream, first)
            # it ends a moment later; cancelled now, it would count as aborted
            await asyncio.wait([prefilled])
            return response
        finally:
            begun.cancel()
            prefilled.cancel()

    async def _read(self, url: str, body: dict[str, Any], headers: dict[str, str]) -> None:
        """Send the request and discard the answer: the decode engine's has all of it, errors included.

        Raises:
            Failed: nothing answers at all.
        """
        answer = await self._post(url, body, headers)
        with suppress(aiohttp.ClientError, TimeoutError):
            async with answer:
                await answer.read()


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--prefill", action="append", required=True, help="base URL; repeatable")
    parser.add_argument(
        "--bootstrap-port", action="append", type=int, help="of each prefill engine; default 8998"
    )
    parser.add_argument("--decode", action="append", required=True, help="base URL; repeatable")
    arguments = parser.parse_args()
    ports = arguments.bootstrap_port or [8998] * len(arguments.prefill)
    if len(ports) != len(arguments.prefill):
        parser.error("each --prefill needs its --bootstrap-port")
    app = Router(arguments.prefill, ports, arguments.decode).app()
    vllm.serve(app, arguments.host, arguments.port)


if __name__ == "__main__":
    main()
