"""Routers send a failed request where the failure says, and a lost decode engine's parameters to the next one."""

import asyncio
from contextlib import AsyncExitStack

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

import minillm.router
import sglang_1p1d.router
from routing import MAX_TRIES, retry_of
from vllm_1p1d.router import Router

SENT = {"prompt": "p"}
EVENTS = "text/event-stream"
ROLE = 'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'
TOKEN = 'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'
DONE = "data: [DONE]\n\n"
FAILURE = '{"error": {"message": "%s (retry: %s)"}}'


class Engine:
    """A stand-in. It answers its next requests with `answers`, an HTTP status and a text each, then well. A status of
    None breaks the connection off. A text in parts is a stream, each part sent by itself.
    """

    def __init__(self, name, *answers):
        self.name, self.answers, self.asked = name, [*answers], []

    async def complete(self, request):
        body = await request.json()
        self.asked.append(body)
        status, text = self.answers.pop(0) if self.answers else (200, None)
        if status is None:
            request.transport.abort()
        if isinstance(text, tuple):
            stream = web.StreamResponse(status=status, headers={"Content-Type": EVENTS})
            await stream.prepare(request)
            for part in text:
                await stream.write(part.encode())
                await asyncio.sleep(0.01)  # in a packet of its own
            return stream
        if text is not None or status is None:
            return web.Response(status=status or 500, text=text, content_type="application/json")
        params = {"remote_request_id": f"{self.name} {len(self.asked)}"}
        return web.json_response({"by": self.name, "kv_transfer_params": params})


async def served(make_router, prefills, decodes, *, down=(), path="/v1/completions"):
    """Send one request. Engines in `down` do not listen. Returns its status and answer."""
    async with AsyncExitStack() as stack:
        urls = []
        for engine in (*prefills, *decodes):
            app = web.Application()
            app.router.add_post(path, engine.complete)
            server = await stack.enter_async_context(TestServer(app))
            urls.append(str(server.make_url("")).rstrip("/"))
            if engine in down:
                await server.close()
        router = make_router(urls[: len(prefills)], urls[len(prefills) :])
        server = await stack.enter_async_context(TestServer(router.app()))
        session = await stack.enter_async_context(ClientSession())
        async with session.post(server.make_url(path), json=SENT) as answer:
            return answer.status, await answer.text()


def through(make_router, *engines, **options):
    return asyncio.run(asyncio.wait_for(served(make_router, *engines, **options), 30))


ROUTERS = [
    pytest.param(Router, id="vllm"),
    pytest.param(minillm.router.Router, id="minillm"),
    pytest.param(
        lambda prefill, decode: sglang_1p1d.router.Router(prefill, [9] * len(prefill), decode),
        id="sglang",
    ),
]
WITH_PARAMS = ROUTERS[:2]


@pytest.mark.parametrize("make_router", ROUTERS)
@pytest.mark.parametrize(
    "retry, decoded_by, status",
    [("same", "d1", 200), ("other", "d2", 200), ("never", "", 500)],
)
def test_a_failure_says_where_a_request_is_sent_again(make_router, retry, decoded_by, status):
    prefills = Engine("p1"), Engine("p2")
    decodes = Engine("d1", (500, FAILURE % ("lost", retry))), Engine("d2")
    found, text = through(make_router, prefills, decodes)
    assert found == status
    by = {"same": prefills[0], "other": prefills[1]}.get(retry)
    if by is None:
        assert "lost" in text
        assert [len(engine.asked) for engine in (*prefills, *decodes)] == [1, 0, 1, 0]
    else:
        assert f'"by": "{decoded_by}"' in text
        # it is prefilled anew, there
        assert len(prefills[0].asked) + len(prefills[1].asked) == 2
        assert by.asked


