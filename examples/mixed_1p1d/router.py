"""A router for prefill and decode engines of two kinds, vLLM and SGLang, in any combination.

    python router.py --port 8000 --prefill vllm=http://127.0.0.1:8001 --decode sglang=http://127.0.0.1:8002

An SGLang prefill engine also needs its `--bootstrap-port`. The router draws a room for each request, and asks both
engines at once. SGLang's engines derive the transfer's name and secret from the room, and vLLM's get both from the
router. A decode engine of the other kind must know where the prefill engine's directory service is. vLLM's prefill
engine says that in its answers, so the first request waits for one; SGLang's registry is asked for it. A pair of
vLLM's engines is served as by the router for vLLM.

All engines serve a model under one name (`--served-model-name`), and only requests of OpenAI's API fit both kinds.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that any directory may be the current one
import routing
from kvconnector.integrations.sglang.registry import route_of
from kvconnector.integrations.sglang.settings import prefill_engine_id
from kvconnector.integrations.sglang.transfers import transfer_names
from routing import Asked, Failed, Prefilled
from sglang_1p1d import router as sglang
from vllm_1p1d import router as vllm

KINDS = VLLM, SGLANG = "vllm", "sglang"
SHAPE = -1
"""The number with which a registry is asked for its server's shape instead of one rank."""


class Server(NamedTuple):
    """An engine's kind and base URL. For SGLang's prefill engines also the bootstrap port, and the public key of the
    control channel ("" without keys).
    """

    kind: str
    url: str
    bootstrap_port: int = 0
    public_key: str = ""


