"""The control channel of a `World` in memory, over a hub, with faults that tests choose.

Deterministic: one thread owns all channels of a hub, and the same calls and the same seed give the same events.
Nothing in here waits or reads a clock; delays are counted in calls of `poll`.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from dataclasses import dataclass, field

from kvconnector.control.address import HostPort
from kvconnector.control.base import Disconnected, PeerHandle, Received
from kvconnector.errors import KVConnectorError, PeerLostError, PeerUnreachableError

_HOST = "127.0.0.1"


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlFaults:
    """What a hub does to messages. The default is a faultless network."""

    drop_probability: float = 0.0
    """A message vanishes, and the connection lives on."""
    duplicate_probability: float = 0.0
    """A message arrives twice, one right after the other."""
    max_delay_polls: int = 0
    """A message is held back for 0 to this many polls of its receiver, chosen evenly, and later ones behind it."""
    reorder_connections: bool = False
    """Messages of different connections that are ready in one poll arrive in a random interleaving."""


@dataclass(slots=True, eq=False)
class _End:
    """One side of a connection, with the messages that are under way to it."""

    owner: InprocControlChannel
    peer_address: str
    handle: PeerHandle | None = None
    """None on the accepting side until the first message was delivered."""
    inbox: deque[tuple[int, bytes]] = field(default_factory=deque)
    """Messages, each with the owner's poll count from which on it may be delivered."""
    error: KVConnectorError | None = None
    """Why the connection is over."""
    other: _End | None = None
    accepted: bool = False
    ignored: bool = False
    """The accepting side disconnected: what still arrives is dropped, as a bound socket does."""


class ControlHub:
    """The network between the channels of a world.

    Args:
        seed: of every random choice.
        faults: may be replaced between calls; applies to messages sent from then on.
    """

    def __init__(self, *, seed, faults):
        self.faults = faults
        self.random = random.Random(seed)
        self.channels = {}
        self._ports = itertools.count(1)

    def open(self):
        """A new channel under an address of its own, which is never given out again."""
        address = str(HostPort(_HOST, next(self._ports)))
        self.channels[address] = InprocControlChannel(self, address)
        return self.channels[address]

    def sever(self, first, second):
        """Break every connection between two channels; messages under way are lost. Return how many broke."""
        ends = [end for end in first.ends() if end.peer_address == second.address]
        for end in ends:
            error = PeerLostError(
                "connection was severed", addresses=(first.address, second.address)
            )
            _break(end, error, lose_messages=True)
        return len(ends)

    def close(self):
        """Close every channel that is still open."""
        for channel in list(self.channels.values()):
            channel.close()


class InprocControlChannel:
    """As much of a `ControlChannel` as workers in one thread need; the contract is in `kvconnector.control.base`."""

    server_key = ""

    def __init__(self, hub, address):
        self.address = address
        self._hub = hub
        self._handles = itertools.count(1)
        self._ends = {}
        self._by_handle = {}
        self._polls = 0

    def connect(self, address, server_key=""):
        """See `ControlChannel.connect`."""
        near = _End(self, address)
        peer = self._hub.channels.get(address)
        self._ends[near] = None
        if peer is None:
            near.error = PeerUnreachableError("no connection could be opened", address=address)
        else:
            near.other = _End(peer, self.address, other=near, accepted=True)
            peer._ends[near.other] = None
        return self._name(near)

    def send(self, handle, payload):
        """See `ControlChannel.send`."""
        near = self._by_handle.get(handle)
        if near is None or near.error is not None or near.other is None:
            cause = "" if near is None else str(near.error)
            raise PeerLostError("connection is lost", handle=handle, cause=cause)
        near.other.owner._accept(near.other, payload)

    def peer_of(self, handle):
        """See `ControlChannel.peer_of`."""
        near = self._by_handle.get(handle)
        return "a lost peer" if near is None else near.peer_address

    def disconnect(self, handle):
        """See `ControlChannel.disconnect`."""
        near = self._by_handle.get(handle)
        if near is None:
            return
        if near.accepted and near.error is None:
            near.ignored = True
            near.inbox.clear()
            del self._by_handle[handle]
        else:
            self._discard(near)

    def poll(self, timeout_s, extra_fds=()):
        """See `ControlChannel.poll`. Counts as one poll for the hub's delays, and never waits."""
        self._polls += 1
        return list(self._take_events())

    def filenos(self):
        """See `ControlChannel.filenos`."""
        return ()

    @property
    def is_settled(self):
        """See `ControlChannel.is_settled`."""
        return not any(end.inbox or end.error is not None for end in self._ends)

    def wake(self):
        """See `ControlChannel.wake`: nobody sleeps."""

    def close(self):
        """See `ControlChannel.close`."""
        if self._hub.channels.pop(self.address, None) is not None:
            for end in list(self._ends):
                self._discard(end)

    def ends(self):
        """This side of every connection that is not over."""
        return [end for end in self._ends if end.error is None]

    def _accept(self, end, payload):
        """Put a message under way to `end`, with the hub's faults."""
        faults, choose = self._hub.faults, self._hub.random
        if end.ignored or choose.random() < faults.drop_probability:
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

    def _take_events(self):
        """The messages that are due, then the connections that are over and read."""
        ready = [end for end in self._ends for due, _ in end.inbox if due < self._polls]
        if self._hub.faults.reorder_connections:
            self._hub.random.shuffle(ready)
        for end in ready:
            yield Received(end.handle or self._name(end), end.inbox.popleft()[1])
        for end in [end for end in self._ends if end.error is not None and not end.inbox]:
            self._forget(end)
            if end.handle is not None and end.error is not None and not end.ignored:
                yield Disconnected(end.handle, end.error)

    def _discard(self, end):
        """End a connection from this side, without a report here."""
        if end.other is not None and end.error is None:
            closed = PeerLostError("peer closed the connection", address=self.address)
            _break(end.other, closed, lose_messages=False)
        self._forget(end)

    def _forget(self, end):
        del self._ends[end]
        if end.handle is not None:
            self._by_handle.pop(end.handle, None)


def _break(end, error, *, lose_messages):
    """End a connection on both sides. Each reports it when its inbox is empty."""
    for side in (end, end.other):
        if side is not None and side.error is None:
            side.error = error
            if lose_messages:
                side.inbox.clear()
