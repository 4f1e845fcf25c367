"""The router of examples/mixed_1p1d between stand-in engines: what each kind is sent, and which failures come back."""

import asyncio
import json
from contextlib import AsyncExitStack

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from kvconnector.integrations.sglang.transfers import transfer_names
from mixed_1p1d.router import SGLANG, VLLM, Router, Server, servers

ANSWER = {"choices": [{"text": "w1"}]}
WHERE = {"remote_engine_id": "p0", "remote_host": "10.0.0.7", "remote_port": 5600}


class Engine:
    """A stand-in. `directory`: what SGLang's registry says, by rank."""

    def __init__(self, kind, *, status=200, num_ranks=1, follows=True):
        self.kind, self.status, self.bodies, self.questions = kind, status, [], []
        self.num_ranks, self.follows = num_ranks, follows
        self.where = dict(WHERE)

    def app(self):
        app = web.Application()
        app.add_routes([web.post("/v1/completions", self.complete), web.get("/route", self.route)])
        return app

    async def complete(self, request):
        body = await request.json()
        self.bodies.append(body)
        answer, params = dict(ANSWER), body.get("kv_transfer_params") or {}
        if params.get("do_remote_decode"):
            name = f"{params['transfer_id']}|{params['transfer_secret']}||"
            answer["kv_transfer_params"] = {**self.where, "remote_request_id": name}
        return web.json_response(answer, status=self.status)

    async def route(self, request):
        self.questions.append(dict(request.query))
        rank = int(request.query["prefill_dp_rank"])
        if rank < 0:
            return web.json_response(
                {"dp_size": self.num_ranks, "follow_bootstrap_room": self.follows}
            )
        return web.json_response({"rank_ip": "10.0.0.8", "rank_port": 9000 + rank})


def asked(prefill, decode, number=1, **body):
    """Send requests through a router. Returns the statuses and texts."""

    async def ask():
        async with AsyncExitStack() as stack:
            found = []
            for engine in (prefill, decode):
                server = await stack.enter_async_context(TestServer(engine.app()))
                found.append(
                    Server(engine.kind, f"http://127.0.0.1:{server.port}", server.port, "key")
                )
            router = Router([found[0]], [found[1]])
            client = await stack.enter_async_context(TestClient(TestServer(router.app())))
            answers = []
            for _ in range(number):
                full = {"model": "m", "prompt": "w1", "max_tokens": 4, **body}
                async with client.post("/v1/completions", json=full) as answer:
                    answers.append((answer.status, await answer.text()))
            return answers, found

    return asyncio.run(asyncio.wait_for(ask(), 30))


def test_a_prompt_of_vllm_is_read_by_sglang_under_the_rooms_name():
    prefill, decode = Engine(VLLM), Engine(SGLANG)
    answers, _ = asked(prefill, decode, 2)
    assert [(status, json.loads(text)) for status, text in answers] == [(200, ANSWER)] * 2
    rooms = [body["bootstrap_room"] for body in decode.bodies]
    assert len({*rooms}) == 2
    for room, body, of_prefill in zip(rooms, decode.bodies, prefill.bodies, strict=True):
        assert (body["bootstrap_host"], body["bootstrap_port"]) == ("p0@10.0.0.7", 5600)
        assert body["max_tokens"] == 4
        assert "kv_transfer_params" not in body
        params = of_prefill["kv_transfer_params"]
        assert (params["transfer_id"], params["transfer_secret"]) == transfer_names(room)
        assert params["do_remote_decode"]
        assert of_prefill["max_tokens"] == 1
        assert "bootstrap_room" not in of_prefill


