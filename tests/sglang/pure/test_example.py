"""The router of examples/sglang_1p1d between two stand-in engines, and the commands of the example's engines."""

import asyncio
import json
from argparse import Namespace
from contextlib import AsyncExitStack

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from sglang_1p1d.router import Router
from sglang_1p1d.run import engine_command


class Engine:
    """Answers with `status`, `delay_s` after `other` was asked for the same room; never if `delay_s` is None."""

    def __init__(self, status=200, delay_s=0.0):
        self.status, self.delay_s, self.other, self.bodies = status, delay_s, self, []
        self.is_asked, self.is_over, self.was_given_up = asyncio.Event(), asyncio.Event(), False

    async def generate(self, request):
        body = await request.json()
        self.bodies.append(body)
        self.is_asked.set()
        try:
            await self.other.is_asked.wait()
            await (asyncio.Event().wait() if self.delay_s is None else asyncio.sleep(self.delay_s))
        except asyncio.CancelledError:
            self.was_given_up = True
            raise
        finally:
            self.is_over.set()
        return web.json_response({"output_ids": body["input_ids"]}, status=self.status)


def through_router(prefill, decode, prompts):
    """Send one request after the other. Returns their statuses and bodies."""

    async def ask():
        prefill.other, decode.other = decode, prefill
        async with AsyncExitStack() as stack:
            urls = []
            for engine in (prefill, decode):
                app = web.Application()
                app.add_routes([web.post("/generate", engine.generate)])
                server = await stack.enter_async_context(TestServer(app))
                urls.append(f"http://127.0.0.1:{server.port}")
            server = TestServer(Router([urls[0]], [8998], [urls[1]]).app())
            client = await stack.enter_async_context(TestClient(server))
            answers = []
            for prompt in prompts:
                body = prompt if isinstance(prompt, bytes) else json.dumps({"input_ids": prompt})
                async with client.post("/generate", data=body) as answer:
                    if answer.status == 400:
                        return [await answer.text()]
                    answers.append((answer.status, await answer.json()))
                await prefill.is_over.wait()
                prefill.is_over.clear()
            return answers

    return asyncio.run(asyncio.wait_for(ask(), 30))


def test_both_engines_are_asked_at_once_for_a_room_of_their_own():
    prefill, decode = Engine(delay_s=0.1), Engine()
    answers = through_router(prefill, decode, [[1], [2]])
    assert answers == [(200, {"output_ids": [1]}), (200, {"output_ids": [2]})]
    assert prefill.bodies == decode.bodies
    rooms = {body["bootstrap_room"] for body in decode.bodies}
    assert len(rooms) == 2
    assert {(body["bootstrap_host"], body["bootstrap_port"]) for body in decode.bodies} == {
        ("127.0.0.1", 8998)
    }
    assert not prefill.was_given_up


def test_the_prefill_engine_is_given_up_if_the_decode_engine_fails():
    prefill, decode = Engine(delay_s=None), Engine(status=500)
    assert through_router(prefill, decode, [[1]]) == [(500, {"output_ids": [1]})]
    assert prefill.was_given_up


def test_a_body_that_is_no_json_object_is_the_clients_mistake():
    for body in (b"{", b"[1]"):
        (text,) = through_router(Engine(), Engine(), [body])
        assert "JSON" in text


@pytest.mark.parametrize("gpus", [None, "0,1"])
def test_engines_share_the_bootstrap_port_and_no_other(gpus):
    arguments = Namespace(
        model="m", port=8000, gpus=gpus, prefill_args="--tp 2", decode_args="--page-size 64"
    )
    commands = [engine_command(arguments, name)[0] for name in ("prefill", "decode")]
    assert [each[each.index("--port") + 1] for each in commands] == ["8001", "8002"]
    assert commands[0][-4:] == ["--disaggregation-bootstrap-port", "8004", "--tp", "2"]
    assert commands[1][-2:] == ["--page-size", "64"]
