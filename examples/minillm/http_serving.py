"""Options of minillm's HTTP servers, and the code that serves: each listens and writes its port to a file."""

from __future__ import annotations

import argparse
import asyncio
import logging
from pathlib import Path

from aiohttp import web

logger = logging.getLogger(__name__)

BACKLOG = 4096
"""Connections that may wait to be accepted when many requests arrive at once. The kernel has its own limit."""


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that every HTTP server of minillm has."""
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free port")
    parser.add_argument("--port-file", type=Path, help="write the bound port here once listening")


async def run_app(app: web.Application, host: str, port: int, port_file: Path | None) -> None:
    """Serve until cancelled. The bound port is written to `port_file`, completely or not at all."""
    # handler_cancellation: a client that goes away cancels its handler, which aborts its request
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port, backlog=BACKLOG).start()
        bound = runner.addresses[0][1]
        logger.info("listening on http://%s:%d", host, bound)
        if port_file is not None:
            partial = port_file.with_suffix(".partial")
            partial.write_text(str(bound))
            partial.replace(port_file)
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()
