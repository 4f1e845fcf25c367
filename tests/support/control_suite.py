"""The contract of a control channel as tests. A subclass of `ControlChannelSuite` has `open(limits)`, which makes a
channel that can reach, and be reached by, the others of its test.

Nothing here sleeps and hopes: every wait polls the channels until a condition holds, and fails after `DEADLINE_S`.
"""

import contextlib
import os
import socket
import threading
import time
from dataclasses import replace

import pytest
import zmq

from kvconnector.control.base import (
    ControlLimits,
    Disconnected,
    MessageTooLargeError,
    PeerHandle,
    Received,
)
from kvconnector.control.security import CurveKeys
from kvconnector.errors import (
    ConfigError,
    PeerLostError,
    PeerUnreachableError,
    RemoteError,
    TransportError,
)
from tests.support import waiting

DEADLINE_S = 20.0
"""A test that waits this long for an event fails. It is far more than a loaded machine needs."""

STEP_S = 0.005


def small_limits(**changes):
    limits = ControlLimits(
        max_message_bytes=64 * 1024,
        max_queued_messages=1000,
        max_messages_per_turn=64,
        connect_timeout_s=15.0,
        host_timeout_s=15.0,
        linger_s=5.0,
    )
    return replace(limits, **changes)


def new_keys(*also_authorized):
    """Make a key pair, which trusts itself and others."""
    public, secret = (key.decode() for key in zmq.curve_keypair())
    return CurveKeys.from_values(secret_key=secret, authorized_clients=[public, *also_authorized])


def greeted(target, *properties):
    """Return a plain connection to a channel without keys. Libzmq has greeted it; it has stated these properties."""
    ready = b"\x05READY" + b"".join(
        bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value
        for name, value in ((b"Socket-Type", b"DEALER"), *properties)
    )
    stranger = socket.create_connection((target.host, target.port), 5.0)
    stranger.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(16 + 32))
    stranger.sendall(b"\x04" + bytes([len(ready)]) + ready)
    answer = b""
    while b"Identity" not in answer:  # the end of libzmq's
        answer += stranger.recv(1000)
    return stranger


class Recorder:
    """Polls several channels in turn from one thread and keeps, for each, what they reported."""

    def __init__(self, *channels):
        self.events = {channel: [] for channel in channels}

    def step(self):
        for channel, seen in self.events.items():
            seen.extend(channel.poll(STEP_S))

    def until(self, condition):
        waiting.until(condition, self.step, lambda: self.events)

    def payloads(self, channel, handle=None):
        """Return the messages that a channel received, from one handle or from all."""
        return [
            event.payload
            for event in self.events[channel]
            if isinstance(event, Received) and handle in (None, event.handle)
        ]

    def losses(self, channel, handle):
        """Return the errors of all `Disconnected` events of one handle."""
        return [
            event.error
            for event in self.events[channel]
            if isinstance(event, Disconnected) and event.handle == handle
        ]

    def wait_payloads(self, channel, count):
        """Poll until a channel has received `count` messages."""
        self.until(lambda: len(self.payloads(channel)) >= count)

    def wait_loss(self, channel, handle):
        """Poll until a handle is reported lost. Returns the error."""
        self.until(lambda: bool(self.losses(channel, handle)))
        return self.losses(channel, handle)[0]

    def link(self, near, far):
        """Connect, send one message each way, and forget both. Returns the handle on either side."""
        near_handle = near.connect(far.address, far.server_key)
        greeting = os.urandom(8)
        near.send(near_handle, greeting)
        self.until(lambda: greeting in self.payloads(far))
        far_handle = next(
            event.handle
            for event in self.events[far]
            if isinstance(event, Received) and event.payload == greeting
        )
        far.send(far_handle, greeting)
        self.until(lambda: greeting in self.payloads(near, near_handle))
        self.events[near].clear()
        self.events[far].clear()
        return near_handle, far_handle


class LinkEnd:
    """One end of a connection between two channels, for processes of their own."""

    def __init__(self, channel):
        self._channel = channel
        self._recorder = Recorder(channel)
        self._handle = None
        self.address = channel.address

    def connect(self, address):
        self._handle = self._channel.connect(address)
        self._channel.send(self._handle, b"hello")

    def meet(self):
        """Wait for the other end's first message, and answer the one that came on a connection that it opened."""
        self._recorder.wait_payloads(self._channel, 1)
        (event,) = self._recorder.events[self._channel]
        if self._handle is None:
            self._channel.send(event.handle, b"hello")
        self._handle = event.handle
        self._recorder.events[self._channel].clear()


