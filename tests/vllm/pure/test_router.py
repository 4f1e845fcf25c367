import asyncio

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from vllm_1p1d.router import REMOTE_DECODE, Router

NAMES = ("transfer_id", "transfer_secret")
ADDRESS = {"remote_engine_id": "p", "remote_host": "127.0.0.1", "remote_port": 9}
OFFER = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]]}
BODIES = {"prompt": "first"}, {"prompt": "second"}
BODY = {"prompt": "w1 w2", "max_tokens": 16, "n": 2, "stream": True, "stream_options": {}}


def engine(seen, answer, status=200):
    """An engine that records its requests in `seen`. `answer` may be a function of a request. It also answers GET."""

    async def complete(request):
        if request.method == "GET":
            return web.json_response({})
        body = await request.json()
        seen.append((body, request.headers["X-Request-Id"]))
        reply = await answer(body) if callable(answer) else (answer, status)
        return web.json_response(reply[0], status=reply[1])

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", complete)
    return TestServer(app)


async def routed(prefill, decode, *bodies):
    """Send completions through a router between two engines; returns `(status, answer)` of the last one. A body of
    bytes is sent as it is, and its answer is text.
    """
    async with prefill, decode:
        urls = [[str(server.make_url("")).rstrip("/")] for server in (prefill, decode)]
        async with TestServer(Router(*urls).app()) as router, ClientSession() as session:
            for body in bodies:
                is_raw = isinstance(body, bytes)
                sent = {"data": body} if is_raw else {"json": body}
                async with session.post(router.make_url("/v1/completions"), **sent) as answer:
                    found = answer.status, await (answer.text() if is_raw else answer.json())
            return found


def test_a_prompt_is_prefilled_once_and_decoded_as_it_was_asked():
    prefilled, decoded = [], []
    prefill = engine(prefilled, {"kv_transfer_params": OFFER})
    decode = engine(decoded, {"choices": ["text"]})
    assert asyncio.run(routed(prefill, decode, BODY)) == (200, {"choices": ["text"]})
    ((short, name),) = prefilled
    names = {key: short["kv_transfer_params"].pop(key) for key in NAMES}
    assert all(names.values())
    assert short == {
        "prompt": "w1 w2",
        "max_tokens": 1,
        "stream": False,
        "kv_transfer_params": REMOTE_DECODE,
    }
    assert decoded == [({**BODY, "kv_transfer_params": OFFER}, name)]


def test_a_prefill_engine_is_asked_for_no_more_tokens_than_it_may_sample():
    prefilled, decoded = [], []
    engines = engine(prefilled, {"kv_transfer_params": OFFER}), engine(decoded, {})
    asyncio.run(routed(*engines, {**BODY, "min_tokens": 8}))
    asked = [(body["min_tokens"], body["max_tokens"]) for body, _ in prefilled + decoded]
    assert asked == [(1, 1), (8, 16)]


@pytest.mark.parametrize("offer", [None, {}])
def test_without_an_offer_the_decode_engine_computes_the_prompt(offer):
    """The router drops an offer that comes from the client, which could send the decode engine to any host."""
    decoded = []
    prefill = engine([], {"kv_transfer_params": offer})
    asyncio.run(routed(prefill, engine(decoded, {}), {**BODY, "kv_transfer_params": OFFER}))
    assert decoded[0][0] == BODY


@pytest.mark.parametrize("body", [b"{", b"\xff", b"[" * 100_000, b"[]"])
def test_a_body_that_is_no_json_object_is_the_clients_mistake(body):
    status, text = asyncio.run(routed(engine([], {}), engine([], {}), body))
    assert status == 400
    assert "JSON" in text


def streaming(decoding=None):
    """Return the answers of a prefill engine that streams; it waits for `decoding` before the second one."""

    async def answer(body):
        names = body["kv_transfer_params"]
        if decoding is not None and body["prompt"] != "first":
            await decoding.wait()
        request_id = "|".join([names["transfer_id"], names["transfer_secret"], "key", ""])
        return {"kv_transfer_params": {**OFFER, **ADDRESS, "remote_request_id": request_id}}, 200

    return answer


def test_engines_that_stream_are_asked_at_once():
    prefilled, decoded, decoding = [], [], asyncio.Event()

    async def decode(body):
        if "transfer_id" in body["kv_transfer_params"]:
            decoding.set()
        return {"choices": [body["prompt"]]}, 200

    engines = engine(prefilled, streaming(decoding)), engine(decoded, decode)
    assert asyncio.run(routed(*engines, *BODIES)) == (200, {"choices": ["second"]})
    assert [body["kv_transfer_params"]["remote_block_ids"] for body, _ in decoded[:1]] == [[[1, 2]]]
    names = {name: prefilled[1][0]["kv_transfer_params"][name] for name in NAMES}
    asked = decoded[1][0]["kv_transfer_params"]
    assert asked == {"do_remote_prefill": True, **ADDRESS, "remote_public_key": "key", **names}


def test_a_decode_engine_that_fails_at_once_gets_the_prefill_engines_answer():
    decoded = []

    async def decode(body):
        return {}, 500 if "transfer_id" in body["kv_transfer_params"] else 200

    engines = engine([], streaming()), engine(decoded, decode)
    assert asyncio.run(routed(*engines, *BODIES)) == (200, {})
    assert ["remote_block_ids" in body["kv_transfer_params"] for body, _ in decoded] == [
        *(True, False, True)
    ]


@pytest.mark.parametrize("change", ["refusal", "another engine"])
def test_a_prefill_engine_that_refuses_or_is_another_one_is_not_waited_for(change):
    decoded = []

    async def prefill(body):
        reply, status = await streaming()(body)
        if change == "refusal" and body["prompt"] == "second":
            return {"error": "too long"}, 400
        reply["kv_transfer_params"]["remote_engine_id"] = body["prompt"]
        return reply, status

    async def decode(body):
        if "transfer_id" in body["kv_transfer_params"]:
            await asyncio.Event().wait()
        return {}, 200

    engines = engine([], prefill), engine(decoded, decode)
    answer = asyncio.run(routed(*engines, *BODIES))
    asked = [body["kv_transfer_params"]["remote_engine_id"] for body, _ in decoded]
    if change == "refusal":
        assert (answer, asked) == ((400, {"error": "too long"}), ["first"] * len(asked))
    else:
        assert (answer, asked) == ((200, {}), ["first", "first", "second"])
    unasked = []
    refused = routed(engine([], {"error": "no"}, 400), engine(unasked, {}), BODY)
    assert (asyncio.run(refused), unasked) == ((400, {"error": "no"}), [])
