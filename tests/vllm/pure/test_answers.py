"""The API server's answer to a request whose load failed says why, and where to try again; other answers are untouched.

The application stands in for vLLM's: it asks the engine's client, and answers as vLLM's server does.
"""

import asyncio
import json
from types import SimpleNamespace

import pytest

from kvconnector.integrations.vllm.answers import RetryMiddleware, failure_params
from routing import retry_of

LOST = "PeerLostError: P is lost; use another one (retry: other)"
EXPIRED = "LeaseExpiredError: the lease has ended"
FORGED = "ConfigError: no such option"
SERVER_ERROR = {"message": "Internal server error", "type": "InternalServerError", "code": 500}
ANSWER = json.dumps({"error": SERVER_ERROR}).encode()


def output(reason=None, params=None):
    """An output of the engine, with the reason why its load failed, or with an offer."""
    return SimpleNamespace(kv_transfer_params=params if reason is None else failure_params(reason))


class Client:
    """An engine's client, whose requests have these outputs."""

    def __init__(self, *outputs):
        self.outputs, self.is_closed = outputs, False

    async def generate(self, prompt):
        try:
            for each in self.outputs:
                await asyncio.sleep(0)
                yield each
        finally:
            self.is_closed = True


def server(client, *, status=500, parts=(ANSWER,), tasks=1):
    """An application that lets the client generate, in tasks of its own if there are several, and then answers."""

    async def drain():
        async for _ in client.generate("p"):
            pass

    async def app(scope, receive, send):
        if tasks == 1:
            await drain()
        else:
            await asyncio.gather(*(drain() for _ in range(tasks)))
        kind = b"application/json" if status >= 400 else b"text/event-stream"
        headers = [(b"content-type", kind), (b"Content-Length", b"%d" % sum(map(len, parts)))]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for number, part in enumerate(parts, 1):
            more = number < len(parts)
            await send({"type": "http.response.body", "body": part, "more_body": more})

    return app


async def asked(client, app):
    """Ask an application. Returns its answer's status, headers and parts."""
    sent = []

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "app": SimpleNamespace(state=SimpleNamespace(engine_client=client))}
    await RetryMiddleware(app)(scope, None, send)
    start, *bodies = sent
    assert [each["more_body"] for each in bodies] == [True] * (len(bodies) - 1) + [False]
    return start["status"], dict(start["headers"]), [each["body"] for each in bodies]


def answer_of(*outputs, **options):
    client = Client(*outputs)
    return asyncio.run(asked(client, server(client, **options)))


@pytest.mark.parametrize(
    "reasons, cause, retry",
    [
        ([LOST], LOST, "other"),
        ([EXPIRED], EXPIRED, "same"),
        ([FORGED], FORGED, "never"),
        ([""], "", "other"),
        ([EXPIRED, FORGED, LOST], FORGED, "never"),
    ],
)
@pytest.mark.parametrize("cut", [0, 5])
def test_a_failure_says_why_and_where_to_try_again(reasons, cause, retry, cut):
    parts = (ANSWER[:cut], ANSWER[cut:]) if cut else (ANSWER,)
    status, headers, (body,) = answer_of(*map(output, reasons), parts=parts)
    error = json.loads(body)["error"]
    assert (status, error["cause"], error["retry"]) == (500, cause, retry)
    assert error["message"] == f"Internal server error (retry: {retry})"
    assert error["type"] == SERVER_ERROR["type"]
    assert headers == {b"content-type": b"application/json", b"content-length": b"%d" % len(body)}
    assert retry_of(status, body) == retry


def test_a_failure_in_a_stream_that_has_begun_says_it_in_its_event():
    token = b'data: {"choices": [{"text": "a"}]}\n\n'
    failed = b"data: " + ANSWER + b"\n\n"
    parts = (token, failed, b"data: [DONE]\n\n")
    status, _, (first, second, last) = answer_of(output(LOST), status=200, parts=parts)
    assert (status, first, last) == (200, token, parts[2])
    assert second.endswith(b"\n\n")
    error = json.loads(second.removeprefix(b"data: "))["error"]
    assert (error["cause"], error["retry"]) == (LOST, "other")


def test_requests_in_tasks_of_the_server_count_for_theirs():
    _, _, (body,) = answer_of(output(LOST), tasks=3)
    assert json.loads(body)["error"]["retry"] == "other"


@pytest.mark.parametrize("params", [None, {"do_remote_prefill": True}, "?"])
@pytest.mark.parametrize("status", [200, 500])
def test_other_answers_are_passed_on_byte_by_byte(params, status):
    parts = (b'{ "error":', b' {"message": "m"}}')
    _, headers, got = answer_of(output(params=params), status=status, parts=parts)
    assert (tuple(got), headers[b"Content-Length"]) == (parts, b"%d" % sum(map(len, parts)))


@pytest.mark.parametrize("body", [b"", b"no JSON", b'"text"', b'{"error": "text"}', b"[1]"])
def test_an_answer_of_another_form_is_passed_on(body):
    _, _, got = answer_of(output(LOST), parts=(body,))
    assert got == [body]


def test_a_failure_is_not_told_to_another_request():
    bad, good = output(LOST), output()
    client = Client(bad)

    async def both():
        failed = await asked(client, server(client))
        client.outputs = (good,)
        return failed, await asked(client, server(client))

    failed, later = asyncio.run(both())
    assert b"retry" in failed[2][0]
    assert later[2] == [ANSWER]


def test_a_request_that_is_given_up_ends_in_the_engine_at_once():
    client = Client(output(), output())

    async def give_up():
        async def app(scope, receive, send):
            outputs = client.generate("p")
            await anext(outputs)
            await outputs.aclose()
            assert client.is_closed
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        await asked(client, app)

    asyncio.run(give_up())


@pytest.mark.parametrize("scope", [{"type": "lifespan"}, {"type": "http"}, {"type": "websocket"}])
def test_what_is_no_request_to_an_engine_is_passed_on(scope):
    seen = []

    async def app(*arguments):
        seen.append(arguments)

    asyncio.run(RetryMiddleware(app)(scope, "receive", "send"))
    assert seen == [(scope, "receive", "send")]
