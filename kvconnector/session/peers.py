"""The consumer workers of a producer worker: greeting, liveness, loss, and messages that come too early. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from itertools import islice
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

from kvconnector.agenda import AT_ONCE, MAX_AT_ONCE, Agenda
from kvconnector.errors import GeometryError, IncompatiblePeerError, KVConnectorError, PeerLostError
from kvconnector.ids import EngineId, Rank
from kvconnector.planning import Route
from kvconnector.session import events as ev
from kvconnector.session.containment import failure_of, guarded
from kvconnector.session.lease import Send
from kvconnector.session.link import FromPeer, Link
from kvconnector.session.machine import Table, Tracked
from kvconnector.session.port import Ports
from kvconnector.session.read_check import check_route
from kvconnector.session.shares import Shares
from kvconnector.topology import TpKVTopology
from kvconnector.wire import messages as m
from kvconnector.wire.messages import Refusal
from kvconnector.wire.packed_geometry import PackedGeometry

MAX_EARLY_BYTES = 64 << 20
"""The most bytes of one peer's events, as many as for its messages that wait for their turns (`runtime.links`). So a
peer that follows many prompts leaves room for the events of others.
"""
MAX_ALL_EARLY_BYTES = 4 * MAX_EARLY_BYTES
"""The most bytes of all peers' events, no matter how many connections there are. Beyond this limit the peers that have
most are refused.
"""
EVENT_BYTES = 512
"""Bytes counted for each event in addition to a read's ranges and blocks. So there is room for 131,072 followed
prompts.
"""

EarlyEvent: TypeAlias = FromPeer[m.Read | m.TransferKey]


class PeerState(StrEnum):
    """States of a consumer worker."""

    UNKNOWN = "unknown"
    HELLO = "hello"
    READY = "ready"
    LOST = "lost"


_S = PeerState

PEER_TABLE: Table[PeerState] = Table(
    "peer",
    _S.UNKNOWN,
    {
        _S.UNKNOWN: {m.Hello: frozenset({_S.HELLO, _S.LOST})},
        _S.HELLO: {
            m.Hello: frozenset({_S.HELLO, _S.LOST}),
            ev.EndpointOpened: frozenset({_S.READY, _S.LOST}),
            ev.LinkLost: frozenset({_S.LOST}),
            ev.Tick: frozenset({_S.LOST}),
        },
        _S.READY: {
            m.Hello: frozenset({_S.READY, _S.LOST}),
            ev.LinkLost: frozenset({_S.LOST}),
            ev.Tick: frozenset({_S.LOST}),
        },
        _S.LOST: {},
    },
)


class Peer(Tracked[PeerState]):
    """One consumer worker: its greeting, the time of its last message, and the seconds for which it may be silent. Once
    accepted, it has the `route` of its reads, and the `readers`: the ranks of its engine that confirm to this worker.
    `sends` are its unfinished reads, `early` its messages about leases that do not exist yet, of `early_bytes` in all.
    `sole_follower` is the tuple of followers of every lease that it alone follows: one tuple, as thousands would slow
    the garbage collector down.
    """

    def __init__(self, link: Link, hello: m.Hello, now: float, timeout_s: float) -> None:
        super().__init__(PEER_TABLE, f"link {link.number}")
        self.link = link
        self.sole_follower = (link,)
        self.hello = hello
        self.engine_id = EngineId(hello.geometry.engine_id)
        self.rank = Rank(hello.pp_rank, hello.tp_rank)
        self.last_message_at = now
        self.timeout_s = timeout_s
        self.readers: frozenset[Rank] = frozenset()
        self.route: Route | None = None
        self.sends: dict[int, Send] = {}
        self.early: dict[int | m.TransferKey, EarlyEvent] = {}
        self.early_bytes = 0

    @property
    def is_lost(self) -> bool:
        """Returns True if nothing more may be sent to it."""
        return self.state is _S.LOST

    @property
    def deadline(self) -> float:
        """The time at which it is given up, unless a message comes before."""
        return self.last_message_at + self.timeout_s


class EarlyEvents:
    """Events of peers about leases that do not exist yet, in order, each once: at most `MAX_EARLY_BYTES` of each peer,
    and `MAX_ALL_EARLY_BYTES` of all. `Peer.early` has them by name. The `agenda` has the deadline of each, and this
    object itself while there is more to `go_on` with.
    """

    def __init__(self, agenda: Agenda[Any]) -> None:
        self._by_transfer: dict[str, dict[EarlyEvent, Peer]] = {}
        self._lost: deque[Peer] = deque()
        self._granted: dict[str, int] = {}
        """How many events are left of transfers whose leases have come."""
        self._shares: Shares[Peer] = Shares(MAX_ALL_EARLY_BYTES)
        self._agenda = agenda

    def __repr__(self) -> str:
        return f"<early events of {len(self._by_transfer)} transfers>"

    def keep(self, peer: Peer, event: EarlyEvent, until: float) -> list[EarlyEvent]:
        """Keep an event. Returns the events, of any peer, for which there is no room now: this one if its peer has too
        many; if all peers together have too many, the newest events of those that have most.
        """
        name, nbytes = name_of(event), _nbytes(event)
        if name in peer.early:
            return []
        if peer.early_bytes + nbytes > MAX_EARLY_BYTES:
            return [event]
        peer.early[name] = event
        self._count(peer, nbytes)
        self._by_transfer.setdefault(event.message.transfer_id, {})[event] = peer
        self._agenda.plan(event, until)
        dropped: list[EarlyEvent] = []
        while (debtor := self._shares.debtor()) is not None:
            newest = next(reversed(debtor.early.values()))
            if not self.remove(newest).is_lost:
                dropped.append(newest)
        return dropped

    def _count(self, peer: Peer, nbytes: int) -> None:
        peer.early_bytes += nbytes
        self._shares.add(peer.link.origin, peer, nbytes)

    def take(self, transfer_id: str) -> list[EarlyEvent]:
        """Remove and return the first events of a transfer whose lease has come, at most `MAX_AT_ONCE`. `go_on` returns
        the others.
        """
        if same := self._by_transfer.get(transfer_id):
            self._granted[transfer_id] = len(same)
        return self._taken(transfer_id)

    def _taken(self, transfer_id: str) -> list[EarlyEvent]:
        same = self._by_transfer.get(transfer_id, {})
        # only as many as there were: one that is kept again is not returned again
        left = self._granted.pop(transfer_id, 0)
        events = [*islice(same, min(left, MAX_AT_ONCE))]
        if events and left > len(events):
            self._granted[transfer_id] = left - len(events)
            self._agenda.plan(self, AT_ONCE)
        return [event for event in events if not self.remove(event).is_lost]

    def remove(self, event: EarlyEvent) -> Peer:
        """Remove an event. Returns its peer."""
        same = self._by_transfer[event.message.transfer_id]
        peer = same.pop(event)
        if not same:
            del self._by_transfer[event.message.transfer_id]
        del peer.early[name_of(event)]
        self._count(peer, -_nbytes(event))
        self._agenda.forget(event)
        return peer

    def drop(self, peer: Peer) -> None:
        """Leave the events of a lost peer to `go_on`. `take` does not return them any more."""
        if peer.early:
            self._lost.append(peer)
            self._agenda.plan(self, AT_ONCE)

    def go_on(self) -> list[EarlyEvent]:
        """Remove at most `MAX_AT_ONCE` events of a lost peer, and as many of a transfer whose lease has come. Returns
        the latter.
        """
        if self._lost:
            peer = self._lost[0]
            for event in [*islice(peer.early.values(), MAX_AT_ONCE)]:
                self.remove(event)
            if not peer.early:
                self._lost.popleft()
        taken = self._taken(next(iter(self._granted))) if self._granted else []
        if self._lost or self._granted:
            self._agenda.plan(self, AT_ONCE)
        return taken


def name_of(event: EarlyEvent) -> int | m.TransferKey:
    """Return the name under which a peer can have only one event: a read's number, otherwise the message itself."""
    return event.message.read_id if isinstance(event.message, m.Read) else event.message


