"""What every transport must do with messages that no receive was posted for, beside `transport_suite`."""

import contextlib
import time

import pytest

from kvconnector.errors import KVConnectorError, LocalError, PeerLostError
from kvconnector.transport.base import (
    CONTROL_TAG_BIT,
    MAX_UNSENT_CONTROL,
    NO_FILENO,
    ControlFailed,
    ControlMessage,
    ControlRefused,
)
from tests.support.transport_suite import (
    DEADLINE_S,
    Ledger,
    TransportSuite,
    exchange,
    pattern,
    quiet,
)

TAG = CONTROL_TAG_BIT | (1 << 62) | 77
LIMIT_BYTES = 2 << 20
SIZES_BYTES = (0, 1, 7, 300, 20_000, 200_000, LIMIT_BYTES)


class Inbox(Ledger):
    """Also books what the second worker takes of control messages."""

    def __init__(self, a, b):
        super().__init__(a.transport, b.transport)
        self.a, self.b = a, b
        self.limits = {TAG: LIMIT_BYTES}
        self.events = []

    def step(self):
        count = super().step()
        self.events += self.b.transport.receive_control(self.limits)
        return count

    def take(self, count):
        self.wait_until(lambda: len(self.events) >= count)
        taken, self.events = self.events[:count], self.events[count:]
        return taken


class TransportControlSuite(TransportSuite):
    """These tests too. Each makes its own pair."""

    @contextlib.contextmanager
    def inbox(self):
        with self.workers() as (a, b, _):
            yield Inbox(a, b)

    def test_control_messages_of_every_size_arrive_in_order(self):
        with self.inbox() as inbox:
            payloads = [pattern(nbytes, seed) for seed, nbytes in enumerate(SIZES_BYTES * 2)]
            for payload in payloads:
                inbox.a.transport.send_control(inbox.a.endpoint, TAG, payload)
            arrived = inbox.take(len(payloads))
            assert arrived == [ControlMessage(TAG, p) for p in payloads], "other messages came"

    def test_unknown_tags_and_long_control_messages_are_refused(self):
        with self.inbox() as inbox:
            unknown, limited = CONTROL_TAG_BIT | 6, CONTROL_TAG_BIT | 7
            inbox.limits = {limited: 1000}
            for tag, nbytes in ((unknown, 9), (limited, 1001), (limited, 300_000), (limited, 1000)):
                inbox.a.transport.send_control(inbox.a.endpoint, tag, pattern(nbytes, 1))
            events = inbox.take(4)
            for event in (
                ControlRefused(unknown, 9),
                ControlRefused(limited, 1001),
                ControlRefused(limited, 300_000),
                ControlMessage(limited, pattern(1000, 1)),
            ):
                assert event in events, f"{event!r:.80} is missing"

    def test_messages_that_nobody_awaits_are_dropped(self):
        block, awaited = 16, 5 * 16
        for nbytes in (64, 300_000):
            with self.inbox() as inbox:
                a, b = inbox.a, inbox.b
                sent, received, rest = a.allocate(nbytes), b.allocate(nbytes), b.allocate(nbytes)
                sent.write(pattern(nbytes, 1))
                tags = [3, awaited + 2, 3 * block, 4 * block, awaited + 1]
                sends = [(0, a.transport.send(a.endpoint, tag, sent.buffer)) for tag in tags]
                for count, tag, memory in ((1, 2, received), (2, 1, rest)):
                    dropped = []
                    while sum(dropped) < count:
                        assert len(dropped) < 100_000, "messages of nobody are kept"
                        inbox.step()
                        dropped.append(b.transport.discard_unexpected([awaited], -block))
                    assert sum(dropped) == count, "more was dropped than nobody awaits"
                    recv = (1, b.transport.recv(awaited + tag, memory.buffer))
                    assert inbox.wait(recv) == [None], "what is awaited did not arrive"
                    assert memory.read() == pattern(nbytes, 1), "it arrived changed"
                inbox.wait(*sends)

    def test_a_peer_that_takes_nothing_gets_no_more_than_so_many(self):
        with self.inbox() as inbox:
            a = inbox.a
            payload = pattern(64_000, 1)
            try:
                for _ in range(8 * MAX_UNSENT_CONTROL):
                    a.transport.send_control(a.endpoint, TAG, payload)
            except PeerLostError:
                return
            raise AssertionError("nothing bounds the messages on their way")

    def test_a_closed_transport_takes_no_control_messages(self):
        with self.inbox() as inbox:
            a, b = inbox.a, inbox.b
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

    def test_control_messages_go_out_before_an_orderly_end(self):
        with self.inbox() as inbox:
            inbox.a.transport.send_control(inbox.a.endpoint, TAG, b"warm")
            inbox.take(1)
            payloads = [pattern(100, seed) for seed in range(20)]
            for payload in payloads:
                inbox.a.transport.send_control(inbox.a.endpoint, TAG, payload)
            inbox.a.transport.close()
            arrived = inbox.take(len(payloads))
            assert arrived == [ControlMessage(TAG, p) for p in payloads], "other messages came"

    @pytest.mark.parametrize("nbytes", [8, 300_000, 1 << 20])
    @pytest.mark.parametrize("is_control", [False, True])
    def test_a_message_wakes_a_sleeper(self, is_control, nbytes):
        """Receive as a driver thread does: `progress()` only when the descriptor says so."""
        with self.workers() as (sleeper, sender, _):
            if sleeper.transport.fileno() == NO_FILENO:
                return
            inbox = Inbox(sender, sleeper)
            exchange(inbox, sender, sleeper, 1)
            sender.transport.send_control(sender.endpoint, TAG, b"warm")
            inbox.take(1)
            recv = sleeper.transport.recv(2, sleeper.allocate(nbytes).buffer)
            poller, deadline_s = quiet(sleeper.transport, inbox), time.monotonic() + DEADLINE_S
            if is_control:
                sender.transport.send_control(sender.endpoint, TAG, pattern(nbytes, 2))
            else:
                sender.transport.send(sender.endpoint, 2, sender.allocate(nbytes).buffer)
            came = []
            while not came:
                assert time.monotonic() < deadline_s, "the message did not wake the sleeper"
                if poller.poll(10):
                    came += [completion.ticket for completion in sleeper.transport.progress()]
                    came += sleeper.transport.receive_control(inbox.limits)
                sender.transport.progress()
            expected = ControlMessage(TAG, pattern(nbytes, 2)) if is_control else recv
            assert came == [expected], "something else came"

    def test_a_lost_peer_refuses_control_messages(self):
        pair = self.pair()
        try:
            lose = pair.lose_b
            if lose is None:
                return
            pair.a.transport.send_control(pair.a.endpoint, TAG, b"before")
            lose()
            deadline_s = time.monotonic() + DEADLINE_S
            error = None
            while error is None:
                assert time.monotonic() < deadline_s, "the loss was not noticed"
                pair.a.transport.progress()
                for event in pair.a.transport.receive_control({}):
                    if isinstance(event, ControlFailed):
                        assert event.endpoint == pair.a.endpoint, "another endpoint failed"
                        error = event.error
                try:
                    pair.a.transport.send_control(pair.a.endpoint, TAG, b"after")
                except KVConnectorError as raised:
                    error = raised
            assert isinstance(error, PeerLostError), f"wrong error {error!r}"
        finally:
            pair.a.transport.close()
            pair.release()
