"""`python -m minillm.router`: each completion goes to a prefill engine, and to a decode engine with its params.

It is the router of `vllm_1p1d`, except that it uses two properties of minillm's engines: a decode engine names the
cause of a failed load, and a prefill engine ends its answer within seconds of the decode engine's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from typing import Any

import aiohttp
from aiohttp import web

from kvconnector.errors import PeerUnreachableError
from minillm.http_api import ApiError, error_middleware
from minillm.http_serving import add_server_arguments, run_app
from minillm.processes import die_with_parent, log_to_stderr, run_until_signal
from routing import OK, Asked, Begun, Failed, Prefilled
from vllm_1p1d import router

UNREACHABLE = PeerUnreachableError.__name__
"""The cause in a decode engine's answer if no prefill engine listens at the known address."""
CONFIRM_S = 5.0
"""Time for a prefill engine to end its answer after the decode engine's has ended."""


class Router(router.Router):
    """Round robin over prefill and over decode servers, given by their base URLs."""

    def app(self) -> web.Application:
        """Return the HTTP application, whose errors are OpenAI's objects."""
        app = super().app()
        app.middlewares.append(error_middleware)
        return app

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Handle POST as the other router does. The texts of its own errors become OpenAI's objects, too."""
        answer = await super().complete(request)
        if (
            isinstance(answer, web.Response)
            and answer.status != OK
            and answer.content_type == "text/plain"
        ):
            return ApiError(answer.status, answer.text or answer.reason or "").response()
        return answer

    async def _streamed(
        self,
        asked: Asked,
        begun: asyncio.Task[Begun],
        prefilled: asyncio.Task[Prefilled],
        prefill: str,
    ) -> web.StreamResponse | None:
        """Return the decode engine's answer, None if it is lost or finds no prefill engine at the known address.

        Raises:
            Failed: the decode engine fails otherwise.
        """
        try:
            upstream, first = await self._first_of(prefilled, begun)
        except Failed:
            return None
        async with upstream:
            if upstream.status == OK:
                answer = await self._pass_on(asked.request, upstream, first)
                await self._confirm(prefill, prefilled)
                return answer
            content = first + await upstream.read()
        if upstream.status >= 500:
            # a prefill engine that was restarted has another address: its next answer says which
            self._streaming.pop(prefill, None)
        error = _error_of(content.decode(errors="replace"))
        cause = str(error.get("cause", ""))
        if cause == UNREACHABLE:
            return None
        failed = Failed.of(upstream, content)
        if error:
            text = f"decode: {error.get('message', '')}"
            failed.answer = ApiError(upstream.status, text, cause).response()
        raise failed

    async def _pass_on(
        self, request: web.Request, upstream: aiohttp.ClientResponse, first: bytes
    ) -> web.StreamResponse:
        try:
            return await super()._pass_on(request, upstream, first)
        except (TimeoutError, aiohttp.ClientError, ConnectionError):
            # the status is sent: only a broken connection can still say that it ended early
            if request.transport is not None:
                request.transport.abort()
            raise

    async def _confirm(self, url: str, prefilled: asyncio.Task[Prefilled]) -> None:
        """Wait for the prefill engine's answer, which has its address, after the client has its whole answer.

        A decode engine that cannot reach a restarted prefill engine may compute a short prompt itself and be done
        first. If the prefill engine does not answer, the next request asks it first, and learns its address.
        """
        await asyncio.wait({prefilled}, timeout=CONFIRM_S)
        if not prefilled.done() or prefilled.exception() is not None:
            self._streaming.pop(url, None)


def _error_of(body: str) -> dict[str, Any]:
    """Return the error object of an answer; empty if it is something else."""
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return {}
    return error if isinstance(error, dict) else {}


def main() -> int:
    """Entry point of the router process."""
    parser = argparse.ArgumentParser(prog="minillm router")
    add_server_arguments(parser)
    parser.add_argument("--prefill", action="append", required=True, help="base URL; repeatable")
    parser.add_argument("--decode", action="append", required=True, help="base URL; repeatable")
    arguments = parser.parse_args()
    die_with_parent(signal.SIGTERM)
    log_to_stderr()
    app = Router(arguments.prefill, arguments.decode).app()
    run_until_signal(run_app(app, arguments.host, arguments.port, arguments.port_file))
    return 0


if __name__ == "__main__":
    sys.exit(main())