class Router(vllm.Router):
    """Routes requests round robin over prefill and decode engines."""

    def __init__(self, prefill: list[Server], decode: list[Server]) -> None:
        super().__init__([each.url for each in prefill], [each.url for each in decode])
        self._servers = {each.url: each for each in (*prefill, *decode)}
        self._shapes: dict[str, tuple[int, bool]] = {}
        """By URL of SGLang's prefill servers, the number of data-parallel ranks and whether these follow from rooms."""
        self._directories: dict[tuple[str, int], dict[str, Any]] = {}

    async def _tried(self, asked: Asked, prefill: str, decode: str) -> web.StreamResponse:
        kinds = self._servers[prefill].kind, self._servers[decode].kind
        if kinds == (VLLM, VLLM):
            return await super()._tried(asked, prefill, decode)
        room = sglang.new_room()
        name, secret = transfer_names(room)
        names = {"transfer_id": name, "transfer_secret": secret}
        directory = sglang.directory_of(prefill, self._servers[prefill].bootstrap_port)
        of_room = {**asked.body, **directory, "bootstrap_room": room}
        known = self._streaming.get(prefill)
        prefilled = asyncio.create_task(
            self._prefilled(prefill, asked, names, known)
            if kinds[0] == VLLM
            else self._computed(prefill, asked, of_room)
        )
        try:
            full = of_room
            if kinds == (VLLM, SGLANG):
                known = known or await self._first_met(prefill, prefilled)
                host = f"{known['remote_engine_id']}@{_bracketed(known['remote_host'])}"
                full = {**of_room, "bootstrap_host": host, "bootstrap_port": known["remote_port"]}
            elif kinds == (SGLANG, VLLM):
                address = await self._directory_of(prefill, room)
                params = vllm.remote_prefill(address, names)
                full = {**asked.body, "kv_transfer_params": params}
            begun = asyncio.create_task(self._begun(decode, asked, full))
            return await self._from_both(asked, prefilled, begun)
        except Failed:
            self._directories.clear()  # the engines may have been restarted
            raise
        finally:
            prefilled.cancel()

    async def _computed(self, url: str, asked: Asked, body: dict[str, Any]) -> Prefilled:
        """Have SGLang's prefill engine compute a prompt. It answers with the first token when that was read.

        Raises:
            Failed: it does not answer, or refuses what a decode engine of the other kind may accept.
        """
        short = {**body, "stream": False}
        short.pop("stream_options", None)
        await self._whole(url, asked, short)
        return Prefilled()

    async def _first_met(self, url: str, prefilled: asyncio.Task[Any]) -> dict[str, Any]:
        """Wait for the first answer of vLLM's prefill engine, which says where its directory service is.

        Raises:
            Failed: the prefill engine has failed, or does not take names of transfers.
        """
        await prefilled
        known = self._streaming.get(url)
        if known is None:
            text = f"{url} takes no names of transfers: it needs kvconnector, with stream=true"
            raise Failed.because(text)
        return known

    async def _directory_of(self, url: str, room: int) -> dict[str, Any]:
        """Return the address, in the form that vLLM's decode engine takes, of the engine of SGLang's prefill server
        that gets a room.

        Raises:
            Failed: the server's registry does not say it.
        """
        server = self._servers[url]
        host = urlsplit(url).hostname or ""
        registry = f"http://{_bracketed(host)}:{server.bootstrap_port}"
        try:
            if url not in self._shapes:
                shape = await self._asked(registry + route_of(SHAPE, SHAPE))
                follows = bool(shape["follow_bootstrap_room"])
                self._shapes[url] = int(shape["dp_size"]), follows
            dp_size, follows_rooms = self._shapes[url]
            if dp_size > 1 and not follows_rooms:
                text = f"{url} does not share requests by their rooms: --load-balance-method auto"
                raise Failed.because(text)
            rank = room % dp_size
            if (url, rank) not in self._directories:
                place = await self._asked(registry + route_of(rank, 0))
                self._directories[url, rank] = {
                    "remote_engine_id": prefill_engine_id(server.bootstrap_port, rank, dp_size),
                    "remote_host": str(place["rank_ip"]).strip("[]"),
                    "remote_port": int(place["rank_port"]),
                    "remote_public_key": server.public_key,
                }
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as error:
            text = f"{registry} does not say where its engine is: {type(error).__name__}: {error}"
            raise Failed.because(text) from error
        return self._directories[url, rank]

    async def _asked(self, url: str) -> Any:
        async with self._session.get(url, raise_for_status=True) as answer:
            return await answer.json(content_type=None)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def servers(
    given: list[str], bootstrap_ports: list[int] | None = None, keys: list[str] | None = None
) -> list[Server]:
    """Return the engines that are named as `KIND=URL`. Ports and keys belong to those of SGLang, in their order.

    Raises:
        ValueError: one is named otherwise, or there are other numbers of ports or keys than engines of SGLang.
    """
    split = [each.partition("=")[::2] for each in given]
    if bad := [kind for kind, url in split if kind not in KINDS or not url]:
        raise ValueError(f"an engine is named as vllm=URL or sglang=URL, not {bad[0]}")
    number = sum(kind == SGLANG for kind, _ in split)
    ports = bootstrap_ports or [8998] * number
    own_keys = keys or [""] * number
    if len(ports) != number or len(own_keys) != number:
        raise ValueError(
            f"{number} prefill engines of SGLang need as many bootstrap ports and keys"
        )
    left = iter(zip(ports, own_keys, strict=True))
    return [Server(kind, url, *(next(left) if kind == SGLANG else ())) for kind, url in split]


def main() -> None:
    """Serve until interrupted."""
    parser = routing.parser_of(__doc__, "KIND=URL")
    parser.add_argument(
        "--bootstrap-port", action="append", type=int, help="of each SGLang prefill; default 8998"
    )
    parser.add_argument(
        "--public-key", action="append", help="of each SGLang prefill engine, if keys are used"
    )
    arguments = parser.parse_args()
    try:
        prefill = servers(arguments.prefill, arguments.bootstrap_port, arguments.public_key)
        decode = servers(arguments.decode)
    except ValueError as error:
        parser.error(str(error))
    app = Router(prefill, decode).app()
    routing.serve(app, arguments.host, arguments.port)


if __name__ == "__main__":
    main()
