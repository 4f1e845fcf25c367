"""A minimal router for two SGLang engines: it asks both at once, with a room that cannot be guessed.

    python router.py --port 8000 --prefill http://127.0.0.1:8001 --bootstrap-port 8998 --decode http://127.0.0.1:8002

Both engines derive the transfer's name and secret from the room, so every request needs a new one from a generator that
cannot be predicted. The prefill engine answers with the first token only, which the decode engine has too. So the
router streams the decode engine's answer to the client.

A failure before the client has got anything is tried again with a new room, where the failure's text says. SGLang sends
failures of streams as their first event. Engines after the first of each kind are for that, and for more requests.
"""

from __future__ import annotations

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
import routing
from routing import Asked, Prefilled

ROOM_BITS = 63


class Router(routing.Router):
    """Routes requests round robin over prefill and decode engines.

    Args:
        prefill: Base URLs of the prefill engines. Each one's directory service must be on the same host.
        bootstrap_ports: The `--disaggregation-bootstrap-port` of each prefill engine.
        decode: Base URLs of the decode engines.
    """

    def __init__(self, prefill: list[str], bootstrap_ports: list[int], decode: list[str]) -> None:
        super().__init__(prefill, decode)
        self._where = {
            url: directory_of(url, port) for url, port in zip(prefill, bootstrap_ports, strict=True)
        }

    def app(self) -> web.Application:
        """Return the HTTP application."""
        app = super().app()
        app.router.add_post("/generate", self.complete)
        return app

    async def _tried(self, asked: Asked, prefill: str, decode: str) -> web.StreamResponse:
        body = {**asked.body, **self._where[prefill], "bootstrap_room": new_room()}
        return await self._from_both(
            asked,
            asyncio.create_task(self._read(prefill, asked, body)),
            asyncio.create_task(self._begun(decode, asked, body)),
        )

    async def _read(self, url: str, asked: Asked, body: dict[str, Any]) -> Prefilled:
        """Send the request and discard the answer: the decode engine's has all of it, errors included.

        Raises:
            Failed: nothing answers at all.
        """
        answer = await self._post(url, asked, body)
        with suppress(aiohttp.ClientError, TimeoutError):
            async with answer:
                await answer.read()
        return Prefilled()


def new_room() -> int:
    """Return a number for a transfer that nobody can guess. It is not 0, which for SGLang means none."""
    return secrets.randbits(ROOM_BITS) or 1


def directory_of(url: str, bootstrap_port: int) -> dict[str, Any]:
    """Return where a prefill engine's directory service is, as a request names it."""
    return {"bootstrap_host": urlsplit(url).hostname, "bootstrap_port": bootstrap_port}


def main() -> None:
    """Serve until interrupted."""
    parser = routing.parser_of(__doc__)
    parser.add_argument(
        "--bootstrap-port", action="append", type=int, help="of each prefill engine; default 8998"
    )
    arguments = parser.parse_args()
    ports = arguments.bootstrap_port or [8998] * len(arguments.prefill)
    if len(ports) != len(arguments.prefill):
        parser.error("each --prefill needs its --bootstrap-port")
    app = Router(arguments.prefill, ports, arguments.decode).app()
    routing.serve(app, arguments.host, arguments.port)


if __name__ == "__main__":
    main()
