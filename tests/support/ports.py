"""Ports for servers that cannot choose their own."""

import random
import socket
from contextlib import ExitStack
from pathlib import Path

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST, HIGHEST = 10_000, 65_535


def free_ports(distances=(0,), highest=HIGHEST):
    """Return a port up to `highest` that is free on 127.0.0.1, together with those at `distances` from it.

    They are outside the kernel's range of automatic ports, so no other socket takes them before the server starts.
    Raises RuntimeError if there are none.
    """
    first, last = map(int, RANGE.read_text().split())
    ports = [port for port in range(LOWEST, highest + 1) if not first <= port <= last]
    for base in random.sample(ports, len(ports)):
        with ExitStack() as stack:
            try:
                for distance in distances:
                    if base + distance not in ports:
                        raise OSError
                    probe = stack.enter_context(socket.socket())
                    probe.bind(("127.0.0.1", base + distance))
            except OSError:
                continue
            return base
    raise RuntimeError("no free ports")
