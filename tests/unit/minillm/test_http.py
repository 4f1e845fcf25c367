"""The HTTP side: completions, streams, errors, disconnects, and the router's two hops."""

import asyncio
import logging
import re
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace

import aiohttp
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from kvconnector.errors import IncompatiblePeerError, LocalError
from minillm.client import CompletionError, complete
from minillm.config import EngineConfig
from minillm.http_api import ApiError
from minillm.http_serving import run_app
from minillm.messages import SampledToken
from minillm.processes import log_to_stderr
from minillm.request import RequestUpdate
from minillm.router import Router
from minillm.server import create_app
from minillm.transfer import LoadStats
from tests.unit.minillm.http_fakes import app_of, streamed_offer

TIMEOUT_S = 20.0
TRANSFER = {"bytes": 10, "seconds": 0.5, "path": "packed", "cached_tokens": 16, "loaded_tokens": 3}


class ScriptedEngine:
    """Continues every prompt with its last token, plus one each time; counts requests that clients broke off."""

    def __init__(self, *, error="", endless=False):
        self.config = EngineConfig(role="decode", engine_id="scripted")
        self.failure = None
        self.error = error
        self.endless = endless
        self.requests = []
        self.broken_off = asyncio.Event()
        self.scheduler = SimpleNamespace(transfer=SimpleNamespace(stats={}))

    async def generate(self, request):
        if not request.prompt:
            raise LocalError("a completion needs at least one prompt token")
        if request.kv_transfer_params == {"bad": 1}:
            raise IncompatiblePeerError("a different number of cache groups")
        if request.kv_transfer_params == {"bug": 1}:
            raise ZeroDivisionError
        self.requests.append(request)
        self.scheduler.transfer.stats[request.request_id] = msgspec.convert(TRANSFER, LoadStats)
        if self.error:
            yield RequestUpdate(
                request_id=request.request_id, finish_reason="error", error=self.error
            )
            return
        finished = False
        try:
            for index in range(request.max_tokens):
                finished = index + 1 == request.max_tokens and not self.endless
                for answer in range(request.num_answers):
                    yield RequestUpdate(
                        request_id=request.request_id,
                        answer=answer,
                        token=SampledToken(request.prompt[-1] + 1 + index + 10 * answer, -0.5),
                        finish_reason="length" if finished else None,
                        kv_transfer_params={"remote_port": 5} if finished else None,
                    )
            while self.endless:
                await asyncio.sleep(0.01)
        finally:
            if not finished:
                self.broken_off.set()


def ask(client_of, *bodies):
    """Send completion requests, as JSON or objects. Returns status and text of each answer."""

    async def run():
        answers = []
        async with client_of as client:
            for body in bodies:
                data = body if isinstance(body, str | bytes) else msgspec.json.encode(body)
                async with client.post("/v1/completions", data=data) as response:
                    answers.append((response.status, await response.text()))
        return answers

    return asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))


@asynccontextmanager
async def server_of(engine):
    """Make a client of a server over `engine`."""
    async with TestClient(TestServer(create_app(engine))) as client:
        yield client


def test_a_completion_carries_tokens_usage_and_transfer_fields():
    body = {"prompt": "añ", "max_tokens": 3, "return_token_ids": True, "logprobs": 1}
    ((_, text),) = ask(server_of(ScriptedEngine()), body)
    answer = msgspec.json.decode(text)
    (choice,) = answer["choices"]
    last = "añ".encode()[-1]  # a string stands for its bytes
    assert choice["token_ids"] == [last + 1, last + 2, last + 3]
    assert choice["logprobs"] == {"token_logprobs": [-0.5] * 3}
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 6
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert answer["kv_transfer_params"] == {"remote_port": 5}
    assert answer["kv_transfer_stats"] == TRANSFER


def test_every_answer_is_a_choice_of_its_own():
    body = {"prompt": [5], "max_tokens": 2, "return_token_ids": True, "n": 2, "stream": True}
    ((_, text),) = ask(server_of(ScriptedEngine()), body)
    lines = [line for line in text.split("\n\n") if line.startswith("data: {")]
    choices = [msgspec.json.decode(line[6:])["choices"][0] for line in lines]
    streamed = [(each["index"], each["token_ids"]) for each in choices]
    assert streamed == [(0, [6]), (1, [16]), (0, [7]), (1, [17])]


@pytest.mark.parametrize(
    "body,status,message",
    [
        ("{", 400, "invalid completion request"),
        ('{"kv_transfer_params": {"a": ' + "[" * 10_000, 400, "invalid completion request"),
        ('{"prompt": 3}', 400, "invalid completion request"),
        ('{"prompt": [1, 99999]}', 400, "outside the vocabulary"),
        ('{"prompt": [], "stream": true}', 400, "at least one prompt token"),
        ('{"prompt": [1], "temperature": 0.7}', 400, "greedy"),
        ('{"prompt": [1], "n": 0}', 400, "n must be"),
        ('{"prompt": [1], "n": 1000000000}', 400, "n must be"),
        ('{"prompt": [1], "kv_transfer_params": {"bad": 1}}', 400, "cache groups"),
        ('{"prompt": [1], "kv_transfer_params": {"bug": 1}}', 500, "internal error"),
    ],
)
def test_bad_requests_get_an_openai_error(body, status, message):
    ((found, text),) = ask(server_of(ScriptedEngine()), body)
    error = msgspec.json.decode(text)["error"]
    assert found == status
    assert message in error["message"]
    assert error["type"] == ("invalid_request_error" if status == 400 else "server_error")


