"""Look-ups of host names, each in a thread of its own: they take long if a name server does not answer."""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections.abc import Callable

from kvconnector.errors import TransportError

MAX_LOOKUPS = 256
"""A look-up may take a minute, and clients may name hosts that nobody knows."""
_free = threading.BoundedSemaphore(MAX_LOOKUPS)


def is_name(host: str) -> bool:
    """Returns True if `host` is no IP address, and so has to be looked up."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return True
    return False


def host_address(host: str) -> str:
    """Return a host's address, an IPv4 one if it has any. May block. Raises OSError or UnicodeError: it has none."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    # engines listen on IPv4 by default, and names such as localhost often have both
    return min([str(each[4][0]) for each in found], key=lambda address: ":" in address)


class Lookup:
    """A `host_address` call in a thread of its own, which then sets `address` or `error`, and calls `on_end`.

    Raises:
        TransportError: no thread can be started, or `MAX_LOOKUPS` of this process have not ended.
    """

    def __init__(self, host: str, on_end: Callable[[], None]) -> None:
        self.address = self.error = ""
        self._host, self._on_end = host, on_end
        thread = threading.Thread(target=self._run, name="kvconnector-lookup", daemon=True)
        if not _free.acquire(blocking=False):
            raise TransportError("too many host names are being looked up", host=host)
        try:
            thread.start()
        except RuntimeError as error:
            _free.release()
            raise TransportError(f"cannot look up a host name: {error}", host=host) from error

    @property
    def is_over(self) -> bool:
        return bool(self.address or self.error)

    def _run(self) -> None:
        try:
            self.address = host_address(self._host)
        except (OSError, UnicodeError) as error:
            self.error = str(error)
        finally:
            _free.release()
        self._on_end()
