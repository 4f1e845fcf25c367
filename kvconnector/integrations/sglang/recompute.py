"""Has prefill servers compute retracted prompts again: a decode engine asks as a router would, by HTTP.

SGLang does so when its decode engine has given up the caches of running requests: for new weights
(`pause_generation(mode="retract")`), and for DeepSeek-V4, whose caches it cannot keep in host memory, whenever pages
run out. The prompt is then what the request had so far, with the tokens that it was answered.

*When.* SGLang asks once the decode engine has allocated the prompt's pages. Ours allocates only once the prefill engine
has begun, so it asks as soon as it knows where the prefill engine is. Neither engine then has memory for a prompt that
waits for the other one's.

*Threads.* One, started by the first question. It sends each question and then waits for all answers together, because a
server answers only when the prompt has been read: SGLang may retract every running request at once. A server that
cannot be connected to delays the others by `ANSWER_S` once, for all that is to be asked of it.

*Clock.* An answer has no deadline of its own: it is waited for until the request ends, or `LINGER_S` longer if that was
a success. Closing the connection earlier would let the server abort the request.
"""

from __future__ import annotations

import json
import selectors
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from kvconnector.control.address import HostPort
from kvconnector.integrations.sglang.registry import ANSWER_S

LINGER_S = 30.0
MAX_ANSWER_BYTES = 1 << 16
"""What is read of an answer. The tokens in it are not used."""
MAX_REASON = 300
OK = "200"


@dataclass(slots=True)
class _Question:
    address: HostPort
    payload: Mapping[str, object]
    sock: socket.socket | None = None
    answer: bytes = b""
    until_s: float | None = None
    """When to stop waiting; None while the request goes on."""


class Recomputer:
    """Asks for prompts to be computed again, and says which of the questions were refused."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._questions: dict[str, _Question] = {}
        self._new: list[str] = []
        self._dropped: list[_Question] = []
        self._refused: dict[str, str] = {}
        self._thread: threading.Thread | None = None
        self._is_open = True

    def ask(self, request_id: str, address: HostPort, payload: Mapping[str, object]) -> None:
        """Have a prompt computed. Never blocks.

        Args:
            request_id: The name by which `refusal` and `forget` know the question.
            address: The prefill server's HTTP API.
            payload: The body of a `/generate`.
        """
        with self._lock:
            if not self._is_open:
                return
            self._questions[request_id] = _Question(address, payload)
            self._new.append(request_id)
            if self._thread is None:
                self._waker, self._wakes = socket.socketpair()
                self._wakes.setblocking(False)
                self._waker.setblocking(False)
                self._thread = threading.Thread(
                    target=self._run, daemon=True, name="kvconnector-recompute"
                )
                self._thread.start()
        self._wake()

    def refusal(self, request_id: str) -> str | None:
        """Return why the server will not compute a prompt, once; None if nothing is known against it."""
        if not self._refused:
            return None
        with self._lock:
            return self._refused.pop(request_id, None)

    def forget(self, request_id: str, *, is_done: bool) -> None:
        """Stop waiting for an answer: at once, so that the server gives the prompt up, or soon, if it has been read."""
        with self._lock:
            self._refused.pop(request_id, None)
            question = self._questions.get(request_id)
            if question is None:
                return
            if is_done:
                question.until_s = time.monotonic() + LINGER_S
            else:
                del self._questions[request_id]
                self._dropped.append(question)
        self._wake()

    def close(self) -> None:
        """Stop. Idempotent."""
        with self._lock:
            self._is_open = False
            thread = self._thread
        if thread is not None:
            self._wake()
            thread.join(2 * ANSWER_S)

    def _wake(self) -> None:
        with suppress(OSError):  # it is awake, or has ended
            self._waker.send(b"\0")

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector, self._waker, self._wakes:
            selector.register(self._wakes, selectors.EVENT_READ)
            while self._is_open:
                self._send_new(selector)
                self._drop(selector)
                for key, _ in selector.select(self._wait_s()):
                    if key.data is None:
                        with suppress(BlockingIOError):
                            self._wakes.recv(4096)
                    else:
                        self._receive(selector, *key.data)
            for question in self._questions.values():
                if question.sock is not None:
                    question.sock.close()

    def _wait_s(self) -> float | None:
        with self._lock:
            if self._new or self._dropped:
                return 0.0
            ends = [each.until_s for each in self._questions.values() if each.until_s is not None]
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def _drop(self, selector: selectors.BaseSelector) -> None:
        """Close the connections whose answers nobody waits for any more."""
        now = time.monotonic()
        with self._lock:
            dropped, self._dropped = self._dropped, []
            late = [
                request_id
                for request_id, each in self._questions.items()
                if each.until_s is not None and each.until_s <= now
            ]
            dropped += [self._questions.pop(each) for each in late]
        for question in dropped:
            _close(selector, question)

    def _send_new(self, selector: selectors.BaseSelector) -> None:
        with self._lock:
            new, self._new = self._new, []
        unreachable: dict[HostPort, str] = {}
        for request_id in new:
            question = self._questions.get(request_id)
            if question is None or not self._is_open:
                continue
            reason = unreachable.get(question.address)
            if reason is None:
                try:
                    question.sock = _sent(question)
                except (OSError, UnicodeError) as error:
                    reason = unreachable[question.address] = f"{type(error).__name__}: {error}"
                except (TypeError, ValueError) as error:
                    reason = f"the prompt cannot be written as JSON: {error}"
            if reason is not None:
                self._end(request_id, reason)
            elif question.sock is not None:
                selector.register(question.sock, selectors.EVENT_READ, data=(request_id, question))

    def _receive(
        self, selector: selectors.BaseSelector, request_id: str, question: _Question
    ) -> None:
        if question.sock is None:
            return
        try:
            part = question.sock.recv(MAX_ANSWER_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            _close(selector, question)
            self._end(request_id, f"{type(error).__name__}: {error}")
            return
        question.answer += part
        if part and len(question.answer) < MAX_ANSWER_BYTES:
            return
        _close(selector, question)
        self._end(request_id, _reason_of(question.answer))

    def _end(self, request_id: str, reason: str | None) -> None:
        with self._lock:
            if self._questions.pop(request_id, None) is not None and reason is not None:
                self._refused[request_id] = reason


def _sent(question: _Question) -> socket.socket:
    """Send a question. Returns its connection, which does not block."""
    body = json.dumps(question.payload).encode()
    host = str(question.address).removeprefix("tcp://")
    head = (
        f"POST /generate HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    sock = socket.create_connection(question.address, timeout=ANSWER_S)
    try:
        sock.sendall(head.encode("ascii") + body)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def _close(selector: selectors.BaseSelector, question: _Question) -> None:
    if question.sock is not None:
        with suppress(KeyError, ValueError):  # it was not waited for yet
            selector.unregister(question.sock)
        question.sock.close()
        question.sock = None


def _reason_of(answer: bytes) -> str | None:
    """Return what an HTTP answer has against the question, or None if it is status 200."""
    head, _, body = answer.partition(b"\r\n\r\n")
    line = head.partition(b"\r\n")[0].decode(errors="replace")
    words = line.split(None, 2)
    if len(words) > 1 and words[0].startswith("HTTP/1.") and words[1] == OK:
        return None
    if not line:
        return "the server closed the connection without an answer"
    return f"{line}: {body.decode(errors='replace')}"[:MAX_REASON]
