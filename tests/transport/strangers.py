"""Connections to UCX's ports from programs that are not kvconnector, as anybody who reaches a port can make them."""

import os
import socket
import struct
from pathlib import Path

UCX_TCP_MAGIC = struct.pack("<Q", 0xCAFEBABE12345678)
LISTENING = "0A"


def listening_ports(pid):
    """Return the TCP ports that a process listens on."""
    folder = f"/proc/{pid}/fd"
    names = [f"{folder}/{fd}" for fd in os.listdir(folder)]
    links = [os.readlink(name) for name in names if os.path.islink(name)]
    inodes = {link.removeprefix("socket:[").rstrip("]") for link in links}
    lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    fields = [line.split() for line in lines]
    return [int(f[1].partition(":")[2], 16) for f in fields if f[3] == LISTENING and f[9] in inodes]


def connect(port):
    return socket.create_connection(("127.0.0.1", port), timeout=10)


def unknown_message(payload):
    """Return a message of a kind that UCX's tcp does not know."""
    return struct.pack("<BI", 25, len(payload)) + payload
