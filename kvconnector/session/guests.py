"""Consumer workers that a producer worker has met: greeting, liveness, loss. Pure."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from kvconnector.errors import IncompatiblePeerError, KVConnectorError, PeerLostError
from kvconnector.ids import Rank
from kvconnector.session import commands as cmd
from kvconnector.session import events as ev
from kvconnector.session.commands import Command, LinkId
from kvconnector.session.machine import Table, Tracked
from kvconnector.topology import EngineGeometry, TpKVTopology
from kvconnector.wire import messages as m
from kvconnector.wire.messages import Refusal


class GuestState(StrEnum):
    """States of a consumer worker."""

    UNKNOWN = "unknown"
    HELLO = "hello"
    READY = "ready"
    LOST = "lost"


_S = GuestState

GUEST_TABLE: Table[GuestState] = Table(
    "guest",
    _S.UNKNOWN,
    {
        _S.UNKNOWN: {ev.Greeted: frozenset({_S.HELLO, _S.LOST})},
        _S.HELLO: {
            ev.Greeted: frozenset({_S.HELLO, _S.LOST}),
            ev.EndpointOpened: frozenset({_S.READY}),
            ev.EndpointFailed: frozenset({_S.LOST}),
            ev.LinkLost: frozenset({_S.LOST}),
            ev.Tick: frozenset({_S.LOST}),
        },
        _S.READY: {
            ev.Greeted: frozenset({_S.READY, _S.LOST}),
            ev.EndpointFailed: frozenset({_S.LOST}),
            ev.LinkLost: frozenset({_S.LOST}),
            ev.Tick: frozenset({_S.LOST}),
        },
        _S.LOST: {},
    },
)


class GuestRecord(Tracked[GuestState]):
    """One consumer worker: who it says it is, when it last spoke, and how long it may be silent."""

    __slots__ = ("hello", "last_heard", "link", "timeout_s")

    def __init__(self, link: LinkId, now: float, timeout_s: float) -> None:
        super().__init__(GUEST_TABLE, f"link {link}")
        self.link = link
        self.hello: m.Hello | None = None
        self.last_heard = now
        self.timeout_s = timeout_s

    @property
    def deadline(self) -> float:
        """When it is given up, unless it speaks before."""
        return self.last_heard + self.timeout_s


class Guests:
    """All consumer workers of one producer worker. `welcome(link, engine, rank)` is called for each that passed, and
    `reply` is what it is answered.
    """

    def __init__(
        self,
        topology: TpKVTopology,
        reply: m.HelloReply,
        timeout_s: float,
        welcome: Callable[[LinkId, EngineGeometry, Rank], None],
    ) -> None:
        self._topology = topology
        self._reply = reply
        self._timeout_s = timeout_s
        self._welcome = welcome
        self._guests: dict[LinkId, GuestRecord] = {}

    def heard(self, link: LinkId, now: float) -> None:
        """Any message came on `link`."""
        guest = self._guests.get(link)
        if guest is not None:
            guest.last_heard = now

    def handle(self, event: object, now: float) -> list[Command | ev.LinkLost]:
        """What to do about `event`; a `LinkLost` among the answers is for the leases' machine."""
        if isinstance(event, ev.Tick):
            return self._tick(event, now)
        link: LinkId = event.link  # type: ignore[attr-defined]  # every other event names its link
        guest = self._guests.get(link)
        if isinstance(event, ev.Greeted):
            if guest is None:
                guest = self._guests[link] = GuestRecord(link, now, self._timeout_s)
            return self._greeted(guest, event, now)
        if guest is None:
            return []  # it was lost in the meantime
        if isinstance(event, ev.EndpointOpened):
            return self._ready(guest, event, now)
        if isinstance(event, ev.EndpointFailed):
            refusal = [] if guest.state is _S.READY else [self._refuse(guest, event.error)]
            return [*refusal, *self._lose(guest, event, event.error, now)]
        if isinstance(event, ev.LinkLost):
            return self._lose(guest, event, event.error, now)
        return []

    def next_deadline(self) -> float | None:
        """When to send the next `Tick`, at the latest."""
        return min((guest.deadline for guest in self._guests.values()), default=None)

    def validate(self) -> None:
        """Check the invariants; tests call it after every event."""
        for link, guest in self._guests.items():
            assert guest.link == link
            assert guest.state in (_S.HELLO, _S.READY), guest.state
            assert guest.hello is not None

    def _greeted(
        self, guest: GuestRecord, event: ev.Greeted, now: float
    ) -> list[Command | ev.LinkLost]:
        guest.accept(event)
        if guest.hello == event.hello:
            guest.move(event, guest.state, now)  # a duplicate
            return []
        if guest.hello is not None:
            error: KVConnectorError = PeerLostError(
                "a consumer worker greeted twice, with other values", link=guest.link
            )
            return self._lose(guest, event, error, now)
        hello = guest.hello = event.hello
        guest.timeout_s = m.shorter_timeout_s(self._timeout_s, hello.timeout_ms)
        try:
            self._topology.check_compatible(hello.geometry)
            if hello.pp_rank >= hello.geometry.pp_size or hello.tp_rank >= hello.geometry.tp_size:
                raise IncompatiblePeerError(
                    "a consumer worker's rank is outside its engine",
                    pp_rank=hello.pp_rank,
                    tp_rank=hello.tp_rank,
                )
        except IncompatiblePeerError as reason:
            return [self._refuse(guest, reason), *self._lose(guest, event, reason, now)]
        guest.move(event, GuestState.HELLO, now)
        return [
            cmd.OpenEndpoint(
                guest.link, hello.transport_address, hello.warm_up_tag, hello.warm_up_bytes
            )
        ]

    def _ready(
        self, guest: GuestRecord, event: ev.EndpointOpened, now: float
    ) -> list[Command | ev.LinkLost]:
        guest.accept(event)
        guest.move(event, GuestState.READY, now)
        hello = guest.hello
        assert hello is not None  # HELLO is reached by a hello only
        self._welcome(guest.link, hello.geometry, Rank(hello.pp_rank, hello.tp_rank))
        return [cmd.SendMessage(guest.link, self._reply)]

    def _refuse(self, guest: GuestRecord, error: KVConnectorError) -> Command:
        incompatible = isinstance(error, IncompatiblePeerError)
        reply = m.HelloReply(
            incarnation=self._reply.incarnation,
            refusal=Refusal.INCOMPATIBLE if incompatible else Refusal.INTERNAL,
            text=str(error)[:4096],
        )
        return cmd.SendMessage(guest.link, reply)

    def _tick(self, event: ev.Tick, now: float) -> list[Command | ev.LinkLost]:
        answers: list[Command | ev.LinkLost] = []
        for guest in list(self._guests.values()):
            if guest.deadline <= now:
                error = PeerLostError("a consumer worker went silent", timeout_s=guest.timeout_s)
                answers += self._lose(guest, event, error, now)
        return answers

    def _lose(
        self, guest: GuestRecord, event: object, error: KVConnectorError, now: float
    ) -> list[Command | ev.LinkLost]:
        guest.accept(event)
        guest.move(event, GuestState.LOST, now)
        del self._guests[guest.link]
        # only the side that connected can close a control connection, so it is told; on a lost link this goes nowhere
        return [
            ev.LinkLost(guest.link, error),
            cmd.CloseEndpoint(guest.link),
            cmd.SendMessage(guest.link, m.Bye(text=str(error)[:4096])),
            cmd.CloseLink(guest.link),
        ]
