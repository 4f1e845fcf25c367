"""The control channel in memory, over a hub, with faults that tests choose.

Deterministic: where one thread polls the channels of a hub, the same calls and the same seed give
the same events. Nothing in here reads a clock except to wait in `poll`; delays are counted in calls
of `poll`, not in seconds.
"""

from __future__ import annotations

import itertools
import random
import select
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvconnector.control.address import HostPort, parse_address
from kvconnector.control.base import (
    ControlEvent,
    ControlLimits,
    Disconnected,
    PeerHandle,
    Received,
    check_timeout,
)
from kvconnector.control.waker import Waker
from kvconnector.errors import (
    AuthenticationError,
    KVConnectorError,
    PeerLostError,
    PeerUnreachableError,
    RemoteProtocolError,
    TransportError,
)

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
    handle: PeerHandle | None
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
    """The network between the in-memory channels of one process. Safe to use from the threads of all its channels.

    Args:
        seed: of every random choice.
        faults: may be replaced between calls; applies to messages sent from then on.
    """

    def __init__(self, *, seed: int, faults: ControlFaults) -> None:
        self.faults = faults
        self.lock = threading.RLock()
        self.random = random.Random(seed)
        self._channels: dict[str, InprocControlChannel] = {}
        self._ports = itertools.count(1)

    def open(self, *, limits: ControlLimits, server_key: str) -> InprocControlChannel:
        """A new channel under an address of its own. Peers must name `server_key`, "" for none, to connect to it."""
        with self.lock:
            address = str(HostPort(_HOST, next(self._ports)))
            channel = InprocControlChannel(
                self, address=address, server_key=server_key, limits=limits
            )
            self._channels[address] = channel
            return channel

    def find(self, address: str) -> InprocControlChannel | None:
        """The open channel at an address."""
        with self.lock:
            return self._channels.get(address)

    def sever(self, first: InprocControlChannel, second: InprocControlChannel) -> int:
        """Break every connection between two channels; messages under way are lost. Return how many broke."""
        with self.lock:
            ends = [end for end in first.ends() if end.peer_address == second.address]
            for end in ends:
                lost = PeerLostError(
                    "connection was severed", addresses=(first.address, second.address)
                )
                break_connection(end, lost, lose_messages=True)
            return len(ends)

    def close(self) -> None:
        """Close every channel that is still open."""
        with self.lock:
            for channel in list(self._channels.values()):
                channel.close()

    def remove(self, channel: InprocControlChannel) -> None:
        """Free a closed channel's address; addresses are never given out again."""
        with self.lock:
            self._channels.pop(channel.address, None)


