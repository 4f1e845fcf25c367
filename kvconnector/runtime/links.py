"""The links of one worker: the two channels of their messages, and the one way in which links end.

Two workers greet each other on the control channel, which authenticates them, and each names an inbox. From then on
their messages travel as sealed control messages of the transport, see `control.sealed`: a message wakes only the
driver's thread, and no thread while chunks move. The consumer switches when it has the answer to its hello, the
producer when the consumer's first message has come over the transport, so no message overtakes one on the other
channel.

Four things end a link: the control channel reports it, a message cannot be sent, messages were lost or make no sense,
the peer says goodbye. Each becomes one `LinkLost` for the sessions. A link that a session opened then waits until the
session closes it. One that the peer opened is forgotten, and the peer is notified, since only the side that connected
can close a control connection.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count

from msgspec.structs import replace

from kvconnector.config import ControlConfig
from kvconnector.control.base import Disconnected, MessageTooLargeError, PeerHandle, Received
from kvconnector.control.sealed import OVERHEAD_BYTES, ForgedMessageError, Inbox, Opener, Sealer
from kvconnector.control.zmq import ControlChannel
from kvconnector.errors import KVConnectorError, PeerLostError
from kvconnector.folded_log import Refusals
from kvconnector.session import events as ev
from kvconnector.session.link import Link
from kvconnector.transport.base import (
    CONTROL_TAG_BIT,
    ControlEvent,
    ControlFailed,
    ControlMessage,
)
from kvconnector.transport.ucx import UcxTransport
from kvconnector.wire import encode, encode_batch, version_of
from kvconnector.wire import messages as m

logger = logging.getLogger(__name__)

MAX_CLOSED_INBOXES = 4096
"""Number of closed inboxes that are remembered, so that messages in flight to one cause no warning."""
MAX_BATCH_BYTES = 32 << 10
"""Half of the lowest limit that a peer may have, see `config.ControlConfig.max_message_bytes`."""
_OF_LINKS = frozenset({m.HelloReply, m.Progress, m.ReadRefused, m.Heartbeat})
"""Messages that links complete, or log if they refuse something."""


class Links:
    """All links of one worker. One thread at a time, the transport's owner, calls it.

    `report` takes the `LinkLost` of each link that ended. Without `config.over_ucx` it names no inbox to its peers, and
    drops messages that come over the transport.
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
        self._over_ucx = config.over_ucx
        self._report = report
        self._by_handle: dict[PeerHandle, Link] = {}
        self._by_tag: dict[int, Link] = {}
        self._limits: dict[int, int] = {}
        self._closed: deque[int] = deque(maxlen=MAX_CLOSED_INBOXES)
        self._gone: set[PeerHandle] = set()
        self._incoming = count(1)
        self.with_unsent: deque[Link] = deque()
        """Links whose messages wait for `flush`."""
        self.arrived: deque[ControlEvent] = deque()
        """The messages that came and that the last caller of `receive` did not take."""
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
        self.leave_transport(link)
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
            # over ZMQ, which outlives what was lost
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

    # -- which way messages take --

    def open_inbox(self, link: Link) -> m.ControlInbox | None:
        """Open an inbox, to be named in our greeting. Returns None if messages are to stay on the control channel."""
        if not self._over_ucx:
            return None
        inbox = Inbox.fresh()
        link.tag = CONTROL_TAG_BIT | inbox.inbox_id
        link.opener = Opener(inbox)
        self._by_tag[link.tag] = link
        self._limits[link.tag] = self._max_message_bytes + OVERHEAD_BYTES
        return m.ControlInbox(
            inbox_id=inbox.inbox_id, key=inbox.key, max_message_bytes=self._max_message_bytes
        )

    def set_peer_inbox(self, link: Link, peer: m.ControlInbox | None) -> None:
        """Record the inbox that the peer's greeting named. Only the first counts."""
        if peer is not None and self._over_ucx and link.sealer is None:
            link.max_message_bytes = peer.max_message_bytes
            limit_bytes = min(self._max_message_bytes, peer.max_message_bytes)
            link.sealer = Sealer(Inbox(peer.inbox_id, peer.key), limit_bytes)

    def change_over(self, link: Link, address: bytes) -> None:
        """Open an endpoint to a worker, which closes with the link. If both sides have named an inbox, our messages go
        over it from now on.

        Raises:
            IncompatiblePeerError, RemoteProtocolError, TransportError: see `UcxTransport.connect`.
        """
        endpoint = self._transport.connect(address)
        link.is_tcp_fallback = self._transport.falls_back_to_tcp(endpoint)
        self._send_unsent(link)
        link.endpoint = endpoint

    def leave_transport(self, link: Link) -> None:
        """Send queued messages, then neither read nor write over the transport. Idempotent."""
        self._send_unsent(link)
        if link.tag:
            del self._by_tag[link.tag], self._limits[link.tag]
            self._closed.append(link.tag)
            link.tag = 0
        link.sealer = None
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
        if type(message) in _OF_LINKS:
            message = self._completed(link, message)
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

    def _completed(self, link: Link, message: m.Message) -> m.Message:
        """Return a message with the link's own fields, and log a refusal."""
        if isinstance(message, m.HelloReply | m.Progress | m.ReadRefused) and message.refusal:
            if isinstance(message, m.HelloReply) or message.refusal is m.Refusal.UNKNOWN_TRANSFER:
                peer = f"consumer {self.peer_of(link)}"
                self.refusals.note(peer, message.refusal, message.text)
        elif isinstance(message, m.HelloReply):
            if link.sealer is not None and link.endpoint:
                # it has named its inbox: once it has written to ours, we write to that
                message = replace(message, control=self.open_inbox(link))
        elif isinstance(message, m.Heartbeat) and link.pools is not None:
            message = replace(message, maps_pools=True)
        return message

    def _send_unsent(self, link: Link) -> None:
        """Send the messages queued for a link, before it closes or switches channels."""
        unsent, link.unsent = link.unsent, []
        if not unsent or link.handle is None or link.is_lost:
            return
        batch = encode_batch(unsent, link.version)
        try:
            if not link.uses_transport:
                self.control.send(link.handle, batch)
                return
            tag = CONTROL_TAG_BIT | link.sealer.inbox_id
            self._transport.send_control(link.endpoint, tag, link.sealer.seal(batch))
        except KVConnectorError as error:
            self.lose(link, error)

    def receive(self, *, progress: bool = False) -> Iterator[tuple[Link, bytes]]:
        """Yield messages that came over the transport, in order. Those that a caller does not take stay in `arrived`
        for the next call. `progress`: see `UcxTransport.receive_control`.
        """
        if progress or not self.arrived:
            self.arrived += self._transport.receive_control(self._limits, progress=progress)
        while self.arrived:
            event = self.arrived.popleft()
            if not self.arrived:
                self.arrived += self._transport.receive_control(self._limits)
            if isinstance(event, ControlMessage):
                opened = self._open(event)
                if opened is not None:
                    yield opened
            elif isinstance(event, ControlFailed):
                for link in self:
                    if link.endpoint == event.endpoint:
                        self.lose(link, event.error)
            elif event.tag not in self._closed:
                reason = "too long" if event.tag in self._by_tag else "unknown link"
                self.refusals.note("a message over UCX", reason, f"{event.nbytes} bytes")

    def poll(self) -> Iterator[tuple[Link, bytes, bool]]:
        """Yield messages from the control channel, which authenticates the peer, and, with False, those that a peer had
        sent over the transport before it left.
        """
        self._gone.clear()
        for arrival in self.control.poll(0.0):
            if arrival.handle in self._gone:
                continue  # it came before we closed the connection, in this turn
            link = self._by_handle.get(arrival.handle)
            if isinstance(arrival, Received):
                if link is None:
                    link = Link(-next(self._incoming))
                    self._connected(link, arrival.handle, version_of(arrival.payload))
                if not link.is_lost:
                    yield link, arrival.payload, True
            elif link is not None:
                for other, payload in self.receive(progress=True):
                    yield other, payload, False
                self._on_disconnect(link, arrival)

    def _on_disconnect(self, link: Link, arrival: Disconnected) -> None:
        if self._by_handle.pop(arrival.handle, None) is None:
            return  # it was closed because of an earlier message
        link.handle = None
        if not link.is_lost:
            self._end(link, arrival.error)

    def _open(self, message: ControlMessage) -> tuple[Link, bytes] | None:
        link = self._by_tag.get(message.tag)
        if link is None or link.is_lost:
            return None  # it ended with a message before this one
        try:
            return link, link.opener.open(message.payload)
        except ForgedMessageError as error:
            self.refusals.note("a message over UCX", "forged", str(error))
        except PeerLostError as error:
            self.lose(link, error)
        return None
