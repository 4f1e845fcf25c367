"""A client that leaves takes its requests from both engines: each router, as a process, ends what it has asked them."""

import asyncio
import os
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import ClientError, ClientSession, web

from tests.support.ports import free_ports

EXAMPLES = Path(__file__).parents[3] / "examples"
TIMEOUT_S = 60.0
VLLM = "/v1/completions"
ROUTERS = {
    "vllm": ([str(EXAMPLES / "vllm_1p1d" / "router.py")], VLLM),
    "minillm": (["-m", "minillm.router"], VLLM),
    "sglang": ([str(EXAMPLES / "sglang_1p1d" / "router.py")], "/generate"),
    "mixed": ([str(EXAMPLES / "mixed_1p1d" / "router.py")], VLLM),
}


class Engine:
    """A stand-in that works on each request for ever, or answers it at once with an offer if it `is_quick`."""

    def __init__(self, *, is_quick=False):
        self.is_quick = is_quick
        self.asked, self.left = asyncio.Event(), asyncio.Event()

    async def complete(self, request):
        await request.read()
        self.asked.set()
        if self.is_quick:
            return web.json_response({"kv_transfer_params": {"remote_request_id": "r"}})
        try:
            await asyncio.Event().wait()
        finally:
            self.left.set()

    @asynccontextmanager
    async def serving(self):
        """The URL."""
        app = web.Application()
        app.router.add_post("/{path:.*}", self.complete)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


@asynccontextmanager
async def running(command, prefill, decode):
    """The URL of a router process between two engines."""
    port = free_ports()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *command,
        *("--port", str(port), "--prefill", prefill, "--decode", decode),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        await process.wait()


async def healthy(session, url):
    while True:
        try:
            async with session.get(f"{url}/health") as answer:
                assert answer.status == 200
                return
        except ClientError:
            await asyncio.sleep(0.05)


async def leave(name, *, while_decoding):
    """Send a request, and leave once the engine that should work on it does. Returns when it works no longer."""
    command, path = ROUTERS[name]
    asks_both = name == "sglang"
    prefill, decode = Engine(is_quick=while_decoding), Engine()
    working = {"prefill": [prefill], "decode": [decode]}["decode" if while_decoding else "prefill"]
    if asks_both:
        working = [prefill, decode]
    async with AsyncExitStack() as stack:
        kind = "vllm=" if name == "mixed" else ""
        urls = [
            kind + await stack.enter_async_context(each.serving()) for each in (prefill, decode)
        ]
        router = await stack.enter_async_context(running(command, *urls))
        session = await stack.enter_async_context(ClientSession())
        await healthy(session, router)
        client = asyncio.create_task(session.post(router + path, json={"prompt": "p"}))
        for engine in working:
            await engine.asked.wait()
        client.cancel()
        for engine in working:
            await engine.left.wait()
        # a router that goes on would ask the next engine now
        assert while_decoding or asks_both or not decode.asked.is_set()
        await healthy(session, router)


@pytest.mark.parametrize(
    "name, while_decoding",
    [
        ("vllm", False),
        ("vllm", True),
        ("minillm", False),
        ("minillm", True),
        ("sglang", False),
        ("mixed", False),
        ("mixed", True),
    ],
)
def test_a_client_that_leaves_ends_its_requests_at_the_engines(name, while_decoding):
    asyncio.run(asyncio.wait_for(leave(name, while_decoding=while_decoding), TIMEOUT_S))
