"""UCX's listening sockets: whether it still listens, and how many files this process may open.

UCX's tcp closes a listening socket for good at the first error of accept(2). Whoever reaches the port can cause one, by
connecting until this process may open no more files. Peers that are connected notice nothing, and new ones get no
answer. Only a firewall prevents it (docs/security.md). Here the socket's end is noticed and named, so that an operator
does not search for it.

Threads. UCX accepts, and closes its sockets, in a thread of its own. The transport's owner calls everything here.
"""

from __future__ import annotations

import logging
import os
import resource
import socket
from collections.abc import Mapping
from contextlib import suppress

from kvconnector.errors import TransportError

_logger = logging.getLogger(__name__)

FEW_DESCRIPTORS = 1024
"""A lower limit causes a warning. A peer takes five descriptors on the control channel, besides UCX's."""


def descriptor_limit() -> int | None:
    """Return how many files this process may open (`ulimit -n`); None for any number."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def log_descriptor_limit() -> None:
    """Log how many files this process may open, with a warning if these are few."""
    limit = descriptor_limit()
    few = limit is not None and limit < FEW_DESCRIPTORS
    _logger.log(
        logging.WARNING if few else logging.INFO,
        "this process may open %s files, of which a peer takes five besides UCX's connections%s",
        "any number of" if limit is None else limit,
        ": raise the limit (ulimit -n)" if few else "",
    )


def open_sockets() -> dict[int, int]:
    """Return the inode of each socket of this process, by descriptor. Raises TransportError: no file may be opened."""
    found = {}
    try:
        names = os.listdir("/proc/self/fd")
    except OSError as error:
        raise TransportError(
            "the files of this process cannot be listed", reason=str(error)
        ) from error
    for name in names:
        with suppress(OSError):  # closed meanwhile
            kind, _, inode = os.readlink(f"/proc/self/fd/{name}").partition(":")
            if kind == "socket":
                found[int(name)] = int(inode.strip("[]"))
    return found


class Listeners:
    """The sockets on which UCX listens: those that listen now and were not there `before` a worker was made."""

    def __init__(self, before: Mapping[int, int]) -> None:
        self._listening: dict[int, tuple[int, str]] = {}
        """The inode and the address of each, by descriptor."""
        for fd, inode in open_sockets().items():
            if before.get(fd) != inode and (address := _address_listened_on(fd)):
                self._listening[fd] = inode, address

    def __repr__(self) -> str:
        addresses = [address for _, address in self._listening.values()]
        return f"<Listeners on {', '.join(addresses) or 'nothing'}>"

    def report(self) -> None:
        """Log each socket that UCX has closed since the last call."""
        for fd, (inode, address) in list(self._listening.items()):
            if not _is_open(fd, inode):
                del self._listening[fd]
                _logger.error(
                    "UCX no longer listens on %s: peers that are not connected yet cannot reach this worker. It gives"
                    " up at the first connection that it cannot accept, mostly because the %s files that this process"
                    " may open are used up. See who connects (ss -tnp), firewall the port, raise ulimit -n, restart",
                    address,
                    descriptor_limit(),
                )


def _address_listened_on(fd: int) -> str:
    """Return the address on which a TCP socket listens; "" if it is none that listens."""
    with suppress(OSError), socket.socket(fileno=os.dup(fd)) as found:
        is_tcp = found.family in (socket.AF_INET, socket.AF_INET6)
        if is_tcp and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            host, port = found.getsockname()[:2]
            return f"{host} port {port}"
    return ""


def _is_open(fd: int, inode: int) -> bool:
    try:
        return os.fstat(fd).st_ino == inode
    except OSError:
        return False
