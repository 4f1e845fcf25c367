from __future__ import annotations

import asyncio

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from vllm_1p1d.router import REMOTE_DECODE, Router

OFFER = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]]}
BODY = {"prompt": "w1 w2", "max_tokens": 16, "n": 2, "stream": True, "stream_options": {}}


def engine(seen, answer, status=200):
    """An engine that keeps what it is asked."""

    async def complete(request):
        seen.append((await request.json(), request.headers["X-Request-Id"]))
        return web.json_response(answer, status=status)

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    return TestServer(app)


async def routed(prefill, decode, body):
    """`(status, answer)` of a completion through a router between two engines."""
    async with prefill, decode:
        urls = [[str(server.make_url("")).rstrip("/")] for server in (prefill, decode)]
        async with (
            TestServer(Router(*urls).app()) as router,
            ClientSession() as session,
            session.post(router.make_url("/v1/completions"), json=body) as answer,
        ):
            return answer.status, await answer.json()


def test_a_prompt_is_prefilled_once_and_decoded_as_it_was_asked():
    prefilled, decoded = [], []
    prefill = engine(prefilled, {"kv_transfer_params": OFFER})
    decode = engine(decoded, {"choices": ["text"]})
    assert asyncio.run(routed(prefill, decode, BODY)) == (200, {"choices": ["text"]})
    ((short, name),) = prefilled
    assert short == {
        "prompt": "w1 w2",
        "max_tokens": 1,
        "stream": False,
        "kv_transfer_params": REMOTE_DECODE,
    }
    assert decoded == [({**BODY, "kv_transfer_params": OFFER}, name)]


@pytest.mark.parametrize("offer", [None, {}])
def test_without_an_offer_the_decode_engine_computes_the_prompt(offer):
    decoded = []
    prefill = engine([], {"kv_transfer_params": offer})
    asyncio.run(routed(prefill, engine(decoded, {}), BODY))
    assert decoded[0][0] == BODY


def test_a_prefill_engines_refusal_is_the_answer():
    decoded = []
    prefill = engine([], {"error": "too long"}, status=400)
    answer = asyncio.run(routed(prefill, engine(decoded, {}), BODY))
    assert answer == (400, {"error": "too long"})
    assert decoded == []
