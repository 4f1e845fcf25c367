"""The links of one worker: the two channels of their messages, and the single place where links end.

Two workers greet each other on the control channel, which authenticates them, and each names an inbox. From then on
their messages travel as sealed control messages of the transport, see `control.sealed`: a message wakes only the
driver's thread, and no thread while chunks move, where one on the control channel wakes two threads of libzmq first.
The consumer switches when it has the answer to its hello, the producer when the consumer's first message has come over
the transport, so no message overtakes one on the other channel. A producer's last messages to a consumer that it leaves
go by the control channel, which outlives the endpoint.

Four things end a link: the control channel reports it, a message cannot be sent, messages were lost or make no sense,
the peer says goodbye. Each becomes one `LinkLost` for the sessions. A link that a session opened then waits until the
session closes it. One that the peer opened is forgotten, and the peer is notified, since only the side that connected
can close a control connection.

Peers take turns. What came on a link waits there, and whoever polls gets one message of each link that has some, again
and again, however many one peer has sent: so a message waits for one of every other peer, and not for a queue. A long
message waits for several turns, in proportion to its bytes. Of one peer at most `MAX_WAITING_BYTES` wait, of all
together `MAX_ALL_WAITING_FACTOR` times that; one that sends more, faster than its turns come, loses its link.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import TypeAlias

from kvconnector.config import ControlConfig
from kvconnector.control.base import (
    Disconnected,
    MessageTooLargeError,
    PeerHandle,
)
from kvconnector.control.sealed import OVERHEAD_BYTES, ForgedMessageError, Inbox, Opener, Sealer
from kvconnector.control.zmq import ControlChannel
from kvconnector.errors import KVConnectorError, PeerLostError, RemoteProtocolError
from kvconnector.folded_log import Refusals
from kvconnector.session import events as ev
from kvconnector.session.link import Link
from kvconnector.session.shares import Shares
from kvconnector.transport.tagged_messages import (
    CONTROL_TAG_BIT,
    MAX_CONTROL_PER_CALL,
    ControlFailed,
    ControlMessage,
)
from kvconnector.transport.ucx import UcxTransport
from kvconnector.wire import encode, encode_batch, version_of
from kvconnector.wire import messages as m

logger = logging.getLogger(__name__)

Arrival: TypeAlias = bytes | ControlMessage | ControlFailed | Disconnected
"""Something that waits on a link: a message of the control channel or of the transport, or the link's end, which comes
after all messages.
"""


@dataclass(slots=True, eq=False)
class Connection:
    """A link's connection on the control channel. Both sides use the wire `version` in which it was opened.
    `max_message_bytes` is the longest message that the peer takes, 0 if it has not said so. `consumer` names the one
    that greeted on it. It has our `cuda_export` if the last answer to it says how to map this worker's CUDA memory, and
    `is_mapper` if it may have mapped that. `unsent` are the messages of the driver's present turn, oldest first. Once
    it `is_lost` nothing is sent any more.

    Messages that come over the transport carry `tag`, 0 if none may come, and `opener` verifies them. Ours go through
    `endpoint`, 0 if there is none, once `sealer` signs them.

    What has `arrived` and nobody took, each with its `cost_bytes`, has `waiting_bytes` in all; `shared_bytes` of these
    are counted in `Links._shares`. `credit_bytes` are those of the turns that its first message has waited for.
    """

    handle: PeerHandle
    version: int
    max_message_bytes: int = 0
    consumer: str = ""
    cuda_export: bool = False
    is_mapper: bool = False
    unsent: list[bytes] = field(default_factory=list)
    unsent_bytes: int = 0
    is_lost: bool = False
    tag: int = 0
    opener: Opener | None = None
    sealer: Sealer | None = None
    endpoint: int = 0
    arrived: deque[tuple[Arrival, int]] = field(default_factory=deque)
    waiting_bytes: int = 0
    shared_bytes: int = 0
    credit_bytes: int = 0


MAX_CLOSED_INBOXES = 4096
"""Number of closed inboxes that are remembered, so that messages in flight to one cause no warning."""
MAX_BATCH_BYTES = 32 << 10
"""Half of the lowest limit that a peer may have, see `config.ControlConfig.max_message_bytes`."""
MESSAGE_BYTES = 512
"""Bytes that are added to the size of each waiting message."""
TURN_BYTES = 64 << 10
"""Bytes of a link's messages for each of its turns. No message that peers send often is longer."""
MAX_WAITING_BYTES = 64 << 20
"""The most bytes of one link's messages that wait for their turns, or four messages of the greatest length if that is
more. That is as much as may be under way to a peer over UCX, or 100,000 short messages.
"""
MAX_ALL_WAITING_FACTOR = 4
"""All links together may have at most this many times as many waiting bytes as one of them."""
MAX_LOOKS_BEFORE_LOSS = 16
"""How often the worker looks for a lost peer's last messages over UCX, `MAX_CONTROL_PER_CALL` each time, if messages
keep coming. Anybody who reaches UCX's port may send some, and everything on the control channel waits meanwhile.
"""
_ANSWERS = frozenset({m.HelloReply, m.Progress, m.ReadRefused})
"""Messages that may refuse something, which is logged. An answer to a greeting also says how to map our memory."""


