"""Look-ups of host names, in threads of their own: they take long if a name server does not answer.

Everybody who asks for a host while it is being looked up shares that look-up, so an engine of a thousand ranks on one
host costs one. At most `MAX_THREADS` look-ups run at a time, and others wait for their turn: the connection that asked
has a deadline of its own, and `Lookup.abandon` takes one out of the queue that nobody waits for any more.

Threads. Any thread may ask. `on_end` is called in the thread of the look-up and must not wait. A thread ends when
nothing is queued. A forked child has none of its parent's threads and starts with an empty table.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable

from kvconnector.errors import TransportError

MAX_THREADS = 32
"""A look-up may take a minute, and clients may name hosts that nobody knows."""


def is_name(host: str) -> bool:
    """Returns True if `host` is no IP address, and so has to be looked up."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return True
    return False


def host_addresses(host: str) -> tuple[str, ...]:
    """Return a host's addresses, each once, in the order in which to try them: the IPv4 ones first, since engines
    listen on IPv4 by default, and names such as localhost often have both.

    May block. Raises OSError or UnicodeError: it has none.
    """
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    each_once = dict.fromkeys(str(each[4][0]) for each in found)
    return tuple(sorted(each_once, key=lambda address: ":" in address))


def host_address(host: str) -> str:
    """Return the first of a host's `host_addresses`."""
    return host_addresses(host)[0]


class _Search:
    """The look-up of one host, queued or running. `waiting` has the look-ups that share it."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.waiting: dict[Lookup, None] = {}


class _Table:
    """All look-ups of this process."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything, in a forked child."""
        self._lock = threading.Lock()
        self._searches: dict[str, _Search] = {}
        self._queued: OrderedDict[str, _Search] = OrderedDict()
        self._num_threads = 0

    def add(self, lookup: Lookup) -> None:
        with self._lock:
            search = self._searches.get(lookup.host)
            if search is None:
                search = _Search(lookup.host)
                if self._num_threads < MAX_THREADS:
                    self._start_thread(lookup.host)
                self._searches[lookup.host] = self._queued[lookup.host] = search
            search.waiting[lookup] = None

    def remove(self, lookup: Lookup) -> None:
        with self._lock:
            search = self._searches.get(lookup.host)
            if search is None:
                return
            search.waiting.pop(lookup, None)
            if not search.waiting and lookup.host in self._queued:
                del self._queued[lookup.host], self._searches[lookup.host]

    def _start_thread(self, host: str) -> None:
        thread = threading.Thread(target=self._run, name="kvconnector-lookup", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            if not self._num_threads:  # otherwise another one will come to it
                raise TransportError(f"cannot look up a host name: {error}", host=host) from error
            return
        self._num_threads += 1

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._queued:
                    self._num_threads -= 1
                    return
                _, search = self._queued.popitem(last=False)
            addresses: tuple[str, ...] = ()
            error = ""
            try:
                addresses = host_addresses(search.host)
            except (OSError, UnicodeError) as exc:
                error = str(exc) or repr(exc)
            with self._lock:
                del self._searches[search.host]
                waiting = [*search.waiting]
            for lookup in waiting:
                lookup.end(addresses, error)


_TABLE = _Table()
os.register_at_fork(after_in_child=_TABLE.clear)


class Lookup:
    """What one connection waits for: the addresses of `host`. At its end `addresses` is set, or `error` if there are
    none; then it `is_over`, and `on_end` is called.

    Raises:
        TransportError: no thread can be started.
    """

    def __init__(self, host: str, on_end: Callable[[], None]) -> None:
        self.host = host
        self.addresses: tuple[str, ...] = ()
        self.error = ""
        self.is_over = False
        self._on_end = on_end
        _TABLE.add(self)

    def end(self, addresses: tuple[str, ...], error: str) -> None:
        """Record the outcome; for the look-up's thread."""
        self.addresses, self.error = addresses, error
        self.is_over = True  # last: the connection's thread reads the others after it
        self._on_end()

    def abandon(self) -> None:
        """Wait no longer. Idempotent."""
        _TABLE.remove(self)
