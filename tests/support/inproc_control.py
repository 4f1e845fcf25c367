"""The control channel of a `World` in memory, over a hub, with faults that tests choose.

Deterministic: one thread owns all channels of a hub, and the same calls and the same seed give the same events. Nothing
here waits or reads a clock; delays are counted in calls of `poll`.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from dataclasses import dataclass, field

from kvconnector.control.address import HostPort
from kvconnector.control.base import Disconnected, PeerHandle, Received
from kvconnector.errors import KVConnectorError, PeerLostError, PeerUnreachableError


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlFaults:
    """Faults of a hub. A message is lost or duplicated with these probabilities, and held back for 0 to
    `max_delay_polls` polls of its receiver, with later ones of its connection after it. With `only`, the address of a
    channel, they are those of that channel's connections.
    """

    drop_probability: float = 0.0
    duplicate_probability: float = 0.0
    max_delay_polls: int = 0
    only: str = ""


@dataclass(slots=True, eq=False)
class _End:
    """One side of a connection. `inbox` holds messages under way to it, each with the owner's poll count from which it
    may be delivered. An accepting side has no handle before its first message is delivered.
    """

    owner: InprocControlChannel
    peer_address: str
    is_accepting: bool = False
    handle: PeerHandle | None = None
    inbox: deque[tuple[int, bytes]] = field(default_factory=deque)
    error: KVConnectorError | None = None
    """Why the connection is over."""
    other: _End | None = None
    is_ignored: bool = False
    """The accepting side disconnected: messages that still arrive are dropped, as by a bound socket."""


class ControlHub:
    """The network between the channels of a world. `faults` apply to messages sent from then on."""

    def __init__(self, *, seed):
        self.faults = ControlFaults()
        self.random = random.Random(seed)
        self.channels = {}
        self._ports = itertools.count(1)

    def open(self):
        """Make a channel with an address of its own, which is never reused."""
        address = str(HostPort("127.0.0.1", next(self._ports)))
        self.channels[address] = InprocControlChannel(self, address)
        return self.channels[address]

    def sever(self, first, second):
        """Break every connection between two channels; messages under way are lost."""
        for end in first.ends():
            if end.peer_address == second.address:
                addresses = (first.address, second.address)
                _break(end, PeerLostError("connection was severed", addresses=addresses))
                end.inbox.clear()
                end.other.inbox.clear()

    def close(self):
        for channel in list(self.channels.values()):
            channel.close()


class InprocControlChannel:
    """The part of a `ControlChannel` that workers in one thread need; the contract is in `kvconnector.control.zmq`."""

    server_key, security = "", None
    max_message_bytes = 16 << 20
    fd = -1

    def __init__(self, hub, address):
        self.address = address
        self._hub = hub
        self._handles = itertools.count(1)
        self._ends = {}
        self._by_handle = {}
        self._polls = 0

    def connect(self, address, server_key=""):
        near = _End(self, address)
        peer = self._hub.channels.get(address)
        self._ends[near] = None
        if peer is None:
            near.error = PeerUnreachableError("no connection could be opened", address=address)
        else:
            near.other = _End(peer, self.address, is_accepting=True, other=near)
            peer._ends[near.other] = None
        return self._name(near)

    def send(self, handle, payload):
        near = self._by_handle.get(handle)
        if near is None or near.error is not None or near.other is None:
            cause = "" if near is None else str(near.error)
            raise PeerLostError("connection is lost", handle=handle, cause=cause)
        near.other.owner._accept(near.other, payload)

    def peer_of(self, handle):
        near = self._by_handle.get(handle)
        return "a lost peer" if near is None else near.peer_address

    def origin_of(self, handle):
        near = self._by_handle.get(handle)
        return near.peer_address if near is not None and near.is_accepting else ""

    def disconnect(self, handle):
        near = self._by_handle.get(handle)
        if near is None:
            return
        if near.is_accepting and near.error is None:
            near.is_ignored = True
            near.inbox.clear()
            del self._by_handle[handle]
        else:
            self._discard(near)

    def poll(self, timeout_s):
        """Return the messages that are due, then the connections that are over and fully read."""
        self._polls += 1
        ready = [end for end in self._ends for due, _ in end.inbox if due < self._polls]
        self._hub.random.shuffle(ready)
        events = [Received(end.handle or self._name(end), end.inbox.popleft()[1]) for end in ready]
        for end in [end for end in self._ends if end.error is not None and not end.inbox]:
            self._forget(end)
            if end.handle is not None and not end.is_ignored:
                events.append(Disconnected(end.handle, end.error))
        return events

    @property
    def is_settled(self):
        return not any(end.inbox or end.error is not None for end in self._ends)

    def wake(self):
        """No thread sleeps in `poll`."""

    def close(self):
        if self._hub.channels.pop(self.address, None) is not None:
            for end in list(self._ends):
                self._discard(end)

    def ends(self):
        """Return this side of every connection that is not over."""
        return [end for end in self._ends if end.error is None]

    def _accept(self, end, payload):
        """Send a message to `end`, with the hub's faults."""
        faults, choose = self._hub.faults, self._hub.random
        if faults.only and faults.only not in (self.address, end.peer_address):
            faults = ControlFaults()
        if end.is_ignored or choose.random() < faults.drop_probability:
            return
        copies = 2 if choose.random() < faults.duplicate_probability else 1
        due = self._polls + choose.randint(0, faults.max_delay_polls)
        if end.inbox:
            due = max(due, end.inbox[-1][0])
        end.inbox.extend([(due, payload)] * copies)

    def _name(self, end):
        end.handle = PeerHandle(next(self._handles))
        self._by_handle[end.handle] = end
        return end.handle

    def _discard(self, end):
        """End a connection from this side, without a report here."""
        if end.other is not None and end.error is None:
            _break(end, PeerLostError("peer closed the connection", address=self.address))
        self._forget(end)

    def _forget(self, end):
        del self._ends[end]
        if end.handle is not None:
            self._by_handle.pop(end.handle, None)


def _break(end, error):
    """End a connection on both sides. Each reports it when its inbox is empty."""
    for side in (end, end.other):
        if side.error is None:
            side.error = error