@pytest.mark.parametrize("stream", [False, True])
def test_a_failed_transfer_is_a_server_error(stream):
    engine = ScriptedEngine(error="the lease expired")
    ((status, text),) = ask(server_of(engine), {"prompt": [1], "stream": stream})
    assert status == 502
    assert msgspec.json.decode(text)["error"]["message"] == "the lease expired"


def test_a_client_that_disconnects_aborts_its_request(tmp_path):
    """This client waits for the whole answer; in the integration tests clients leave streams."""

    async def check():
        engine = ScriptedEngine(endless=True)
        port_file = tmp_path / "port"
        app = create_app(engine)
        serving = asyncio.create_task(run_app(app, "127.0.0.1", 0, port_file))
        while not port_file.exists():
            await asyncio.sleep(0.01)
        url = f"http://127.0.0.1:{port_file.read_text()}/v1/completions"
        async with aiohttp.ClientSession() as session:
            post = asyncio.ensure_future(session.post(url, json={"prompt": [1]}))
            while not engine.requests:
                await asyncio.sleep(0.01)
            post.cancel()
            await engine.broken_off.wait()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    asyncio.run(asyncio.wait_for(check(), TIMEOUT_S))


@asynccontextmanager
async def router_between(first, second):
    """Start two servers and a router. Yields a client of the router."""
    async with first, second:
        urls = [[str(server.make_url("")).rstrip("/")] for server in (first, second)]
        async with TestClient(TestServer(Router(*urls).app())) as client:
            yield client


@asynccontextmanager
async def router_of(prefill, decode, *, is_decode_up=True):
    """Make a client of a router of servers with these handlers."""
    first, second = TestServer(app_of(prefill)), TestServer(app_of(decode))
    async with router_between(first, second) as client:
        if not is_decode_up:
            await second.close()
        yield client


async def prefill_well(request):
    return web.json_response({"kv_transfer_params": {"do_remote_prefill": True}})


async def break_off(request):
    """Be a decode server that is lost in the middle of an answer."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(b"data: one\n\n")
    request.transport.abort()
    return response


ASKED = {"prompt": [1], "stream": True}


def test_the_router_names_a_server_that_does_not_answer_in_openais_terms():
    ((status, text),) = ask(router_of(prefill_well, break_off, is_decode_up=False), ASKED)
    assert status == 502
    assert "did not answer" in msgspec.json.decode(text)["error"]["message"]


def test_a_stream_that_breaks_off_also_breaks_off_at_the_client():
    with pytest.raises(aiohttp.ClientError):
        ask(router_of(prefill_well, break_off), ASKED)


def test_the_client_reports_a_stream_that_ends_early():
    async def handler(request):
        response = web.StreamResponse()
        await response.prepare(request)
        return response

    async def check():
        async with TestClient(TestServer(app_of(handler))) as client:
            with pytest.raises(CompletionError, match="ended the stream after 0 tokens"):
                await complete(client.session, str(client.make_url("")).rstrip("/"), [5], 4)

    asyncio.run(check())


class StreamingEngines:
    """A prefill engine that streams at `port`, and a decode engine that finds it only there. After a restart elsewhere
    it `is_slow`: still computing when the decode engine answers.
    """

    def __init__(self, *, recomputes=False, is_slow=False):
        self.recomputes, self.is_slow = recomputes, is_slow
        self.port = 1
        self.refused = asyncio.Event()
        self.used_ports = []

    async def prefill(self, request):
        asked = (await request.json())["kv_transfer_params"]
        if self.is_slow and self.port > 1:
            await asyncio.wait_for(self.refused.wait(), TIMEOUT_S)
        return web.json_response({"kv_transfer_params": streamed_offer(asked, self.port)})

    async def decode(self, request):
        port = (await request.json())["kv_transfer_params"]["remote_port"]
        self.used_ports.append(port)
        if port == self.port:
            return web.json_response({})
        self.refused.set()
        if self.recomputes:
            return web.json_response({})
        return ApiError.of_load("PeerUnreachableError: no connection could be opened").response()


async def statuses(client, count):
    """Return the statuses of `count` completions, one after the other."""
    found = []
    for _ in range(count):
        async with client.post("/v1/completions", json={"prompt": [1, 2]}) as response:
            found.append(response.status)
    return found


@pytest.mark.parametrize("recomputes", [False, True])
def test_the_router_finds_a_prefill_engine_that_was_restarted_elsewhere(recomputes):
    """The router also finds it if the decode engine computes the prompt itself and answers first."""
    engines = StreamingEngines(recomputes=recomputes, is_slow=True)

    async def check():
        async with router_of(engines.prefill, engines.decode) as client:
            for engines.port in (1, 2):
                assert await statuses(client, 2) == [200, 200]

    asyncio.run(check())
    assert engines.used_ports == ([1, 1, 1, 2] if recomputes else [1, 1, 1, 2, 2])


def test_after_a_prefill_engine_did_not_answer_the_next_one_there_is_asked_first():
    engines = StreamingEngines()

    async def check():
        async with AsyncExitStack() as stack:
            servers = TestServer(app_of(engines.prefill)), TestServer(app_of(engines.decode))
            client = await stack.enter_async_context(router_between(*servers))
            assert await statuses(client, 2) == [200, 200]
            port = servers[0].port
            await servers[0].close()
            assert await statuses(client, 1) == [502]
            engines.port = 2
            again = TestServer(app_of(engines.prefill), port=port)
            await stack.enter_async_context(again)
            assert await statuses(client, 1) == [200]

    asyncio.run(check())
    assert engines.used_ports[:2] == [1, 1]
    assert engines.used_ports[-1] == 2


def test_logs_have_time_level_and_name(capsys, monkeypatch):
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    log_to_stderr()
    logging.getLogger("minillm.some").warning("it happened")
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} WARNING minillm.some it happened", line
    )
    root.setLevel(logging.WARNING)