@pytest.mark.parametrize("make_router", WITH_PARAMS)
@pytest.mark.parametrize("is_down", [False, True])
def test_a_lost_decode_engine_s_parameters_go_to_the_next_one(make_router, is_down):
    prefill, decodes = Engine("p"), (Engine("d1", (None, None)), Engine("d2"))
    down = decodes[:1] if is_down else ()
    status, text = through(make_router, [prefill], decodes, down=down)
    assert (status, '"by": "d2"' in text) == (200, True)
    assert len(prefill.asked) == 1
    tried = [body["kv_transfer_params"] for engine in decodes for body in engine.asked]
    assert tried == [{"remote_request_id": "p 1"}] * (1 if is_down else 2)


@pytest.mark.parametrize("make_router", ROUTERS)
def test_another_prefill_engine_takes_the_place_of_a_lost_one(make_router):
    prefills, decodes = (Engine("p1"), Engine("p2")), (Engine("d1"), Engine("d2"))
    status, _ = through(make_router, prefills, decodes, down=prefills[:1])
    assert (status, len(prefills[1].asked)) == (200, 1)


@pytest.mark.parametrize("make_router", ROUTERS)
def test_tries_end(make_router):
    failing = [(500, FAILURE % ("gone", "same"))] * (MAX_TRIES + 1)
    decode = Engine("d", *failing)
    status, text = through(make_router, [Engine("p")], [decode])
    assert status == 500
    assert "gone" in text
    assert len(decode.asked) == MAX_TRIES


@pytest.mark.parametrize("make_router", ROUTERS)
def test_without_another_engine_there_is_no_other_try(make_router):
    decode = Engine("d", (500, FAILURE % ("gone", "other")))
    assert through(make_router, [Engine("p")], [decode])[0] == 500
    assert len(decode.asked) == 1


def test_a_stream_of_sglang_s_that_begins_with_an_error_has_failed():
    event = 'data: {"error": {"message": "the lease ended (retry: same)"}}\n\n'
    make_router = ROUTERS[2].values[0]
    decode = Engine("d", (200, event))
    status, text = through(make_router, [Engine("p")], [decode], path="/generate")
    assert (status, '"by": "d"' in text, len(decode.asked)) == (200, True, 2)


@pytest.mark.parametrize("parts", [("{}",), (ROLE, "{}"), (ROLE[:20], ROLE[20:] + "{}")])
@pytest.mark.parametrize("retry, by", [("same", "d1"), ("other", "d2"), ("never", "")])
@pytest.mark.parametrize("make_router", [Router, *ROUTERS[2].values])
def test_a_stream_that_begins_with_an_error_has_failed(make_router, parts, retry, by):
    """vLLM begins a stream before its load has ended, and a chat with an event of its own."""
    event = f"data: {FAILURE % ('lost', retry)}\n\n"
    text = (*(part.replace("{}", event) for part in parts), DONE)
    decodes = Engine("d1", (200, text)), Engine("d2")
    _, found = through(make_router, [Engine("p1"), Engine("p2")], decodes)
    assert f'"by": "{by}"' in found if by else "lost" in found


@pytest.mark.parametrize("parts", [(ROLE, TOKEN, DONE), (TOKEN, DONE), ("data: ?\n\n", DONE)])
def test_a_stream_that_begins_well_is_passed_on(parts):
    error = f"data: {FAILURE % ('later', 'same')}\n\n"
    decode = Engine("d", (200, (*parts[:-1], error, DONE)))
    _, found = through(Router, [Engine("p")], [decode])
    assert found == "".join((*parts[:-1], error, DONE))
    assert len(decode.asked) == 1


@pytest.mark.parametrize(
    "status, content, retry",
    [
        (502, b'{"error": {"cause": "PeerLostError", "retry": "same"}}', "same"),
        (500, b"LeaseExpiredError: ended; prefill anew (retry: same)", "same"),
        (400, b"(retry: other)", "other"),
        (500, b"Internal server error", "other"),
        (429, b"", "other"),
        (404, b"no such model", "never"),
        (500, b"retry: sometimes", "other"),
        (500, b"\xff\xfe", "other"),
    ],
)
def test_what_an_answer_says(status, content, retry):
    assert retry_of(status, content) == retry