def cost_bytes(arrival: Arrival) -> int:
    """Return the bytes that something counts while it waits."""
    if isinstance(arrival, ControlMessage):
        return MESSAGE_BYTES + len(arrival.payload)
    return MESSAGE_BYTES + (len(arrival) if isinstance(arrival, bytes) else 0)


class Links:
    """All links of one worker. One thread at a time, the driver lock's owner, calls it.

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
        self._over_ucx = config.over_ucx
        self._max_message_bytes = config.max_message_bytes
        self._report = report
        self._by_handle: dict[PeerHandle, Link] = {}
        self._connections: dict[Link, Connection] = {}
        self._by_tag: dict[int, Link] = {}
        self._by_endpoint: dict[int, Link] = {}
        self._limits: dict[int, int] = {}
        """The longest frame that each inbox takes, by tag."""
        self._closed: deque[int] = deque(maxlen=MAX_CLOSED_INBOXES)
        self._max_waiting_bytes = max(MAX_WAITING_BYTES, 4 * config.max_message_bytes)
        self._max_all_waiting_bytes = MAX_ALL_WAITING_FACTOR * self._max_waiting_bytes
        self._waiting_bytes = 0
        """The sum over all links."""
        self._shares: Shares[Link] = Shares(self._max_all_waiting_bytes)
        """Whose bytes wait, up to date only once too many do: nearly all messages are taken as soon as they come."""
        self._uncounted: dict[Link, None] = {}
        """Links whose waiting bytes have changed since they were counted."""
        self._flooders: set[PeerHandle] = set()
        """Connections that were closed since the last look at the control channel because too much waited on them."""
        self._incoming = count(1)
        self.with_unsent: deque[Link] = deque()
        """Links whose messages wait for `flush`."""
        self._waiting: OrderedDict[Link, None] = OrderedDict()
        """Links on which something has arrived, in the order of their turns; some may be closed by now."""
        self._ended: list[Disconnected] = []
        """Ends of connections whose last messages over the transport are still looked for."""
        self._num_looks = 0
        """How often these have been looked for."""
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
        return [each.consumer for each in self._connections.values() if each.is_mapper]

    def name_consumer(self, link: Link, consumer: str) -> None:
        """Record which consumer has greeted."""
        connection = self._connections.get(link)
        if connection is not None:
            connection.consumer = consumer

    def note_mapping(self, link: Link, *, may_map: bool) -> None:
        """Record whether, according to the peer at a link, it may have mapped this worker's CUDA memory. This is
        believed only of peers that were told how, because anybody who reaches the control port may claim it.
        """
        connection = self._connections.get(link)
        if connection is not None:
            connection.is_mapper = may_map and (connection.cuda_export or connection.is_mapper)

    @property
    def has_arrived(self) -> bool:
        """Returns True if messages came that the last caller of `poll` did not take."""
        return bool(self._waiting or self._ended)

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
        self.leave_transport(link)
        connection = self._forget(link)
        if connection is not None:
            self.control.disconnect(connection.handle)

    def _forget(self, link: Link) -> Connection | None:
        connection = self._connections.pop(link, None)
        if connection is not None:
            del self._by_handle[connection.handle]
            self._add_waiting(link, connection, -connection.waiting_bytes)
            self._count(link, connection)
            self._close_inbox(connection)
            self._leave_endpoint(connection)
        return connection

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

    # -- which way messages take --

    def open_inbox(self, link: Link) -> m.ControlInbox | None:
        """Open an inbox, to be named in our greeting. Returns None if messages are to stay on the control channel."""
        connection = self._connections.get(link)
        if connection is None or not self._over_ucx:
            return None
        self._close_inbox(connection)
        inbox = Inbox.fresh()
        connection.tag, connection.opener = CONTROL_TAG_BIT | inbox.inbox_id, Opener(inbox)
        self._by_tag[connection.tag] = link
        self._limits[connection.tag] = self._max_message_bytes + OVERHEAD_BYTES
        return m.ControlInbox(
            inbox_id=inbox.inbox_id, key=inbox.key, max_message_bytes=self._max_message_bytes
        )

    def set_peer_inbox(self, link: Link, peer: m.ControlInbox | None) -> None:
        """Record the inbox that the peer's greeting named. Only the first counts."""
        connection = self._connections.get(link)
        if connection is not None and peer is not None and self._over_ucx:
            connection.sealer = connection.sealer or Sealer(Inbox(peer.inbox_id, peer.key))
            connection.max_message_bytes = connection.max_message_bytes or peer.max_message_bytes

    def answer_inbox(self, link: Link, endpoint: int) -> m.ControlInbox | None:
        """Open the inbox that our answer to a greeting names, and send through an endpoint of the transport from now
        on, see `use_endpoint`. Returns None if the answer is to name none: the greeting has not, an earlier answer has,
        or `endpoint` is 0, so there is none.
        """
        connection = self._connections.get(link)
        if connection is None or connection.sealer is None or connection.tag or not endpoint:
            return None
        self.use_endpoint(link, endpoint)
        return self.open_inbox(link)

    def use_endpoint(self, link: Link, endpoint: int) -> None:
        """Send messages through an endpoint of the transport from now on, if both sides name an inbox. It stays open
        until `leave_transport`.
        """
        self.flush_link(link)
        connection = self._connections.get(link)
        if connection is not None:
            self._leave_endpoint(connection)
            connection.endpoint = endpoint
            self._by_endpoint[endpoint] = link

    def leave_transport(self, link: Link) -> None:
        """Send queued messages, then use the endpoint no more. Idempotent. A producer that leaves sends the last ones
        on the control channel, since it closes the endpoint at once.
        """
        connection = self._connections.get(link)
        if connection is not None:
            if link.number < 0:
                self._leave_endpoint(connection)
            self.flush_link(link)
            self._leave_endpoint(connection)

    def _leave_endpoint(self, connection: Connection) -> None:
        if connection.endpoint:
            del self._by_endpoint[connection.endpoint]
            connection.endpoint = 0

    def _close_inbox(self, connection: Connection) -> None:
        if connection.tag:
            del self._by_tag[connection.tag], self._limits[connection.tag]
            self._closed.append(connection.tag)
            connection.tag = 0

    # -- messages --

    def flush(self) -> None:
        """Send queued messages, one batch per link, or several if that would be too long."""
        while self.with_unsent:
            self.flush_link(self.with_unsent.popleft())

    def send(self, link: Link, message: m.Message) -> None:
        """Send a message with the others of the driver's turn. No effect on a lost link.

        Raises:
            MessageTooLargeError: it is longer than the peer takes. Nothing is sent, and the link stays: only the
                request whose message it is fails.
        """
        connection = self._connections.get(link)
        if connection is None or connection.is_lost:
            return  # the sessions know, or will
        payload = encode(message, connection.version)
        ours, theirs = self._max_message_bytes, connection.max_message_bytes
        limit_bytes = min(ours, theirs or ours)
        if len(payload) > limit_bytes:
            raise MessageTooLargeError.of(payload, limit_bytes)
        if type(message) in _ANSWERS:
            self._note_answer(link, connection, message)
        is_full = connection.unsent_bytes + len(payload) > MAX_BATCH_BYTES
        if is_full or len(connection.unsent) >= m.MAX_BATCH_MESSAGES:
            self.flush_link(link)
        if not connection.unsent:
            self.with_unsent.append(link)
            connection.unsent_bytes = 0
        connection.unsent.append(payload)
        connection.unsent_bytes += len(payload)

    def _note_answer(self, link: Link, connection: Connection, message: m.Message) -> None:
        """Record what an answer to a greeting says about our CUDA memory, and log a refusal."""
        if isinstance(message, m.HelloReply):
            export = message.export
            connection.cuda_export = export is not None and export.device == "cuda"
            connection.is_mapper = connection.is_mapper or connection.cuda_export
        elif not isinstance(message, m.Progress | m.ReadRefused):
            return
        if message.refusal is m.Refusal.UNKNOWN_TRANSFER or (
            message.refusal and isinstance(message, m.HelloReply)
        ):
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
        batch, sealer = encode_batch(unsent, connection.version), connection.sealer
        is_begun = link.number > 0 or (
            connection.opener is not None and connection.opener.has_opened
        )
        try:
            if connection.endpoint and sealer is not None and is_begun:
                tag = CONTROL_TAG_BIT | sealer.inbox_id
                self._transport.send_control(connection.endpoint, tag, sealer.seal(batch))
            else:
                self.control.send(connection.handle, batch)
        except KVConnectorError as error:
            self.lose(link, error)

    def poll(self) -> Iterator[tuple[Link, bytes]]:
        """Yield messages, the links in turns and those of each link in their order, and end the links whose peers have
        left. What a caller does not take stays for the next call.
        """
        self._take_transport()
        self._take_control()
        if self._ended:
            self._take_ends()
        yield from self._turns()

    def poll_transport(self) -> Iterator[tuple[Link, bytes]]:
        """Yield what `poll` does, without a look at the control channel."""
        self._take_transport()
        yield from self._turns()

    def put_back(self, link: Link, messages: Sequence[bytes]) -> None:
        """Let all messages of a batch except the first wait for separate turns, before anything that arrived after
        them.
        """
        connection = self._connections.get(link)
        if connection is None or not messages:
            return
        self._waiting[link] = None
        costs = [*map(cost_bytes, messages)]
        connection.arrived.extendleft(zip(reversed(messages), reversed(costs), strict=True))
        self._add_waiting(link, connection, sum(costs))

    def _turns(self) -> Iterator[tuple[Link, bytes]]:
        """Yield one message of each link that has some, as often as there are any."""
        while self._waiting:
            link, _ = self._waiting.popitem(last=False)
            connection = self._connections.get(link)
            if connection is None or not connection.arrived:
                continue
            arrival, cost = connection.arrived[0]
            connection.credit_bytes += TURN_BYTES
            if connection.credit_bytes < cost and self._waiting:
                self._waiting[link] = None
                continue
            connection.credit_bytes = 0
            self._add_waiting(link, connection, -cost)
            connection.arrived.popleft()
            if connection.arrived:
                self._waiting[link] = None
            if not connection.is_lost and (payload := self._message_of(link, arrival)) is not None:
                yield link, payload
            elif isinstance(arrival, Disconnected):
                self._on_disconnect(link, arrival)

    def _message_of(self, link: Link, arrival: Arrival) -> bytes | None:
        """Return the message that has arrived; None if it is none, or no peer's. A failed endpoint ends the link."""
        if isinstance(arrival, ControlMessage):
            return self._open(link, arrival)
        if isinstance(arrival, ControlFailed):
            self.lose(link, arrival.error)
        return arrival if isinstance(arrival, bytes) else None

    def _keep(self, link: Link, arrival: Arrival) -> None:
        """Let something wait on its link. If too much waits, the link ends."""
        connection = self._connections[link]
        if connection.is_lost and not isinstance(arrival, Disconnected):
            return
        self._waiting[link] = None
        cost = cost_bytes(arrival)
        connection.arrived.append((arrival, cost))
        self._add_waiting(link, connection, cost)
        if connection.waiting_bytes > self._max_waiting_bytes and not connection.is_lost:
            self._lose_flooder(link, connection)
        if self._waiting_bytes > self._max_all_waiting_bytes:
            self._lose_debtors()

    def _lose_debtors(self) -> None:
        """End links until no more than the limit waits on all together."""
        for link in list(self._uncounted):
            self._count(link, self._connections[link])
        while (debtor := self._shares.debtor()) is not None:
            connection = self._connections[debtor]
            self._lose_flooder(debtor, connection)
            self._count(debtor, connection)

    def _lose_flooder(self, link: Link, connection: Connection) -> None:
        """End a link on which too much waits, and drop that."""
        flood = RemoteProtocolError(
            "the peer sends messages faster than they can be handled",
            waiting_bytes=connection.waiting_bytes,
            max_waiting_bytes=self._max_waiting_bytes,
            all_waiting_bytes=self._waiting_bytes,
        )
        connection.arrived.clear()
        self._add_waiting(link, connection, -connection.waiting_bytes)
        self.lose(link, flood)
        if link not in self._connections:
            self._flooders.add(connection.handle)

    def _add_waiting(self, link: Link, connection: Connection, nbytes: int) -> None:
        """Add to the bytes that wait on a link, or subtract if `nbytes` is negative."""
        connection.waiting_bytes += nbytes
        self._waiting_bytes += nbytes
        self._uncounted[link] = None

    def _count(self, link: Link, connection: Connection) -> None:
        """Bring what `_shares` knows of a link up to date. Idempotent."""
        self._uncounted.pop(link, None)
        if connection.waiting_bytes != connection.shared_bytes:
            self._shares.add(link.origin, link, connection.waiting_bytes - connection.shared_bytes)
            connection.shared_bytes = connection.waiting_bytes

    def _take_control(self) -> None:
        """Let what came over the control channel wait on its links. A message of an unknown connection opens one."""
        self._flooders.clear()
        for event in self.control.poll(0.0):
            if event.handle in self._flooders:
                continue  # it came before we closed the connection
            if isinstance(event, Disconnected):
                self._ended.append(event)
                continue
            link = self._by_handle.get(event.handle)
            if link is None:
                link = Link(-next(self._incoming), origin=self.control.origin_of(event.handle))
                self._connected(link, event.handle, version_of(event.payload))
            self._keep(link, event.payload)

    def _take_ends(self) -> None:
        """Look for what lost peers had sent over the transport, which counts before their loss, and queue the ends
        after it.
        """
        self._num_looks += 1
        is_all = self._take_transport(progress=True) < MAX_CONTROL_PER_CALL
        if not is_all and self._num_looks < MAX_LOOKS_BEFORE_LOSS:
            return
        self._num_looks = 0
        ended, self._ended = self._ended, []
        for event in ended:
            if (link := self._by_handle.get(event.handle)) is not None:
                self._keep(link, event)

    def _on_disconnect(self, link: Link, arrival: Disconnected) -> None:
        connection = self._forget(link)
        if connection is not None and not connection.is_lost:
            self._report(ev.LinkLost(link, arrival.error))

    def _take_transport(self, *, progress: bool = False) -> int:
        """Let what came over the transport wait on its links. Returns its number. `progress`: see
        `UcxTransport.receive_control`.
        """
        taken = self._transport.receive_control(self._limits, progress=progress)
        for event in taken:
            if isinstance(event, ControlMessage):
                if (link := self._by_tag.get(event.tag)) is not None:
                    self._keep(link, event)
            elif isinstance(event, ControlFailed):
                self._keep_failed(event)
            elif event.tag not in self._closed:
                reason = "too long" if event.tag in self._by_tag else "unknown link"
                self.refusals.note("a message over UCX", reason, f"{event.nbytes} bytes")
        return len(taken)

    def _keep_failed(self, failed: ControlFailed) -> None:
        link = self._by_endpoint.get(failed.endpoint)
        if link is not None:  # otherwise the link has left it
            self._keep(link, failed)

    def _open(self, link: Link, message: ControlMessage) -> bytes | None:
        """Return a message's payload; None if its inbox was closed since, or the message is no peer's."""
        connection = self._connections[link]
        if connection.tag != message.tag or connection.opener is None:
            return None
        try:
            return connection.opener.open(message.payload)
        except ForgedMessageError as error:
            self.refusals.note("a message over UCX", "forged", str(error))
        except PeerLostError as error:
            self.lose(link, error)
        return None
