"""The conformance tests of transports, as a class. A subclass defines `pair()`, which makes a `TransportPair` of two
connected workers. Tests reach their memory through `Worker.allocate`, so that a proxy can stand for a worker in another
process.
"""

import contextlib
import ctypes
import select
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from kvconnector.errors import KVConnectorError, LocalError, OperationCancelledError, PeerLostError
from kvconnector.transport.tagged_messages import (
    CONTROL_TAG_BIT,
    MAX_UNSENT_CONTROL_BYTES,
    Buffer,
    ControlFailed,
    ControlMessage,
    ControlRefused,
    MessageSizeError,
)
from kvconnector.transport.ucx import UcxTransport
from tests.support.loopback import NO_FILENO
from tests.support.waiting import until

SIZES_BYTES = (0, 1, 7, 4096, 1 << 20, 9 << 20)
TAG = CONTROL_TAG_BIT | (1 << 62) | 77
LIMIT_BYTES = 2 << 20
CONTROL_SIZES_BYTES = (0, 1, 7, 300, 20_000, 200_000, LIMIT_BYTES)


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

    transport: UcxTransport
    endpoint: int
    allocate: Callable[[int], Any] = HostMemory


@dataclass(frozen=True)
class TransportPair:
    """Two connected workers. `release` frees whatever else the factory started, after the transports are closed.
    `lose_b` ends the second worker like a crash. `begin_close` lets the second close while the first, which otherwise
    waits for it, does.
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
    """Drives both sides and records each completion. A ticket that completes twice is an error."""

    def __init__(self, *transports):
        self._transports = transports
        self._ended = {}

    def step(self):
        """Call `progress()` on each side. Returns the number of new completions."""
        count = 0
        for side, transport in enumerate(self._transports):
            for completion in transport.progress():
                key = (side, completion.ticket)
                assert key not in self._ended, f"ticket {key} ended twice"
                self._ended[key] = completion
                count += 1
        return count

    def wait(self, *keys):
        """Drive until all of these (side, ticket) pairs have ended. Returns their errors."""
        until(lambda: all(key in self._ended for key in keys), self.step)
        return [self._ended[key].error for key in keys]


def exchange(ledger, a, b, tag):
    """Send one small message each way, as peers do when they connect."""
    keys = []
    for side, here, there in ((0, a, b), (1, b, a)):
        received, sent = there.allocate(8), here.allocate(8)
        keys.append((1 - side, there.transport.recv(tag, received.buffer)))
        keys.append((side, here.transport.send(here.endpoint, tag, sent.buffer)))
    assert ledger.wait(*keys) == [None] * 4


def pattern(nbytes, seed):
    """Return bytes that differ by position and by seed."""
    period = bytes((seed * 37 + i * 11) % 251 for i in range(251))
    return (period * (nbytes // 251 + 1))[:nbytes]


class Inbox(Ledger):
    """Also records the control messages that the second side takes."""

    def __init__(self, a, b):
        super().__init__(a, b)
        self.limits = {TAG: LIMIT_BYTES}
        self.events = []

    def step(self):
        count = super().step()
        self.events += self._transports[1].receive_control(self.limits)
        return count

    def take(self, count):
        until(lambda: len(self.events) >= count, self.step)
        taken, self.events = self.events[:count], self.events[count:]
        return taken


def send_control(worker, *payloads):
    """Send control messages over the worker's endpoint."""
    for payload in payloads:
        worker.transport.send_control(worker.endpoint, TAG, payload)


