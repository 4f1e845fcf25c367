"""Ports for servers that cannot choose their own."""

import random
import socket
from contextlib import ExitStack
from pathlib import Path

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST, HIGHEST = 10_000, 65_535
TRIES = 1000


def free_ports(distances=(0,), highest=HIGHEST):
    """Return a port up to `highest` that is free on 127.0.0.1, together with those at `distances` from it.

    They are outside the kernel's range of automatic ports, so no other socket takes them before the server starts.
    Raises RuntimeError if none is found.
    """
    first, last = map(int, RANGE.read_text().split())
    outside = [range(LOWEST, min(first, highest + 1)), range(last + 1, highest + 1)]
    sizes = [len(ports) for ports in outside]
    for _ in range(TRIES if any(sizes) else 0):
        base = random.choice(*random.choices(outside, sizes))
        wanted = [base + distance for distance in distances]
        if all(any(port in ports for ports in outside) for port in wanted) and _are_free(wanted):
            return base
    raise RuntimeError("no free ports")


def _are_free(ports):
    with ExitStack() as stack:
        try:
            for port in ports:
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