def _nbytes(event: EarlyEvent) -> int:
    message = event.message
    if not isinstance(message, m.Read):
        return EVENT_BYTES
    blocks_bytes = sum(len(blocks.wire_ids) for blocks in message.blocks)
    return EVENT_BYTES + 64 * len(message.token_ranges) + blocks_bytes


def _peer_at(link: Link) -> Peer | None:
    """Return the consumer worker at `link`, if it has greeted us."""
    return link.peer if isinstance(link.peer, Peer) else None


class Peers:
    """All consumer workers of one producer worker. `reply` is the answer to those that are accepted. The `agenda` has
    the deadline of each, for `tick`. `on_lost` is called with each that is lost.
    """

    def __init__(
        self,
        topology: TpKVTopology,
        reply: m.HelloReply,
        timeout_s: float,
        agenda: Agenda[Any],
        ports: Ports,
        *,
        on_lost: Callable[[Peer], None],
    ) -> None:
        self._topology = topology
        self.reply = reply
        self._timeout_s = timeout_s
        self._agenda = agenda
        self._links, self._data, self._engine = ports.links, ports.data, ports.engine
        self._on_lost = on_lost
        self._readers: WeakValueDictionary[PackedGeometry, frozenset[Rank]] = WeakValueDictionary()

    def ready(self, link: Link) -> Peer | None:
        """Return the consumer worker at `link`, if it may read and confirm."""
        peer = _peer_at(link)
        return peer if peer is not None and peer.state is PeerState.READY else None

    def end_send(self, send: Send) -> None:
        """Remove a send that is over. A lost peer is forgotten with its last one. Idempotent."""
        peer = _peer_at(send.link)
        if peer is not None and peer.sends.pop(send.read.read_id, None) is not None:
            self._forget_if_lost(peer)

    def _forget_if_lost(self, peer: Peer) -> None:
        if peer.is_lost and not peer.sends:
            peer.link.peer = None

    def keep_alive(self, link: Link, now: float) -> None:
        """Record that a message came on `link`, which shows that the worker there is alive."""
        peer = _peer_at(link)
        if peer is not None:
            peer.last_message_at = now

    def handle(self, event: Any, now: float) -> None:
        """Handle an event of a link. An unexpected exception ends the link."""
        guarded(partial(self.contain, event.link, now), self._of_link, event, now)

    def contain(self, link: Link, now: float, error: Exception) -> None:
        """Note an unexpected exception, and give up the consumer worker whose handling raised it."""
        self._engine.note_contained(f"link {link.number}", error)
        self.give_up(link, now, error)

    def give_up(self, link: Link, now: float, error: Exception) -> None:
        """Give up a consumer worker, no matter what an unexpected exception left half done."""
        peer = _peer_at(link)
        if peer is not None:
            peer.force(_S.LOST, now)
            self._stop_all(peer)
        self._say_goodbye(link, failure_of(error))

    def _of_link(self, event: Any, now: float) -> None:
        peer = _peer_at(event.link)
        if isinstance(event, FromPeer):
            self._greeted(peer, event, now)
        elif peer is None or peer.is_lost:
            return  # it was lost in the meantime
        elif isinstance(event, ev.EndpointOpened):
            self._welcome(peer, event, now)
        else:
            assert isinstance(event, ev.LinkLost)  # see `ProducerSession.handle`
            self._lose(peer, event, event.error, now)

    def _welcome(self, peer: Peer, event: ev.EndpointOpened, now: float) -> None:
        try:
            self._links.send(peer.link, self.reply)
        except IncompatiblePeerError as reason:  # it does not accept messages as long as our answer
            self._lose(peer, event, reason, now)
            return
        peer.accept(event, now)
        peer.move(PeerState.READY)

    def tick(self, peer: Peer, event: ev.Tick, now: float) -> None:
        """Give up a consumer worker whose deadline has passed, unless a message came since."""
        guarded(partial(self.contain, peer.link, now), self._due, peer, event, now)

    def _due(self, peer: Peer, event: ev.Tick, now: float) -> None:
        if peer.deadline > now:
            self._agenda.plan(peer, peer.deadline)
            return
        error = PeerLostError("a consumer worker went silent", timeout_s=peer.timeout_s)
        self._lose(peer, event, error, now)

    def _greeted(self, known: Peer | None, event: FromPeer[m.Hello], now: float) -> None:
        hello = event.message
        if known is not None:
            if known.is_lost or known.hello == hello:
                return  # a duplicate
            twice = PeerLostError(
                "a consumer worker greeted twice, with different values", link=known.link.number
            )
            self._lose(known, event, twice, now)
            return
        timeout_s = m.shorter_timeout_s(self._timeout_s, hello.timeout_ms)
        peer = Peer(event.link, hello, now, timeout_s)
        event.link.peer = peer
        peer.accept(event, now)
        self._agenda.plan(peer, peer.deadline)
        try:
            peer.readers = self._readers_of(hello.geometry)
            if hello.pp_rank >= hello.geometry.pp_size or hello.tp_rank >= hello.geometry.tp_size:
                raise IncompatiblePeerError(
                    "a consumer worker's rank is outside its engine",
                    pp_rank=hello.pp_rank,
                    tp_rank=hello.tp_rank,
                )
            peer.route = check_route(hello, self._topology.geometry)
        except (IncompatiblePeerError, GeometryError) as reason:
            self._lose(peer, event, reason, now)
            return
        peer.move(PeerState.HELLO)
        self._data.open_endpoint(peer.link, hello)

    def _readers_of(self, geometry: PackedGeometry) -> frozenset[Rank]:
        """Return the ranks of a consumer engine that confirm. Computed once while any of its workers is connected.

        Raises:
            IncompatiblePeerError, GeometryError: it cannot exchange blocks with us, or makes no sense.
        """
        readers = self._readers.get(geometry)
        if readers is None:
            engine = geometry.unpack()
            self._topology.check_compatible(engine)
            readers = self._readers[geometry] = self._topology.readers(engine)
        return readers

    def _lose(self, peer: Peer, event: object, error: KVConnectorError, now: float) -> None:
        peer.accept(event, now)
        if peer.state is not _S.READY:  # it waits for an answer to its greeting
            incompatible = isinstance(error, IncompatiblePeerError | GeometryError)
            refusal = Refusal.INCOMPATIBLE if incompatible else Refusal.INTERNAL
            reply = m.HelloReply(
                incarnation=self.reply.incarnation,
                refusal=refusal,
                text=error.statement[: m.MAX_TEXT],
            )
            self._links.send(peer.link, reply)
        peer.move(PeerState.LOST)
        self._stop_all(peer)
        self._say_goodbye(peer.link, error)

    def _stop_all(self, peer: Peer) -> None:
        """Stop a lost peer's sends, and drop its early messages. Idempotent."""
        self._agenda.forget(peer)
        self._on_lost(peer)
        for send in peer.sends.values():
            self._data.stop_send(send)
        self._forget_if_lost(peer)

    def _say_goodbye(self, link: Link, error: KVConnectorError) -> None:
        """Close a link. Only the side that connected can close a control connection, so it gets a Bye."""
        goodbye = m.Bye(text=error.statement[: m.MAX_TEXT])
        noted = partial(self._engine.note_contained, f"the goodbye on link {link.number}")
        guarded(noted, self._links.send, link, goodbye)
        self._links.close_link(link)