class TransportSuite:
    """The conformance tests. Each makes its own pair."""

    def poller(self, transport):
        """Return what waits for a transport's descriptor."""
        if transport.fileno() == NO_FILENO:
            pytest.skip("this transport has no descriptor to wait for")
        poller = select.poll()
        poller.register(transport.fileno(), select.POLLIN)
        return poller

    @contextlib.contextmanager
    def workers(self):
        """A pair for one test. It is closed afterwards, and close must report each outstanding ticket once."""
        pair = self.pair()
        ledger = Inbox(pair.a.transport, pair.b.transport)
        try:
            yield pair.a, pair.b, ledger
            pair.close()
            ledger.step()
        finally:
            pair.close()
            pair.release()

    def test_messages_of_every_size_make_a_round_trip(self):
        """The first message finds a posted receive; the second one waits for its receive."""
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

    @pytest.mark.parametrize(
        "nbytes, misfit", [(0, 1), (4096, -1), (4096, 1), (1 << 20, -1), (1 << 20, 1)]
    )
    def test_a_receive_of_another_length_is_refused(self, nbytes, misfit):
        """The transport still works afterwards."""
        guard = b"guarded!"
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

    def test_a_cancelled_receive_takes_no_message(self):
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
    def test_cancel_and_disconnect_end_an_unreceived_send(self, is_disconnected):
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

    def test_wrong_transport_calls_are_refused(self):
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
            transport.close()
            transport.close()
            errors = ledger.wait(*((0, ticket) for ticket in tickets))
            for ticket, error in zip(tickets, errors, strict=True):
                assert isinstance(error, OperationCancelledError), f"ticket {ticket}: {error!r}"
            with pytest.raises(LocalError):
                transport.recv(1, a.allocate(8).buffer)
            with pytest.raises(LocalError):
                transport.send(a.endpoint, 1, a.allocate(8).buffer)
            assert transport.progress() == [], "a ticket ended after close had ended it"

    def test_control_messages_of_every_size_arrive_in_order(self):
        with self.workers() as (a, _b, inbox):
            payloads = [
                pattern(nbytes, seed) for seed, nbytes in enumerate(CONTROL_SIZES_BYTES * 2)
            ]
            for payload in payloads:
                a.transport.send_control(a.endpoint, TAG, payload)
            arrived = inbox.take(len(payloads))
            assert arrived == [ControlMessage(TAG, p) for p in payloads], "other messages came"

    def test_unknown_tags_and_long_control_messages_are_refused(self):
        with self.workers() as (a, _b, inbox):
            unknown, limited = CONTROL_TAG_BIT | 6, CONTROL_TAG_BIT | 7
            inbox.limits = {limited: 1000}
            for tag, nbytes in ((unknown, 9), (limited, 1001), (limited, 300_000), (limited, 1000)):
                a.transport.send_control(a.endpoint, tag, pattern(nbytes, 1))
            assert set(inbox.take(4)) == {
                ControlRefused(unknown, 9),
                ControlRefused(limited, 1001),
                ControlRefused(limited, 300_000),
                ControlMessage(limited, pattern(1000, 1)),
            }

    @pytest.mark.parametrize("nbytes", [8 << 10, 32 << 10, 64 << 10])
    def test_a_burst_of_control_messages_arrives_whole(self, nbytes):
        """Before the receiver looks, and more of them than several of the longest that it takes."""
        with self.workers() as (a, _b, inbox):
            inbox.limits = {TAG: 64 << 10}
            payloads = [pattern(nbytes, seed) for seed in range(50)]
            for payload in payloads:
                a.transport.send_control(a.endpoint, TAG, payload)
            arrived = inbox.take(len(payloads))
            assert arrived == [ControlMessage(TAG, p) for p in payloads], "other messages came"

    @pytest.mark.parametrize("nbytes", [64, 300_000])
    def test_unexpected_messages_are_dropped(self, nbytes):
        block, awaited = 16, 5 * 16
        with self.workers() as (a, b, inbox):
            sent, received, rest = a.allocate(nbytes), b.allocate(nbytes), b.allocate(nbytes)
            sent.write(pattern(nbytes, 1))
            tags = [3, awaited + 2, 3 * block, 4 * block, awaited + 1]
            sends = [(0, a.transport.send(a.endpoint, tag, sent.buffer)) for tag in tags]
            for count, tag, memory in ((1, 2, received), (2, 1, rest)):
                dropped = []
                while sum(dropped) < count:
                    assert len(dropped) < 100_000, "unexpected messages are kept"
                    inbox.step()
                    dropped.append(b.transport.discard_unexpected([awaited], -block))
                assert sum(dropped) == count, "an expected message was dropped"
                recv = (1, b.transport.recv(awaited + tag, memory.buffer))
                assert inbox.wait(recv) == [None], "an expected message did not arrive"
                assert memory.read() == pattern(nbytes, 1), "it arrived changed"
            inbox.wait(*sends)

    def test_untaken_control_messages_are_bounded(self):
        with self.workers() as (a, _b, _inbox), pytest.raises(PeerLostError):
            send_control(a, *[pattern(MAX_UNSENT_CONTROL_BYTES >> 4, 1)] * 128)

    def test_thousands_of_control_messages_wait_for_a_slow_peer(self):
        with self.workers() as (a, _b, inbox):
            payloads = [pattern(100, seed) for seed in range(5000)]
            send_control(a, *payloads)
            assert [m.payload for m in inbox.take(len(payloads))] == payloads

    def test_a_closed_transport_takes_no_control_messages(self):
        with self.workers() as (a, b, inbox):
            a.transport.send_control(a.endpoint, TAG, b"before")
            inbox.take(1)
            for nbytes in (10, 300_000):
                a.transport.send_control(a.endpoint, TAG, pattern(nbytes, 1))
            b.transport.close()
            assert b.transport.receive_control(inbox.limits) == [], "messages after the end"
            with pytest.raises(LocalError):
                b.transport.send_control(b.endpoint, TAG, b"")
            failures = a.transport.receive_control({})
            assert all(isinstance(e, ControlFailed) for e in failures), "messages from nowhere"

    def test_close_sends_pending_control_messages(self):
        with self.workers() as (a, _b, inbox):
            a.transport.send_control(a.endpoint, TAG, b"warm")
            inbox.take(1)
            payloads = [pattern(100, seed) for seed in range(20)]
            send_control(a, *payloads)
            a.transport.close()
            arrived = inbox.take(len(payloads))
            assert arrived == [ControlMessage(TAG, p) for p in payloads], "other messages came"

    @pytest.mark.parametrize("nbytes", [8, 300_000, 1 << 20])
    @pytest.mark.parametrize("is_control", [False, True])
    def test_a_message_wakes_a_polling_thread(self, is_control, nbytes):
        """Receive as a driver thread does: `progress()` only when the descriptor says so."""
        with self.workers() as (sleeper, sender, _):
            poller = self.poller(sleeper.transport)
            inbox = Inbox(sender.transport, sleeper.transport)
            exchange(inbox, sender, sleeper, 1)
            sender.transport.send_control(sender.endpoint, TAG, b"warm")
            inbox.take(1)
            recv = sleeper.transport.recv(2, sleeper.allocate(nbytes).buffer)
            inbox.step()
            until(lambda: not poller.poll(50), inbox.step)
            if is_control:
                sender.transport.send_control(sender.endpoint, TAG, pattern(nbytes, 2))
            else:
                sender.transport.send(sender.endpoint, 2, sender.allocate(nbytes).buffer)
            came = []

            def take():
                if poller.poll(10):
                    came.extend(completion.ticket for completion in sleeper.transport.progress())
                    came.extend(sleeper.transport.receive_control(inbox.limits))
                sender.transport.progress()

            until(lambda: came, take)
            expected = ControlMessage(TAG, pattern(nbytes, 2)) if is_control else recv
            assert came == [expected], "something else came"

    def test_control_messages_to_a_lost_peer_are_refused(self):
        pair = self.pair()
        try:
            if pair.lose_b is None:
                pytest.skip("this pair cannot lose a worker")
            pair.a.transport.send_control(pair.a.endpoint, TAG, b"before")
            pair.lose_b()
            errors = []

            def send():
                pair.a.transport.progress()
                for event in pair.a.transport.receive_control({}):
                    if isinstance(event, ControlFailed):
                        assert event.endpoint == pair.a.endpoint, "another endpoint failed"
                        errors.append(event.error)
                try:
                    pair.a.transport.send_control(pair.a.endpoint, TAG, b"after")
                except KVConnectorError as raised:
                    errors.append(raised)

            until(lambda: errors, send)
            assert isinstance(errors[-1], PeerLostError), f"wrong error {errors!r}"
        finally:
            pair.a.transport.close()
            pair.release()
