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
from itertools import count

from msgspec.structs import replace

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
from kvconnector.transport.ucx import UcxTransport
from kvconnector.wire import encode, encode_batch, version_of
from kvconnector.wire import messages as m

logger = logging.getLogger(__name__)

MAX_BATCH_BYTES = 32 << 10
"""Half of the lowest limit that a peer may have, see `config.ControlConfig.max_message_bytes`."""
_REFUSALS = frozenset({m.HelloReply, m.Progress, m.ReadRefused})
"""Messages that may refuse something, which is logged."""


class Links:
    """All links of one worker. One thread at a time, the transport's owner, calls it.

    `report` takes the `LinkLost` of each link that ended.
    """

    def __init__(
        self,
        control: ControlChannel,
        transport: UcxTransport,
        config: ControlConfig,
        report: Callable[[ev.LinkLost], None],
    ) -> None:
        self.control = control
        self._transport = transport
        self._max_message_bytes = config.max_message_bytes
        self._report = report
        self._by_handle: dict[PeerHandle, Link] = {}
        self._gone: set[PeerHandle] = set()
        """Connections that were closed, of which `arrived` may have events."""
        self._incoming = count(1)
        self.with_unsent: deque[Link] = deque()
        """Links whose messages wait for `flush`."""
        self.arrived: deque[ControlEvent] = deque()
        """What came and the last caller of `poll` did not take."""
        self.refusals = Refusals(logger)

    def __repr__(self) -> str:
        return f"<Links {[*self]}>"

    def __iter__(self) -> Iterator[Link]:
        """Iterate over the connected links."""
        return iter(list(self._by_handle.values()))

    @property
    def mappers(self) -> list[str]:
        """Consumers that may have mapped this worker's CUDA memory."""
        return [link.consumer for link in self if link.consumer]

    def peer_of(self, link: Link) -> str:
        """Return the address of the peer at a link, for texts."""
        return "a lost peer" if link.handle is None else self.control.peer_of(link.handle)

    # -- opening and ending --

    def open(self, link: Link, address: str, public_key: str, version: int) -> None:
        """Connect a link to a peer, to write to it in this wire version.

        Raises:
            ConfigError, TransportError: see `ControlChannel.connect`.
        """
        self._connected(link, self.control.connect(address, public_key), version)

    def close(self, link: Link) -> None:
        """Forget a link, and end its connections after the messages sent on them. Idempotent."""
        self.close_endpoint(link)
        link.unsent.clear()
        if link.handle is not None:
            del self._by_handle[link.handle]
            self.control.disconnect(link.handle)
            self._gone.add(link.handle)
            link.handle = None

    def lose(self, link: Link, error: KVConnectorError, *, has_left: bool = False) -> None:
        """End a link whose peer misbehaved, was lost, or `has_left` with a goodbye."""
        if link.is_lost:
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
        if link.number < 0 and link.handle is not None and not has_left:
            goodbye = m.Bye(text=error.statement[: m.MAX_TEXT])
            with suppress(KVConnectorError):
                self.control.send(link.handle, encode(goodbye, link.version))
        self._end(link, error)

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
        link.handle, link.version = handle, version

    def _end(self, link: Link, error: KVConnectorError) -> None:
        link.is_lost = True
        if link.number < 0:
            self.close(link)
        self._report(ev.LinkLost(link, error))

    # -- endpoints --

    def open_endpoint(self, link: Link, address: bytes) -> None:
        """Open an endpoint to a producer worker, which closes with the link.

        Raises:
            IncompatiblePeerError, RemoteProtocolError, TransportError: see `UcxTransport.connect`.
        """
        endpoint = self._transport.connect(address)
        link.is_tcp_fallback = self._transport.falls_back_to_tcp(endpoint)
        link.endpoint = endpoint

    def close_endpoint(self, link: Link) -> None:
        """Send queued messages, and close the endpoint of a link that this worker opened. Idempotent."""
        self._send_unsent(link)
        if link.number > 0 and link.endpoint:  # otherwise it is the sends', too
            self._transport.disconnect(link.endpoint)
            link.endpoint = 0

    # -- messages --

    def flush(self) -> None:
        """Send queued messages, one batch per link, or several if that would be too long."""
        while self.with_unsent:
            self._send_unsent(self.with_unsent.popleft())

    def send(self, link: Link, message: m.Message) -> None:
        """Send a message with the others of the driver's turn. No effect on a lost link.

        Raises:
            MessageTooLargeError: it is longer than the peer takes. Nothing is sent, and the link goes on: whose message
                it is fails.
        """
        if link.handle is None or link.is_lost:
            return  # the sessions know, or will
        kind = type(message)
        if kind in _REFUSALS:
            self._log_refusal(link, message)
        elif kind is m.Heartbeat and link.pools is not None:
            message = replace(message, maps_pools=True)
        payload = encode(message, link.version)
        limit_bytes = min(
            self._max_message_bytes, link.max_message_bytes or self._max_message_bytes
        )
        if len(payload) > limit_bytes:
            raise MessageTooLargeError.of(payload, limit_bytes)
        is_full = link.unsent_bytes + len(payload) > MAX_BATCH_BYTES
        if is_full or len(link.unsent) >= m.MAX_BATCH_MESSAGES:
            self._send_unsent(link)
        if not link.unsent:
            self.with_unsent.append(link)
            link.unsent_bytes = 0
        link.unsent.append(payload)
        link.unsent_bytes += len(payload)

    def _log_refusal(self, link: Link, message: m.Message) -> None:
        if (
            not isinstance(message, m.HelloReply | m.Progress | m.ReadRefused)
            or not message.refusal
        ):
            return
        if isinstance(message, m.HelloReply) or message.refusal is m.Refusal.UNKNOWN_TRANSFER:
            peer = f"consumer {self.peer_of(link)}"
            self.refusals.note(peer, message.refusal, message.text)

    def _send_unsent(self, link: Link) -> None:
        """Send the messages queued for a link."""
        unsent, link.unsent = link.unsent, []
        if not unsent or link.handle is None or link.is_lost:
            return
        try:
            self.control.send(link.handle, encode_batch(unsent, link.version))
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
                if not link.is_lost:
                    yield link, arrival.payload
            elif link is not None:
                self._on_disconnect(link, arrival)

    def _on_disconnect(self, link: Link, arrival: Disconnected) -> None:
        if self._by_handle.pop(arrival.handle, None) is None:
            return  # it was closed because of an earlier message
        link.handle = None
        if not link.is_lost:
            self._end(link, arrival.error)
