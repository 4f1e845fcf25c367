"""What every transport must do, as a class of test methods. A subclass has `pair()`, which makes a `TransportPair`: two
connected workers. Their memory is reached through `Worker.allocate`, so that the second one can live in another process
behind a proxy.
"""

from __future__ import annotations

import contextlib
import ctypes
import select
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from kvconnector.errors import KVConnectorError, LocalError, OperationCancelledError
from kvconnector.transport.base import CONTROL_TAG_BIT, Buffer, MessageSizeError, Transport

SIZES_BYTES = (0, 1, 7, 4096, 1 << 20, 9 << 20)
DEADLINE_S = 30.0
"""Longest wait for anything that must happen. Generous: it ends a hung test, it measures nothing."""


class HostMemory:
    """Host memory of this process."""

    def __init__(self, nbytes):
        self._array = (ctypes.c_char * max(nbytes, 1))()
        self.buffer = Buffer(ctypes.addressof(self._array), nbytes, "cpu", self._array)

    def write(self, content):
        ctypes.memmove(self.buffer.address, content, len(content))

    def read(self):
        return ctypes.string_at(self.buffer.address, self.buffer.nbytes)


@dataclass(frozen=True)
class Worker:
    """One side: its transport, its endpoint to the other side, and its memory."""

    transport: Transport
    endpoint: int
    allocate: Callable[[int], Any] = HostMemory


@dataclass(frozen=True)
class TransportPair:
    """Two connected workers. `release` ends what the factory started beyond the transports, after they are closed;
    `lose_b` ends the second as a crash would. `begin_close` lets the second close while the first does: otherwise the
    first waits as for a peer that does not answer.
    """

    a: Worker
    b: Worker
    release: Callable[[], None] = lambda: None
    lose_b: Callable[[], None] | None = None
    begin_close: Callable[[], None] = lambda: None

    def close(self):
        """Close both transports. Idempotent."""
        self.begin_close()
        self.a.transport.close()
        self.b.transport.close()


class Ledger:
    """Drives both sides and books each completion, refusing a ticket that ends twice."""

    def __init__(self, *transports):
        self._transports = transports
        self._ended = {}

    def step(self):
        """One `progress()` of each side; the number of new completions."""
        count = 0
        for side, transport in enumerate(self._transports):
            for completion in transport.progress():
                key = (side, completion.ticket)
                assert key not in self._ended, f"ticket {key} ended twice"
                self._ended[key] = completion
                count += 1
        return count

    def wait(self, *keys):
        """Drive until all of these (side, ticket) have ended; their errors."""
        self.wait_until(lambda: all(key in self._ended for key in keys))
        return [self._ended[key].error for key in keys]

    def wait_until(self, condition):
        deadline_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline_s, "nothing happened before the deadline"
            self.step()

    def ended(self, side, ticket):
        return (side, ticket) in self._ended


def exchange(ledger, a, b, tag):
    """One small message each way, as peers do when they meet."""
    keys = []
    for side, here, there in ((0, a, b), (1, b, a)):
        received, sent = there.allocate(8), here.allocate(8)
        keys.append((1 - side, there.transport.recv(tag, received.buffer)))
        keys.append((side, here.transport.send(here.endpoint, tag, sent.buffer)))
    assert ledger.wait(*keys) == [None] * 4


def quiet(transport, ledger):
    """What an idle driver thread sleeps on, once there is nothing to do."""
    poller = select.poll()
    poller.register(transport.fileno(), select.POLLIN)
    deadline_s = time.monotonic() + DEADLINE_S
    ledger.step()
    while poller.poll(50):
        assert time.monotonic() < deadline_s, "an idle transport never goes quiet"
        ledger.step()
    return poller


