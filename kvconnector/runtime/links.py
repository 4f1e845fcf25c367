"""The links of one worker: its connections on the control channel, and the one way in which links end.

Two workers that have greeted each other send all their messages on the connection that carried the greeting, which
authenticates both and keeps the messages' order.

Four things end a link: the control channel reports it, a message cannot be sent, a message makes no sense, the peer
says goodbye. Each becomes one `LinkLost` for the sessions. A link that a session opened then waits until the session
closes it. One that the peer opened is forgotten, and the peer is notified, since only the side that connected can close
a control connection.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count

from msgspec import structs

from kvconnector.config import ControlConfig
from kvconnector.control.base import (
    ControlEvent,
    Disconnected,
    MessageTooLargeError,
    PeerHandle,
    Received,
)
from kvconnector.control.zmq import ControlChannel
from kvconnector.errors import KVConnectorError, PeerLostError
from kvconnector.folded_log import Refusals
from kvconnector.session import events as ev
from kvconnector.session.link import Link
from kvconnector.wire import encode, encode_batch, version_of
from kvconnector.wire import messages as m

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Connection:
    """A link's connection on the control channel. Both sides use the wire `version` in which it was opened.
    `max_message_bytes` is the longest message that the peer takes, 0 if it has not said so. `mapper` names a consumer
    that may have mapped this worker's CUDA memory. `unsent` are the messages of the driver's present turn, oldest
    first. Once it `is_lost` nothing is sent any more.
    """

    handle: PeerHandle
    version: int
    max_message_bytes: int = 0
    mapper: str = ""
    unsent: list[bytes] = field(default_factory=list)
    unsent_bytes: int = 0
    is_lost: bool = False


MAX_BATCH_BYTES = 32 << 10
"""Half of the lowest limit that a peer may have, see `config.ControlConfig.max_message_bytes`."""
_REFUSALS = frozenset({m.HelloReply, m.Progress, m.ReadRefused})
"""Messages that may refuse something, which is logged."""
RECLAIMED_SINCE = 4
"""The wire version in which a refusal can say that an offer was taken back."""


class Links:
    """All links of one worker. One thread at a time, the driver lock's owner, calls it.

    `report` takes the `LinkLost` of each link that ended.
    """

    def __init__(
        self,
        control: ControlChannel,
        config: ControlConfig,
        report: Callable[[ev.LinkLost], None],
    ) -> None:
        self.control = control
        self._max_message_bytes = config.max_message_bytes
        self._report = report
        self._by_handle: dict[PeerHandle, Link] = {}
        self._connections: dict[Link, Connection] = {}
        self._gone: set[PeerHandle] = set()
        """Connections that were closed, of which `arrived` may have events."""
        self._incoming = count(1)
        self.with_unsent: deque[Link] = deque()
        """Links whose messages wait for `flush`."""
        self.arrived: deque[ControlEvent] = deque()
        """What came and the last caller of `poll` did not take."""
        self.refusals = Refusals(logger)

    def __repr__(self) -> str:
        lost = [link for link, each in self._connections.items() if each.is_lost]
        return f"<Links {[*self]}, lost {lost}>"

    def __iter__(self) -> Iterator[Link]:
        """Iterate over the connected links."""
        return iter(list(self._by_handle.values()))

    @property
    def mappers(self) -> list[str]:
        """Consumers that may have mapped this worker's CUDA memory."""
        return [each.mapper for each in self._connections.values() if each.mapper]

    def name_mapper(self, link: Link, consumer: str) -> None:
        """Record that `consumer` may have mapped this worker's CUDA memory, or with "" that it has not."""
        connection = self._connections.get(link)
        if connection is not None:
            connection.mapper = consumer

    def limit_messages(self, link: Link, max_message_bytes: int) -> None:
        """Record the longest message that the peer takes."""
        connection = self._connections.get(link)
        if connection is not None:
            connection.max_message_bytes = max_message_bytes

    def is_connected(self, link: Link) -> bool:
        """Returns True until the connection has ended or was closed."""
        return link in self._connections

    def peer_of(self, link: Link) -> str:
        """Return the address of the peer at a link, for texts."""
        connection = self._connections.get(link)
        return "a lost peer" if connection is None else self.control.peer_of(connection.handle)

    # -- opening and ending --

    def open(self, link: Link, address: str, public_key: str, version: int) -> None:
        """Connect a link to a peer, to write to it in this wire version.

        Raises:
            ConfigError, TransportError: see `ControlChannel.connect`.
        """
        self._connected(link, self.control.connect(address, public_key), version)

    def close(self, link: Link) -> None:
        """Forget a link, and end its connections after the messages sent on them. Idempotent."""
        self.flush_link(link)
        connection = self._connections.pop(link, None)
        if connection is not None:
            del self._by_handle[connection.handle]
            self.control.disconnect(connection.handle)
            self._gone.add(connection.handle)

    def lose(self, link: Link, error: KVConnectorError, *, has_left: bool = False) -> None:
        """End a link whose peer misbehaved, was lost, or `has_left` with a goodbye."""
        connection = self._connections.get(link)
        if connection is None or connection.is_lost:
            return
        reason, peer = type(error).__name__, self.peer_of(link)
        if not isinstance(error, PeerLostError):
            self.refusals.note(f"{peer}'s connection", reason, error)
        else:
            self.refusals.counts[reason] += 1
            if has_left or link.number > 0:  # the loads that fail say why
                logger.debug("%s is lost: %s", peer, error)
            else:
                self.refusals.warn(peer, f"the connection to {peer} is given up: {error}")
        if link.number < 0 and not has_left:
            goodbye = m.Bye(text=error.statement[: m.MAX_TEXT])
            with suppress(KVConnectorError):
                self.control.send(connection.handle, encode(goodbye, connection.version))
        connection.is_lost = True
        if link.number < 0:
            self.close(link)
        self._report(ev.LinkLost(link, error))

    def say_goodbye(self) -> None:
        """Notify the consumers that this worker closes. Each unmaps its pools, then disconnects; until then it is one
        of the `mappers`. Producers see this worker disconnect, without having to be notified.
        """
        goodbye = m.Bye(text="the worker is closing")
        for link in self:
            if link.number < 0:
                self.send(link, goodbye)
        self.flush()

    def _connected(self, link: Link, handle: PeerHandle, version: int) -> None:
        self._by_handle[handle] = link
        self._connections[link] = Connection(handle, version)

    # -- messages --

    def flush(self) -> None:
        """Send queued messages, one batch per link, or several if that would be too long."""
        while self.with_unsent:
            self.flush_link(self.with_unsent.popleft())

    def send(self, link: Link, message: m.Message) -> None:
        """Send a message with the others of the driver's turn. No effect on a lost link.

        Raises:
            MessageTooLargeError: it is longer than the peer takes. Nothing is sent, and the link goes on: whose message
                it is fails.
        """
        connection = self._connections.get(link)
        if connection is None or connection.is_lost:
            return  # the sessions know, or will
        if type(message) in _REFUSALS:
            self._log_refusal(link, message)
        if connection.version < RECLAIMED_SINCE:
            message = _of_older(message)
        payload = encode(message, connection.version)
        ours, theirs = self._max_message_bytes, connection.max_message_bytes
        limit_bytes = min(ours, theirs or ours)
        if len(payload) > limit_bytes:
            raise MessageTooLargeError.of(payload, limit_bytes)
        is_full = connection.unsent_bytes + len(payload) > MAX_BATCH_BYTES
        if is_full or len(connection.unsent) >= m.MAX_BATCH_MESSAGES:
            self.flush_link(link)
        if not connection.unsent:
            self.with_unsent.append(link)
            connection.unsent_bytes = 0
        connection.unsent.append(payload)
        connection.unsent_bytes += len(payload)

    def _log_refusal(self, link: Link, message: m.Message) -> None:
        if (
            not isinstance(message, m.HelloReply | m.Progress | m.ReadRefused)
            or not message.refusal
        ):
            return
        if isinstance(message, m.HelloReply) or message.refusal is m.Refusal.UNKNOWN_TRANSFER:
            peer = f"consumer {self.peer_of(link)}"
            self.refusals.note(peer, message.refusal, message.text)

    def flush_link(self, link: Link) -> None:
        """Send the messages queued for a link. Idempotent."""
        connection = self._connections.get(link)
        if connection is None:
            return
        unsent, connection.unsent = connection.unsent, []
        if not unsent or connection.is_lost:
            return
        try:
            self.control.send(connection.handle, encode_batch(unsent, connection.version))
        except KVConnectorError as error:
            self.lose(link, error)

    def poll(self) -> Iterator[tuple[Link, bytes]]:
        """Yield messages in the order in which they came, and end the links whose peers have left. What a caller does
        not take stays in `arrived` for the next call.
        """
        if not self.arrived:
            self._gone.clear()
            self.arrived += self.control.poll(0.0)
        while self.arrived:
            arrival = self.arrived.popleft()
            if arrival.handle in self._gone:
                continue  # it came before we closed the connection
            link = self._by_handle.get(arrival.handle)
            if isinstance(arrival, Received):
                if link is None:
                    link = Link(-next(self._incoming))
                    self._connected(link, arrival.handle, version_of(arrival.payload))
                if not self._connections[link].is_lost:
                    yield link, arrival.payload
            elif link is not None:
                self._on_disconnect(link, arrival)

    def _on_disconnect(self, link: Link, arrival: Disconnected) -> None:
        connection = self._connections.pop(link)
        del self._by_handle[connection.handle]
        if not connection.is_lost:
            self._report(ev.LinkLost(link, arrival.error))


def _of_older(message: m.Message) -> m.Message:
    """Return the message as peers of wire version 3 know it."""
    if (
        isinstance(message, m.Progress | m.ReadRefused | m.ReadEnded)
        and message.refusal is m.Refusal.RECLAIMED
    ):
        return structs.replace(message, refusal=m.Refusal.LEASE_EXPIRED)
    return message
