"""Helpers to test control channels: limits for tests, and a recorder that waits for events."""

import os
import time
from dataclasses import replace

import zmq

from kvconnector.control.base import ControlLimits, Disconnected, Received
from kvconnector.control.security import CurveKeys

DEADLINE_S = 20.0
"""After this long a test that waits for an event fails. Far beyond what a loaded machine needs."""

STEP_S = 0.005


def small_limits(**changes):
    limits = ControlLimits(
        max_message_bytes=64 * 1024,
        max_queued_messages=1000,
        max_messages_per_turn=64,
        connect_timeout_s=15.0,
        heartbeat_interval_s=10.0,
        heartbeat_timeout_s=15.0,
        linger_s=5.0,
    )
    return replace(limits, **changes)


def new_keys(*also_authorized):
    """A fresh key pair, which trusts itself and others."""
    public, secret = (key.decode() for key in zmq.curve_keypair())
    return CurveKeys.from_values(secret_key=secret, authorized_clients=[public, *also_authorized])


class Recorder:
    """Polls several channels in turn from one thread and keeps, for each, what they reported."""

    def __init__(self, *channels):
        self.events = {channel: [] for channel in channels}

    def step(self):
        for channel, seen in self.events.items():
            seen.extend(channel.poll(STEP_S))

    def until(self, condition):
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, f"not within {DEADLINE_S} s; seen: {self.events}"
            self.step()

    def payloads(self, channel, handle=None):
        """Messages a channel received, from one handle or from all."""
        return [
            event.payload
            for event in self.events[channel]
            if isinstance(event, Received) and handle in (None, event.handle)
        ]

    def losses(self, channel, handle):
        """The errors of every `Disconnected` of one handle."""
        return [
            event.error
            for event in self.events[channel]
            if isinstance(event, Disconnected) and event.handle == handle
        ]

    def wait_payloads(self, channel, count):
        """Poll until a channel has received `count` messages."""
        self.until(lambda: len(self.payloads(channel)) >= count)

    def wait_loss(self, channel, handle):
        """Poll until a handle is reported lost; return why."""
        self.until(lambda: bool(self.losses(channel, handle)))
        return self.losses(channel, handle)[0]

    def link(self, near, far):
        """Connect, send one message each way, forget it; the handle on either side."""
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
