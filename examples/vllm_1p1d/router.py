"""A router: it sends each request to a prefill engine, and then, with `kv_transfer_params`, to a decode engine.

Any router for NixlConnector will do. If possible, this one asks both engines at once, and the decode engine reads the
prompt's cache while it is computed. For that the router draws a name for the transfer. A prefill engine's answer to an
earlier request shows whether it accepts such names.

As long as the client has no token, a failure costs it only time. If a decode engine is lost, another one gets the same
`kv_transfer_params`, which are good until somebody has read the blocks or their lease has ended. Other failures say
where to send the request again, and then it is prefilled anew there.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from aiohttp import web

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that any directory may be the current one
import routing
from routing import Asked, Begun, Failed, Prefilled

REMOTE_DECODE: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class Router(routing.Router):
    """Routes requests round robin over prefill and decode engines, given by their base URLs."""

    def __init__(self, prefill_urls: list[str], decode_urls: list[str]) -> None:
        super().__init__(prefill_urls, decode_urls)
        self._streaming: dict[str, dict[str, Any]] = {}
        """By base URL, the address for decode engines of each prefill engine that accepts names of transfers."""

    async def _tried(self, asked: Asked, prefill: str, decode: str) -> web.StreamResponse:
        names = {"transfer_id": uuid.uuid4().hex, "transfer_secret": secrets.token_hex(16)}
        known = self._streaming.get(prefill)
        prefilled = asyncio.create_task(self._prefilled(prefill, asked, names, known))
        try:
            if known is not None:
                full = {**asked.body, "kv_transfer_params": remote_prefill(known, names)}
                begun = asyncio.create_task(self._begun(decode, asked, full))
                answer = await self._streamed(asked, begun, prefilled, prefill)
                if answer is not None:
                    return answer
            params = (await prefilled).params
            full = {**asked.body, "kv_transfer_params": params} if params else asked.body
            return await self._decoded(asked, full, decode)
        finally:
            prefilled.cancel()

    async def _decoded(self, asked: Asked, full: dict[str, Any], decode: str) -> web.StreamResponse:
        """Pass on a decode engine's answer. If it is lost, the next one gets the same parameters."""
        for number in range(1, self._num_decode + 1):
            try:
                begun = await self._begun(decode, asked, full)
                break
            except Failed:
                if number == self._num_decode:
                    raise
                decode = next(self._decode)
        return await self._passed_on(asked, begun)

    async def _streamed(
        self,
        asked: Asked,
        begun: asyncio.Task[Begun],
        prefilled: asyncio.Task[Prefilled],
        prefill: str,
    ) -> web.StreamResponse | None:
        """Return the decode engine's answer, or None if it has failed or waits in vain. What the prefill engine offers,
        if anything, then goes to a decode engine in a new request.
        """
        with suppress(Failed):
            return await self._passed_on(asked, await self._first_of(prefilled, begun))
        return None

    async def _prefilled(
        self, url: str, asked: Asked, names: dict[str, str], known: dict[str, Any] | None
    ) -> Prefilled:
        """Have a prefill engine compute a prompt. `known` is the address at which the decode engine waits, if it does.

        Raises:
            Failed: it does not answer, or with an error.
        """
        short = {**asked.body, "max_tokens": 1, "stream": False}
        # the prompt is prefilled once, however many completions are requested
        for option in ("stream_options", "n"):
            short.pop(option, None)
        if asked.body.get("min_tokens"):
            short["min_tokens"] = 1  # an engine refuses more than max_tokens
        if "max_completion_tokens" in asked.body:
            short["max_completion_tokens"] = 1
        short["kv_transfer_params"] = {**REMOTE_DECODE, **names}
        try:
            content = await self._whole(url, asked, short)
        except Failed as failed:
            if failed.is_unanswered:
                self._streaming.pop(url, None)  # another engine may be there next time
            raise
        params = json.loads(content).get("kv_transfer_params")
        self._learn(url, params or {}, names["transfer_id"])
        has_moved = known is not None and self._streaming.get(url) != known
        return Prefilled(params, has_moved)

    def _learn(self, url: str, params: dict[str, Any], transfer_id: str) -> None:
        """Remember an engine's address if it streams: its answer then has the transfer's name that it was sent."""
        name, _, rest = str(params.get("remote_request_id")).partition("|")
        self._streaming.pop(url, None)
        if name == transfer_id:
            keys = ("remote_engine_id", "remote_host", "remote_port")
            public_key = {"remote_public_key": rest.split("|")[1]}
            self._streaming[url] = {key: params[key] for key in keys} | public_key


def remote_prefill(address: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """Return parameters for a decode engine that reads a prompt while it is computed at an address."""
    return {"do_remote_prefill": True, **address, **names}


def main() -> None:
    """Serve until interrupted."""
    arguments = routing.parser_of(__doc__).parse_args()
    app = Router(arguments.prefill, arguments.decode).app()
    routing.serve(app, arguments.host, arguments.port)


if __name__ == "__main__":
    main()