class ControlChannelSuite:
    """The contract of `kvconnector.control.zmq`. A subclass's `open` chooses the host and the keys."""

    @contextlib.contextmanager
    def channels(self, *limits):
        """Open one channel for each of `limits`; close them at the end."""
        with contextlib.ExitStack() as stack:
            opened = []
            for each in limits:
                opened.append(self.open(each))
                stack.callback(opened[-1].close)
            yield opened

    @contextlib.contextmanager
    def pair(self, **limits):
        with self.channels(*[small_limits(**limits)] * 2) as (near, far):
            yield near, far, Recorder(near, far)

    def test_messages_arrive_in_order(self):
        with self.pair() as (near, far, recorder):
            near_handle, far_handle = recorder.link(near, far)
            expected = [f"message {number}".encode() for number in range(500)]
            for payload in expected:
                near.send(near_handle, payload)
                far.send(far_handle, payload)
            recorder.wait_payloads(near, len(expected))
            recorder.wait_payloads(far, len(expected))
            assert recorder.payloads(far, far_handle) == expected
            assert recorder.payloads(near, near_handle) == expected

    def test_a_sender_refuses_messages_above_the_limit(self):
        with self.pair() as (near, far, recorder):
            near_handle, far_handle = recorder.link(near, far)
            longest = os.urandom(small_limits().max_message_bytes)
            for channel, handle in ((near, near_handle), (far, far_handle)):
                with pytest.raises(MessageTooLargeError) as refused:
                    channel.send(handle, longest + b"!")
                assert refused.value.context["message_bytes"] == len(longest) + 1
                channel.send(handle, longest)
            recorder.wait_payloads(near, 1)
            recorder.wait_payloads(far, 1)
            assert recorder.payloads(far) == recorder.payloads(near) == [longest]

    @pytest.mark.parametrize("sender_connects", [True, False])
    def test_a_receiver_disconnects_on_a_message_above_its_limit(self, sender_connects):
        small, large = small_limits(max_message_bytes=2000), small_limits(max_message_bytes=4000)
        limits = (large, small) if sender_connects else (small, large)
        with self.channels(*limits) as (near, far):
            recorder = Recorder(near, far)
            near_handle, far_handle = recorder.link(near, far)
            sender, handle = (near, near_handle) if sender_connects else (far, far_handle)
            receiver = far if sender_connects else near
            sender.send(handle, bytes(2000))
            recorder.wait_payloads(receiver, 1)
            sender.send(handle, bytes(2001))
            assert isinstance(recorder.wait_loss(near, near_handle), RemoteError)
            assert isinstance(recorder.wait_loss(far, far_handle), RemoteError)
            assert recorder.payloads(receiver) == [bytes(2000)]

    def test_an_accepting_side_that_disconnects_receives_nothing(self):
        with self.pair() as (near, far, recorder):
            near_handle, far_handle = recorder.link(near, far)
            far.disconnect(far_handle)
            far.disconnect(far_handle)
            near.send(near_handle, b"ignored")
            with pytest.raises(PeerLostError):
                far.send(far_handle, b"too late")
            near.disconnect(near_handle)
            again = near.connect(far.address, far.server_key)
            near.send(again, b"heard")
            recorder.until(lambda: b"heard" in recorder.payloads(far))
            near.disconnect(again)
            recorder.until(lambda: isinstance(recorder.events[far][-1], Disconnected))
            assert recorder.payloads(far) == [b"heard"]
            assert recorder.losses(far, far_handle) == []

    @pytest.mark.parametrize("end", ["disconnects", "closes", "accepting side closes"])
    def test_a_loss_is_reported_once_after_the_last_message(self, end):
        with self.pair(max_messages_per_turn=3) as (near, far, recorder):
            near_handle, far_handle = recorder.link(near, far)
            gone, theirs, there, ours = near, near_handle, far, far_handle
            if end == "accepting side closes":
                gone, theirs, there, ours = far, far_handle, near, near_handle
            expected = [bytes([number]) for number in range(50)]
            for payload in expected:
                gone.send(theirs, payload)
            if end == "disconnects":
                gone.disconnect(theirs)
                gone.disconnect(theirs)
                assert gone.poll(0.0) == []
            else:
                gone.close()
            survivor = Recorder(there)
            assert isinstance(survivor.wait_loss(there, ours), PeerLostError)
            survivor.step()
            survivor.step()
            assert survivor.events[there][:-1] == [Received(ours, each) for each in expected]
            for channel, handle in ((gone, theirs), (there, ours)):
                with pytest.raises(PeerLostError):
                    channel.send(handle, b"too late")

    def test_connecting_to_a_closed_channel_fails(self):
        with self.pair() as (near, far, _recorder):
            address, key = far.address, far.server_key
            far.close()
            handle = near.connect(address, key)
            error = Recorder(near).wait_loss(near, handle)
            assert isinstance(error, PeerUnreachableError)
            assert address in str(error)
            with pytest.raises(PeerLostError):
                near.send(handle, b"too late")

    @pytest.mark.parametrize("address", ["", "127.0.0.1:5", "tcp://*:5", "tcp://h:0", "ipc://x"])
    def test_malformed_addresses_are_refused_at_once(self, address):
        with self.pair() as (near, far, _recorder), pytest.raises(ConfigError):
            near.connect(address, far.server_key)

    def test_full_queue_ends_the_connection_instead_of_blocking(self):
        limits = {"max_queued_messages": 4, "max_message_bytes": 1 << 20}
        with self.pair(**limits) as (near, far, recorder):
            near_handle, _far_handle = recorder.link(near, far)
            with pytest.raises(PeerLostError, match="queued_messages="):
                waiting.until(lambda: False, lambda: near.send(near_handle, bytes(1 << 20)))
            with pytest.raises(PeerLostError):
                near.send(near_handle, b"after it")
            assert isinstance(Recorder(near).wait_loss(near, near_handle), PeerLostError)

    def test_one_poll_takes_a_bounded_number_of_messages(self):
        with self.pair(max_messages_per_turn=5) as (near, far, recorder):
            near_handle, _far_handle = recorder.link(near, far)
            for number in range(40):
                near.send(near_handle, bytes([number]))
            received = []

            def poll():
                events = far.poll(STEP_S)
                assert len(events) <= 5
                received.extend(events)

            waiting.until(lambda: len(received) == 40, poll, lambda: received)

    def test_wake_ends_a_poll_of_another_thread(self):
        with self.pair() as (near, _far, _recorder):
            near.wake()
            near.wake()
            assert _poll_returns(near, before=lambda: None) == []
            assert _poll_returns(near, before=near.wake) == []

    def test_close_is_idempotent_and_frees_everything(self):
        self._connect_and_close()
        threads, fds = set(threading.enumerate()), os.listdir("/proc/self/fd")
        for _ in range(3):
            self._connect_and_close()
        assert set(threading.enumerate()) == threads
        assert len(os.listdir("/proc/self/fd")) == len(fds)

    def test_closed_channel_refuses_work(self):
        with self.pair() as (near, far, _recorder):
            near.close()
            near.wake()
            with pytest.raises(TransportError):
                near.poll(0.0)
            with pytest.raises(TransportError):
                near.connect(far.address, far.server_key)
            with pytest.raises(PeerLostError):
                near.send(PeerHandle(1), b"")
            near.disconnect(PeerHandle(1))

    def _connect_and_close(self):
        with self.pair(linger_s=0.05) as (near, far, recorder):
            recorder.link(near, far)
            recorder.link(far, near)
            unread = near.connect(far.address, far.server_key)
            near.send(unread, b"unread")
            near.close()
            far.close()
            near.close()


def _poll_returns(channel, *, before):
    """Poll for `DEADLINE_S` while another thread runs `before`; fail unless it returned earlier."""
    other = threading.Thread(target=before)
    started = time.monotonic()
    other.start()
    events = channel.poll(DEADLINE_S)
    waited_s = time.monotonic() - started
    other.join()
    assert waited_s < DEADLINE_S, "poll waited for its whole timeout"
    return events
