"""Strangers on the control port: refused, counted, logged once, forgotten, while good clients are served."""

import contextlib
import os
import random
import resource
import socket
from pathlib import Path

from kvconnector.control.address import parse_address
from tests.control.test_control_zmq import open_channel
from tests.support.control_suite import Recorder, greeted, new_keys, small_limits

ROUNDS = 4
CONNECTIONS = 150
MEMORY_BYTES = 32 << 20
GREETING = b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00CURVE".ljust(64, b"\x00")
"""The first bytes of a client that speaks ZMTP 3."""


def opened(keys):
    return contextlib.closing(open_channel(keys, small_limits(linger_s=0.0)))


def num_fds():
    return len(os.listdir("/proc/self/fd"))


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def serve(recorder, near, far, handle):
    """Check that a good client's message arrives."""
    message = os.urandom(16)
    near.send(handle, message)
    recorder.until(lambda: message in recorder.payloads(far))
    recorder.events[far].clear()


def junk(rng):
    """Draw bytes that are not ZMTP, a truncated greeting, or a greeting followed by unreadable or too long commands."""
    return rng.choice(
        [
            rng.randbytes(rng.randrange(1, 3000)),
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            b"\xff" * 64,
            bytes(500),
            b"\x7f" + bytes(127),
            GREETING[:12] + rng.randbytes(200),
            GREETING[: rng.randrange(1, len(GREETING))],
            GREETING + rng.randbytes(rng.randrange(1, 500)),
            GREETING + b"\x06" + (1 << 50).to_bytes(8, "big") + rng.randbytes(200),
        ]
    )


def test_junk_connections_leave_nothing_behind():
    rng = random.Random(1)
    keys = new_keys()
    with opened(keys) as near, opened(keys) as far:
        recorder = Recorder(near, far)
        handle, _ = recorder.link(near, far)
        target = parse_address(far.address)
        before_fds, grown = num_fds(), 0
        for number in range(ROUNDS):
            with contextlib.ExitStack() as exits:
                for _ in range(CONNECTIONS):
                    stranger = exits.enter_context(
                        socket.create_connection((target.host, target.port), 5.0)
                    )
                    with contextlib.suppress(OSError):  # it may have been refused already
                        stranger.sendall(junk(rng))
                serve(recorder, near, far, handle)
            recorder.until(lambda: num_fds() <= before_fds)
            if number == 0:
                grown = resident_bytes()
        assert resident_bytes() - grown < MEMORY_BYTES
        serve(recorder, near, far, handle)


def test_strangers_that_state_one_identity_leave_nothing_behind():
    """A good client states none. Libzmq would ignore the second connection of an identity, but keep what it sent."""
    message = b"\x02" + (50_000).to_bytes(8, "big") + bytes(50_000)
    with opened(None) as near, opened(None) as far:
        recorder = Recorder(near, far)
        handle, _ = recorder.link(near, far)
        target = parse_address(far.address)
        before_fds = grown = 0
        for number in range(100):
            with contextlib.ExitStack() as exits:
                for _ in range(10):
                    stranger = exits.enter_context(greeted(target, (b"Identity", b"same")))
                    stranger.sendall(message)
                serve(recorder, near, far, handle)
            if number == 9:
                before_fds, grown = num_fds(), resident_bytes()
        recorder.until(lambda: num_fds() <= before_fds)
        assert resident_bytes() - grown < MEMORY_BYTES // 2
        serve(recorder, near, far, handle)
