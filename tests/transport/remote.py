"""A transport in a second process, behind a proxy that fulfils the same contract."""

import logging.handlers
import select
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

from kvconnector.transport import Buffer
from kvconnector.transport.ucx import open_ucx_transport
from tests.support.loopback import NO_FILENO
from tests.support.remote import RemoteObject
from tests.support.transport_suite import HostMemory
from tests.support.waiting import until


class RemoteMemory:
    """Memory of the child. `buffer.address` is the child's."""

    def __init__(self, remote, nbytes):
        self._remote = remote
        self._key, address = remote.call("allocate", nbytes)
        self.buffer = Buffer(address, nbytes, "cpu", self)

    def write(self, content):
        self._remote.call("write", self._key, content)

    def read(self):
        return self._remote.call("read", self._key)


class RemoteTransport(RemoteObject):
    """A `UcxTransport` in a child process, with its settings. `prefix` is a command that runs the child elsewhere."""

    def __init__(self, settings, prefix=()):
        super().__init__("tests.transport.remote:Child", settings, prefix=prefix)
        self._is_closing = self._is_closed = False

    @property
    def address(self):
        return self.call("address")

    def send(self, endpoint, tag, buffer):
        return self.call("send", endpoint, tag, replace(buffer, owner=None))

    def recv(self, tag, buffer):
        return self.call("recv", tag, replace(buffer, owner=None))

    def fileno(self):
        return NO_FILENO

    def poller(self):
        """Return what waits for the child's descriptor."""
        return SimpleNamespace(poll=partial(self.call, "wait_readable"))

    def allocate(self, nbytes):
        return RemoteMemory(self, nbytes)

    def begin_close(self):
        """Let the child close; `close` waits for it."""
        if not self._is_closing:
            self._is_closing = True
            self.begin("close")

    def close(self):
        self.begin_close()
        if not self._is_closed:
            self._is_closed = True
            self.answer()

    def kill(self):
        self._is_closing = self._is_closed = True
        super().kill()


def first_error(transport, ticket):
    """Drive one side until a ticket completes. Returns its error."""
    ended = {}

    def step():
        ended.update((each.ticket, each.error) for each in transport.progress())

    until(lambda: ticket in ended, step)
    return ended[ticket]


class Child:
    """The other end: a transport, with further methods for tests."""

    def __init__(self, settings):
        self._memory = []
        self._logged = logging.handlers.BufferingHandler(1000)
        logging.getLogger().addHandler(self._logged)
        self._transport = open_ucx_transport(**settings)

    def __getattr__(self, name):
        return getattr(self._transport, name)

    def allocate(self, nbytes):
        self._memory.append(memory := HostMemory(nbytes))
        return len(self._memory) - 1, memory.buffer.address

    def write(self, key, content):
        self._memory[key].write(content)

    def read(self, key):
        return self._memory[key].read()

    def logged(self):
        """Return the texts of the log so far."""
        return [record.getMessage() for record in self._logged.buffer]

    def drive(self, seconds):
        """Progress for a while. Returns the number of completions."""
        count, end_s = 0, time.monotonic() + seconds
        while time.monotonic() < end_s:
            count += len(self._transport.progress())
            time.sleep(0.0005)
        return count

    def wait_readable(self, timeout_ms):
        """Sleep until the transport's descriptor is readable. Returns whether it is."""
        poller = select.poll()
        poller.register(self._transport.fileno(), select.POLLIN)
        return bool(poller.poll(timeout_ms))

    def wakeups(self, seconds):
        """Sleep for a while, as a driver does. Returns how often the transport woke it."""
        count, end_s = 0, time.monotonic() + seconds
        poller = select.poll()
        poller.register(self._transport.fileno(), select.POLLIN)
        self._transport.progress()
        while time.monotonic() < end_s:
            if poller.poll(20):
                count += 1
                self._transport.progress()
        return count
