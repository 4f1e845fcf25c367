"""minillm's router, like that of vLLM's example, takes more requests at once than an HTTP client has connections."""

import asyncio
import errno
import resource
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

import routing
from minillm.http_serving import BACKLOG
from minillm.router import Router
from tests.unit.minillm.http_fakes import app_of, streamed_offer

NUM_REQUESTS = 200
FEW_FILES = 512  # each request takes both ends of three connections
TIMEOUT_S = 100.0


class Engines:
    """A prefill and a decode engine that stream, and answer once all requests have reached both of them."""

    def __init__(self):
        self.expected = 1
        self.asked = {"prefill": 0, "decode": 0}
        self.all_asked = asyncio.Event()

    async def _ask(self, engine, is_last):
        self.asked[engine] += 1
        if is_last(self.asked):
            self.all_asked.set()
        await self.all_asked.wait()

    async def prefill(self, request):
        names = (await request.json())["kv_transfer_params"]
        await self._ask("prefill", lambda asked: set(asked.values()) in ({1, 0}, {self.expected}))
        return web.json_response({"kv_transfer_params": streamed_offer(names)})

    async def decode(self, request):
        body = await request.json()
        await self._ask("decode", lambda asked: set(asked.values()) == {self.expected})
        return web.json_response({"prompt": body["prompt"]})


@asynccontextmanager
async def serving(app):
    """The URL of a server of `app`."""
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=BACKLOG).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def ask(session, url, prompt):
    async with session.post(f"{url}/v1/completions", json={"prompt": prompt}) as response:
        return response.status, await response.text()


@pytest.fixture
def few_files():
    """A process that may open few files, unless it asks for more."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW_FILES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("few_files")
def test_a_burst_of_requests_reaches_both_engines_at_once():
    async def check():
        engines = Engines()
        async with AsyncExitStack() as stack:
            apps = app_of(engines.prefill), app_of(engines.decode)
            urls = [await stack.enter_async_context(serving(app)) for app in apps]
            app = Router(*([url] for url in urls)).app()
            url = await stack.enter_async_context(serving(app))
            connector = aiohttp.TCPConnector(limit=0)
            session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
            # its answer shows the router that the prefill engine streams
            assert (await ask(session, url, 0))[0] == 200
            engines.expected += NUM_REQUESTS
            engines.all_asked.clear()
            answers = await asyncio.gather(
                *(ask(session, url, number) for number in range(1, NUM_REQUESTS + 1))
            )
        wanted = [(200, f'{{"prompt": {number}}}') for number in range(1, NUM_REQUESTS + 1)]
        assert answers == wanted

    asyncio.run(asyncio.wait_for(check(), TIMEOUT_S))


@pytest.mark.parametrize(
    "error,status,words,retry",
    [
        (
            OSError(errno.EMFILE, "Too many open files"),
            503,
            "the router has no file descriptor left",
            "never",
        ),
        (
            aiohttp.ConnectionTimeoutError(),
            502,
            "http://d did not answer: no connection within 10 s",
            "other",
        ),
        (TimeoutError(), 504, "http://d did not answer within", "never"),
        (
            aiohttp.ServerDisconnectedError(),
            502,
            "http://d did not answer: Server disconnected",
            "other",
        ),
        (ConnectionResetError(), 502, "http://d did not answer: ConnectionResetError", "other"),
    ],
)
def test_a_failure_is_worded_by_its_cause(error, status, words, retry):
    failed = routing._unanswered("http://d", error)
    assert failed.answer.status == status
    assert words in failed.answer.text
    assert failed.retry == retry