class InprocControlChannel:
    """A `ControlChannel` over a `ControlHub`, which opens it. The contract is in `kvconnector.control.base`."""

    def __init__(
        self, hub: ControlHub, *, address: str, server_key: str, limits: ControlLimits
    ) -> None:
        self.limits = limits
        self._hub = hub
        self._address = address
        self._server_key = server_key
        self._handles = itertools.count(1)
        self._ends: dict[_End, None] = {}
        self._by_handle: dict[PeerHandle, _End] = {}
        self._failed: deque[Disconnected] = deque()
        self._waker = Waker()
        self._polls = 0
        self._closed = False

    @property
    def address(self) -> str:
        """`tcp://host:port` that peers connect to; means something to this hub only."""
        return self._address

    @property
    def server_key(self) -> str:
        """What peers pass to `connect`."""
        return self._server_key

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._ends)} connections"
        return f"{type(self).__name__}({self._address}, {state})"

    def connect(self, address: str, server_key: str = "") -> PeerHandle:
        """See `ControlChannel.connect`."""
        with self._hub.lock:
            self._check_open()
            parse_address(address)
            handle = self._new_handle()
            near = _End(self, address, handle)
            peer = self._hub.find(address)
            self.add(near)
            if peer is None:
                near.error = PeerUnreachableError("no connection could be opened", address=address)
            elif peer.server_key != server_key:
                near.error = AuthenticationError("peer has another server key", address=address)
            else:
                near.other = _End(peer, self._address, None, other=near, accepted=True)
                peer.add(near.other)
            return handle

    def send(self, handle: PeerHandle, payload: bytes) -> None:
        """See `ControlChannel.send`."""
        self.limits.check_payload(payload)
        with self._hub.lock:
            near = self._by_handle.get(handle)
            if near is None:
                raise PeerLostError("connection is gone", handle=handle)
            far = near.other
            if near.error is not None or far is None:
                raise PeerLostError(
                    "connection is lost", address=near.peer_address, cause=str(near.error)
                )
            if len(far.inbox) >= self.limits.max_queued_messages:
                full = PeerLostError(
                    "peer does not take messages: the queue to it is full",
                    address=near.peer_address,
                    queued_messages=len(far.inbox),
                )
                break_connection(near, full, lose_messages=False)
                raise full
            far.owner.accept(far, payload)

    def peer_of(self, handle: PeerHandle) -> str:
        """See `ControlChannel.peer_of`."""
        with self._hub.lock:
            near = self._by_handle.get(handle)
            return "a lost peer" if near is None else near.peer_address

    def disconnect(self, handle: PeerHandle) -> None:
        """See `ControlChannel.disconnect`."""
        with self._hub.lock:
            near = self._by_handle.get(handle)
            if near is None:
                return
            if near.accepted and near.error is None:
                near.ignored = True
                near.inbox.clear()
                del self._by_handle[handle]
            else:
                self._discard(near)

    def poll(self, timeout_s: float, extra_fds: Sequence[int] = ()) -> list[ControlEvent]:
        """See `ControlChannel.poll`. Counts as one poll for the hub's delays."""
        check_timeout(timeout_s)
        with self._hub.lock:
            self._check_open()
            wait_s = 0.0 if self._has_work() else timeout_s
        poller = select.poll()
        for fd in {self._waker.fileno(), *extra_fds}:
            poller.register(fd, select.POLLIN)
        poller.poll(wait_s * 1000)
        self._waker.clear()
        with self._hub.lock:
            self._polls += 1
            return list(self._take_events())

    def filenos(self) -> tuple[int, ...]:
        """See `ControlChannel.filenos`."""
        return (self._waker.fileno(),)

    @property
    def is_settled(self) -> bool:
        """See `ControlChannel.is_settled`."""
        with self._hub.lock:
            return not self._has_work()

    def wake(self) -> None:
        """See `ControlChannel.wake`."""
        self._waker.wake()

    def close(self) -> None:
        """See `ControlChannel.close`."""
        with self._hub.lock:
            if self._closed:
                return
            self._closed = True
            self._hub.remove(self)
            for end in list(self._ends):
                self._discard(end)
            self._waker.close()

    def ends(self) -> list[_End]:
        """This side of every connection that is not over. For the hub."""
        return [end for end in self._ends if end.error is None]

    def add(self, end: _End) -> None:
        """Take up a new connection. For the hub's channels."""
        self._ends[end] = None
        if end.handle is not None:
            self._by_handle[end.handle] = end

    def accept(self, end: _End, payload: bytes) -> None:
        """Put a message under way to `end`, with the hub's faults. For the hub's channels."""
        if len(payload) > self.limits.max_message_bytes:
            refused = RemoteProtocolError(
                "a message was longer than the receiver allows",
                message_bytes=len(payload),
                max_message_bytes=self.limits.max_message_bytes,
            )
            break_connection(end, refused, lose_messages=False)
            return
        if end.ignored:
            return
        faults, choose = self._hub.faults, self._hub.random
        if choose.random() < faults.drop_probability:
            return
        copies = 2 if choose.random() < faults.duplicate_probability else 1
        due = self._polls + choose.randint(0, faults.max_delay_polls)
        if end.inbox:
            due = max(due, end.inbox[-1][0])
        end.inbox.extend([(due, payload)] * copies)
        self._waker.wake()

    def _new_handle(self) -> PeerHandle:
        return PeerHandle(next(self._handles))

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError("control channel is closed", address=self._address)

    def _has_work(self) -> bool:
        return any(end.inbox or end.error is not None for end in self._ends)

    def _take_events(self) -> Iterator[ControlEvent]:
        """Up to `max_messages_per_turn` messages of each connection, then the connections that are over and read."""
        ready = [end for end in self._ends for _ in range(self._ready_count(end))]
        if self._hub.faults.reorder_connections:
            self._hub.random.shuffle(ready)
        for end in ready:
            if end.handle is None:
                end.handle = self._new_handle()
                self._by_handle[end.handle] = end
            yield Received(end.handle, end.inbox.popleft()[1])
        for end in [end for end in self._ends if end.error is not None and not end.inbox]:
            self._forget(end)
            if end.handle is not None and end.error is not None and not end.ignored:
                yield Disconnected(end.handle, end.error)

    def _ready_count(self, end: _End) -> int:
        candidates = itertools.islice(end.inbox, self.limits.max_messages_per_turn)
        return sum(1 for _ in itertools.takewhile(lambda item: item[0] < self._polls, candidates))

    def _discard(self, end: _End) -> None:
        """End a connection from this side, without a report here."""
        closed = PeerLostError("peer closed the connection", address=self._address)
        if end.other is not None and end.error is None:
            break_connection(end.other, closed, lose_messages=False)
        self._forget(end)

    def _forget(self, end: _End) -> None:
        del self._ends[end]
        if end.handle is not None:
            self._by_handle.pop(end.handle, None)


def break_connection(end: _End, error: KVConnectorError, *, lose_messages: bool) -> None:
    """End a connection on both sides. Each reports it when its inbox is empty. For a hub and its channels."""
    for side in (end, end.other):
        if side is not None and side.error is None:
            side.error = error
            if lose_messages:
                side.inbox.clear()
            side.owner.wake()