def test_an_ipv6_host_is_in_brackets():
    prefill, decode = Engine(VLLM), Engine(SGLANG)
    prefill.where["remote_host"] = "fd00::7"
    asked(prefill, decode)
    assert decode.bodies[0]["bootstrap_host"] == "p0@[fd00::7]"


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_prompt_of_sglang_is_read_by_vllm_where_its_registry_says(num_ranks):
    prefill, decode = Engine(SGLANG, num_ranks=num_ranks), Engine(VLLM)
    answers, (server, _) = asked(prefill, decode, 8)
    assert {status for status, _ in answers} == {200}
    for of_prefill, body in zip(prefill.bodies, decode.bodies, strict=True):
        room, params = of_prefill["bootstrap_room"], body["kv_transfer_params"]
        rank = room % num_ranks
        suffix = f"-dp{rank}" if num_ranks > 1 else ""
        assert of_prefill["bootstrap_port"] == server.bootstrap_port
        assert (params["transfer_id"], params["transfer_secret"]) == transfer_names(room)
        assert params["remote_engine_id"] == f"sglang-prefill-{server.bootstrap_port}{suffix}"
        assert (params["remote_host"], params["remote_port"]) == ("10.0.0.8", 9000 + rank)
        assert params["do_remote_prefill"]
        assert params["remote_public_key"] == "key"
        assert "bootstrap_room" not in body
    # each place is asked for once
    assert len(prefill.questions) <= 1 + num_ranks


def test_ranks_that_a_room_does_not_tell_are_refused_by_name():
    (answer,), _ = asked(Engine(SGLANG, num_ranks=2, follows=False), Engine(VLLM))
    assert answer[0] == 502
    assert "--load-balance-method" in answer[1]


@pytest.mark.parametrize("kinds", [(VLLM, SGLANG), (SGLANG, VLLM)], ids="-".join)
@pytest.mark.parametrize("side", [0, 1], ids=["prefill", "decode"])
def test_the_failure_of_either_engine_comes_back(kinds, side):
    engines = [Engine(kind) for kind in kinds]
    engines[side].status = 400
    (answer,), _ = asked(*engines)
    assert answer[0] == 400


@pytest.mark.parametrize("kind", [VLLM, SGLANG])
def test_two_engines_of_one_kind_are_served_as_by_its_own_router(kind):
    prefill, decode = Engine(kind), Engine(kind)
    (answer,), _ = asked(prefill, decode)
    assert answer[0] == 200
    keys = {"kv_transfer_params"} if kind == VLLM else {"bootstrap_host", "bootstrap_room"}
    assert keys <= decode.bodies[0].keys()


def test_a_prefill_engine_that_takes_no_names_is_said_to():
    class Other(Engine):
        async def complete(self, request):
            self.bodies.append(await request.json())
            return web.json_response(
                {**ANSWER, "kv_transfer_params": {**WHERE, "remote_request_id": "own|5||"}}
            )

    (answer,), _ = asked(Other(VLLM), Engine(SGLANG))
    assert answer[0] == 502
    assert "stream=true" in answer[1]


def test_a_decode_engine_that_waits_where_nobody_is_any_more_is_asked_anew():
    """The prefill engine is started anew between two requests, and answers from another host."""

    class Moving(Engine):
        async def complete(self, request):
            self.where["remote_host"] = f"10.0.0.{8 if self.bodies else 7}"
            return await super().complete(request)

    class Waiting(Engine):
        async def complete(self, request):
            body = await request.json()
            if self.bodies and body["bootstrap_host"].endswith("10.0.0.7"):
                await asyncio.Event().wait()
            return await super().complete(request)

    decode = Waiting(SGLANG)
    answers, _ = asked(Moving(VLLM), decode, 2)
    assert [status for status, _ in answers] == [200, 200]
    assert [body["bootstrap_host"] for body in decode.bodies] == ["p0@10.0.0.7", "p0@10.0.0.8"]


def test_engines_are_named_with_their_kinds():
    found = servers(["vllm=http://a:1", "sglang=http://b:2", "sglang=http://c:3"], [8998, 8999])
    assert [(each.kind, each.bootstrap_port) for each in found] == [
        (VLLM, 0),
        (SGLANG, 8998),
        (SGLANG, 8999),
    ]
    for given, ports in ((["http://a:1"], None), (["sglang=http://a:1"], [1, 2]), (["x=y"], None)):
        with pytest.raises(ValueError, match="engine"):
            servers(given, ports)