def pattern(nbytes, seed):
    """Bytes that differ by position and by seed."""
    period = bytes((seed * 37 + i * 11) % 251 for i in range(251))
    return (period * (nbytes // 251 + 1))[:nbytes]


class TransportSuite:
    """The conformance tests. Each makes its own pair."""

    @contextlib.contextmanager
    def workers(self):
        """A pair for one test, closed afterwards; close reports each outstanding ticket once."""
        pair = self.pair()
        ledger = Ledger(pair.a.transport, pair.b.transport)
        try:
            yield pair.a, pair.b, ledger
            pair.close()
            ledger.step()
        finally:
            pair.close()
            pair.release()

    def test_round_trip_of_every_size(self):
        """There to a receive that waits; on its way back the message waits for its receive."""
        with self.workers() as (a, b, ledger):
            for seed, nbytes in enumerate(SIZES_BYTES):
                there, content = 2 * seed, pattern(nbytes, seed)
                sent, received, back = a.allocate(nbytes), b.allocate(nbytes), a.allocate(nbytes)
                sent.write(content)
                recv = b.transport.recv(there, received.buffer)
                send = a.transport.send(a.endpoint, there, sent.buffer)
                assert ledger.wait((0, send), (1, recv)) == [None, None], f"{nbytes} bytes, there"
                send = b.transport.send(b.endpoint, there + 1, received.buffer)
                for _ in range(20):
                    ledger.step()
                recv = a.transport.recv(there + 1, back.buffer)
                assert ledger.wait((0, recv), (1, send)) == [None, None], f"{nbytes} bytes, back"
                assert back.read() == content, f"{nbytes} bytes came back changed"

    def test_a_receive_of_another_length_is_refused(self):
        """And the transport goes on."""
        guard = b"guarded!"
        for nbytes, misfit in ((0, 1), (4096, -1), (4096, 1), (1 << 20, -1), (1 << 20, 1)):
            with self.workers() as (a, b, ledger):
                buffer_bytes = nbytes + misfit
                received = b.allocate(buffer_bytes + len(guard))
                received.write(b"\0" * buffer_bytes + guard)
                recv = b.transport.recv(1, replace(received.buffer, nbytes=buffer_bytes))
                a.transport.send(a.endpoint, 1, a.allocate(nbytes).buffer)
                (error,) = ledger.wait((1, recv))
                assert isinstance(error, MessageSizeError), f"wrong error {error!r}"
                assert received.read()[buffer_bytes:] == guard, "wrote past the end of the buffer"
                exchange(ledger, a, b, 2)

    def test_cancel_of_an_unmatched_receive(self):
        with self.workers() as (a, b, ledger):
            cancelled = b.transport.recv(9, b.allocate(16).buffer)
            ledger.step()
            b.transport.cancel(cancelled)
            (error,) = ledger.wait((1, cancelled))
            assert isinstance(error, OperationCancelledError), f"wrong error {error!r}"
            received, sent = b.allocate(16), a.allocate(16)
            sent.write(pattern(16, 3))
            recv = b.transport.recv(9, received.buffer)
            a.transport.send(a.endpoint, 9, sent.buffer)
            assert ledger.wait((1, recv)) == [None], "the cancelled receive took the message"
            assert received.read() == pattern(16, 3), "the message arrived changed"

    @pytest.mark.parametrize("is_disconnected", [False, True])
    def test_cancel_and_disconnect_end_a_send_that_nobody_received(self, is_disconnected):
        with self.workers() as (a, _, ledger):
            send = a.transport.send(a.endpoint, 4, a.allocate(1 << 20).buffer)
            if is_disconnected:
                a.transport.disconnect(a.endpoint)
                a.transport.disconnect(a.endpoint)
            else:
                a.transport.cancel(send)
            (error,) = ledger.wait((0, send))
            assert isinstance(error, OperationCancelledError), f"wrong error {error!r}"
            if is_disconnected:
                with pytest.raises(LocalError):
                    a.transport.send(a.endpoint, 5, a.allocate(8).buffer)

    def test_wrong_calls_are_refused(self):
        with self.workers() as (a, b, _):
            buffer = a.allocate(8).buffer
            for call in (
                lambda: a.transport.send(a.endpoint + 1000, 1, buffer),
                lambda: a.transport.send_control(a.endpoint + 1000, CONTROL_TAG_BIT, b""),
                lambda: a.transport.cancel(123_456),
            ):
                with pytest.raises(LocalError):
                    call()
            for garbage in (b"", b"x", b"\0" * 400, b.transport.address[:-1] + b"!", b"\xff" * 64):
                try:
                    a.transport.connect(garbage)
                except KVConnectorError:
                    continue
                raise AssertionError(f"connect accepted {garbage!r}")

    def test_close_ends_each_outstanding_ticket_once(self):
        with self.workers() as (a, _, ledger):
            transport = a.transport
            tickets = [transport.recv(100 + i, a.allocate(64).buffer) for i in range(5)]
            tickets.append(transport.send(a.endpoint, 1, a.allocate(1 << 20).buffer))
            before = [ticket for ticket in tickets if ledger.ended(0, ticket)]
            transport.close()
            transport.close()
            errors = ledger.wait(*((0, ticket) for ticket in tickets))
            for ticket, error in zip(tickets, errors, strict=True):
                cancelled = isinstance(error, OperationCancelledError)
                assert cancelled or ticket in before, f"ticket {ticket}: wrong error {error!r}"
            with pytest.raises(LocalError):
                transport.recv(1, a.allocate(8).buffer)
            with pytest.raises(LocalError):
                transport.send(a.endpoint, 1, a.allocate(8).buffer)
            assert transport.progress() == [], "a ticket ended after close had ended it"
