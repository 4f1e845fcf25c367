"""Answers of vLLM's API server to requests whose load failed, with the reason and where to try again.

The server answers every failed request with "Internal server error": it reads nothing of the engine's output but that
it is an error. vLLM lets an operator add ASGI middleware to the server, and this one fills the gap:

    vllm serve MODEL --middleware kvconnector.integrations.vllm.answers.RetryMiddleware ...

1. In the scheduler's process, `SchedulerHalf.explain` puts `failure_params` into the failed request's output.
2. In the server's process, the output comes out of `engine_client.generate`, which the middleware wraps at the first
   request. The wrapper runs in the task of the HTTP request, or in a task that it started, so a context variable leads
   to that request's failures.
3. The server raises its own error. On the way out the middleware adds `cause` and `retry` to the error of the answer:
   to a JSON body, whose length it corrects, or to the event of a stream that has begun.

Nothing here imports vLLM, blocks, or outlives its request. An answer whose form is not known is passed on as it is.
"""

from __future__ import annotations

import functools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any

from kvconnector.errors import Retry, retry_of

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]

CAUSE, RETRY = "load_failure", "retry"
_STRICTNESS = (Retry.SAME, Retry.OTHER, Retry.NEVER)
_EVENT = b"data: "
_FAILURES: ContextVar[list[str] | None] = ContextVar("failures", default=None)


def failure_params(reason: str) -> dict[str, Any]:
    """Return the `kv_transfer_params` of a failed request's output.

    Args:
        reason: As in `WorkerOutput.failed_recving`: an error's class, a colon, its text. It may be empty.
    """
    return {CAUSE: reason, RETRY: str(retry_of(reason))}


class RetryMiddleware:
    """ASGI middleware for vLLM's API server: failed loads say why in `error.cause`, and where to try again in
    `error.retry` and at the end of `error.message`.

    Args:
        app: The application that answers.
    """

    def __init__(self, app: Application) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer a request."""
        app = scope.get("app") if scope["type"] == "http" else None
        client = getattr(getattr(app, "state", None), "engine_client", None)
        if client is None:
            await self._app(scope, receive, send)
            return
        _watch(client)
        failures: list[str] = []
        before = _FAILURES.set(failures)
        try:
            await self._app(scope, receive, _Answer(send, failures).send)
        finally:
            _FAILURES.reset(before)


def _watch(client: Any) -> None:
    """Let an engine's client note the failures in its outputs."""
    generate = client.generate
    if getattr(generate, "notes_failures", False):
        return

    @functools.wraps(generate)
    async def noting(*arguments: Any, **named: Any) -> AsyncIterator[Any]:
        # closed with the wrapper: vLLM then aborts the request
        async with aclosing(generate(*arguments, **named)) as outputs:
            async for output in outputs:
                params, failures = output.kv_transfer_params, _FAILURES.get()
                if failures is not None and isinstance(params, dict) and CAUSE in params:
                    failures.append(params[CAUSE])
                yield output

    vars(noting)["notes_failures"] = True
    client.generate = noting


class _Answer:
    """An answer on its way to the client. `failures`: the reasons of the request's failed loads, which come in."""

    def __init__(self, send: Send, failures: list[str]) -> None:
        self._send, self._failures = send, failures
        self._start: Message | None = None
        """The beginning of an answer whose body will be another one, kept until the whole body is here."""
        self._body = b""

    async def send(self, message: Message) -> None:
        """Send on a part of the answer, changed if it is an error for which there is a reason."""
        if self._failures and message["type"] == "http.response.start" and message["status"] >= 400:
            self._start = message
        elif self._start is not None and message["type"] == "http.response.body":
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                body = self._explained(self._body)
                await self._send({**self._start, "headers": _headers(self._start, len(body))})
                await self._send({**message, "body": body})
                self._start = None
        elif self._failures and message["type"] == "http.response.body":
            await self._send({**message, "body": self._explained_event(message.get("body", b""))})
        else:
            await self._send(message)

    def _explained_event(self, event: bytes) -> bytes:
        """Return an event of a stream, explained if it is an error. vLLM sends each event separately."""
        if not event.startswith(_EVENT):
            return event
        text = event.removeprefix(_EVENT)
        end = text[len(text.rstrip()) :]
        return _EVENT + self._explained(text.rstrip()) + end

    def _explained(self, body: bytes) -> bytes:
        try:
            answer = json.loads(body)
        except ValueError:
            return body
        error = answer.get("error") if isinstance(answer, dict) else None
        if not isinstance(error, dict):
            return body
        cause = max(self._failures, key=lambda reason: _STRICTNESS.index(retry_of(reason)))
        retry = str(retry_of(cause))
        error |= {
            "message": f"{error.get('message', '')} (retry: {retry})".strip(),
            "cause": cause,
            "retry": retry,
        }
        return json.dumps(answer).encode()


def _headers(start: Message, num_bytes: int) -> list[tuple[bytes, bytes]]:
    others = [each for each in start.get("headers", ()) if each[0].lower() != b"content-length"]
    return [*others, (b"content-length", str(num_bytes).encode())]
