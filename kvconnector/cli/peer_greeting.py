"""Greeting a running engine as a consumer that wants nothing of it: what `kvconnector doctor --peer` finds out.

The links and the session's `RemoteEngines` are a worker's; the data path has no blocks, only warm-up messages and the
`Probe`s by which bandwidth is measured, which a producer answers from staging memory. So nothing is read, and no lease
is touched. All runs in the caller's thread, which never sleeps once the directory has answered: waking up would count.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvconnector.config import ConnectorConfig
from kvconnector.control.address import parse_address
from kvconnector.control.base import Received
from kvconnector.control.security import check_server
from kvconnector.datapath.base import EventQueue
from kvconnector.datapath.direct.remote_pools import RemotePools
from kvconnector.datapath.staging import WARM_UP_BYTES, SlotPool
from kvconnector.datapath.warm_ups import WarmUps
from kvconnector.errors import KVConnectorError, PeerLostError, PeerUnreachableError
from kvconnector.ids import EngineAddress, EngineId, Rank, new_incarnation, new_secret
from kvconnector.runtime.channels import open_control, open_transport, security_of
from kvconnector.runtime.executor import hello_of
from kvconnector.runtime.links import Link, Links
from kvconnector.session import commands as cmd
from kvconnector.session import events as ev
from kvconnector.session.agenda import Agenda
from kvconnector.session.commands import LinkId
from kvconnector.session.engines import RemoteEngines
from kvconnector.session.export_check import check_export
from kvconnector.session.orders import WantRequest
from kvconnector.topology import EngineGeometry, GroupGeometry, RankGeometry, TpKVTopology
from kvconnector.transport.ucx.address import WorkerAddress
from kvconnector.wire import decode_batch, encode, refusal_error, versions
from kvconnector.wire import messages as m

PROBE_MESSAGES, PROBES = 32, 3
"""Messages of `WARM_UP_BYTES` in one probe, and how many a rank is asked for; the quickest counts."""
ROUND_TRIPS = 20
RESOLVE_S, ASK_S, CONNECT_S = 1.5, 2.5, 0.5
"""How long a name may take to resolve, the directory to answer, and one that does not to accept a plain connection."""
MEASURE_S = 5.0
"""How long the heartbeats, and one probe, may take."""
RANK = Rank(0, 0)
"""Ours."""


@dataclass(slots=True, eq=False)
class RankCheck:
    """What one rank answered. `not_direct` says why its pools cannot be read from here; empty: they can."""

    rank: Rank = RANK
    lanes: str = ""
    is_same_host: bool = False
    device: str = ""
    not_direct: str = "it offers its pools to nobody: paths.direct=never there, or see its log"
    round_trips_s: list[float] = field(default_factory=list)
    bytes_per_second: float = 0.0
    num_warm_ups: int = 0


def whole_engine(like: EngineGeometry, engine_id: str) -> EngineGeometry:
    """An engine of one rank that holds all that the ranks of another hold, so that it greets each of them."""
    groups = []
    for index, group in enumerate(like.ranks[0].groups):
        layers = {layer for rank in like.ranks for layer in rank.groups[index].layers}
        parts = tuple(
            msgspec.structs.replace(part, head_start=0, head_stop=part.total_heads)
            for part in group.parts
        )
        groups.append(
            GroupGeometry(block_size=group.block_size, layers=tuple(sorted(layers)), parts=parts)
        )
    rank = RankGeometry(pp_rank=0, tp_rank=0, groups=tuple(groups))
    return msgspec.structs.replace(like, engine_id=engine_id, tp_size=1, pp_size=1, ranks=(rank,))


def why_silent(address: str) -> str:
    """Ask why nobody answers at an address, by a plain connection: what is wrong, and what to do about it.

    Args:
        address: `tcp://host:port`.
    """
    where = parse_address(address)
    try:
        socket.create_connection(where, timeout=CONNECT_S).close()
    except ConnectionRefusedError:
        return (
            "the host refuses connections to this port: start the prefill engine, or give the port of its directory"
            " service, control.port"
        )
    except OSError as error:
        return (
            f"nothing answers at this address ({error}): see whether the host is up, and whether a firewall drops"
            " packets to this port"
        )
    return (
        "something accepts connections at this port and does not answer: see whether the engine is stopped or stuck,"
        " and whether the port is that of its directory service, control.port, and no other service's"
    )


def resolve(host: str) -> str:
    """Look a host up, within `RESOLVE_S`. Returns why that failed, empty if it did not."""
    failed = [f"no answer within {RESOLVE_S} s"]

    def look_up() -> None:
        try:
            socket.getaddrinfo(host, None)
            failed[0] = ""
        except (OSError, UnicodeError) as error:
            failed[0] = str(error)

    thread = threading.Thread(target=look_up, daemon=True)  # the resolver's own timeouts are longer
    thread.start()
    thread.join(RESOLVE_S)
    return failed[0]


def _raise_loss(event: ev.EngineReady | ev.EngineLost, _: float) -> list[cmd.Command]:
    if isinstance(event, ev.EngineLost):
        raise event.error
    return []


class PeerGreeting(ExitStack):
    """A consumer worker without caches at an engine's `address`. First `ask`, then `greet`; leaving it disconnects.

    Raises:
        ConfigError: the address or the keys cannot be used.
    """

    def __init__(
        self, config: ConnectorConfig, device: str, address: str, public_key: str = ""
    ) -> None:
        super().__init__()
        interval_s = config.peer.timeout_s / 1000  # the shortest that the session keeps
        peer = msgspec.structs.replace(config.peer, heartbeat_interval_s=interval_s)
        self._config = msgspec.structs.replace(config, peer=peer)
        self._device, self._address = device, address
        self._control = open_control(config, 0)
        self.callback(self._control.close)
        self._key = public_key or self._control.server_key
        self._events = EventQueue()
        self._ranks: defaultdict[LinkId, RankCheck] = defaultdict(RankCheck)
        self._sent_s: dict[tuple[LinkId, int], float] = {}

    def ask(self) -> m.Directory:
        """Return the engine's directory.

        Raises:
            KVConnectorError: it cannot be reached, or does not let us in.
        """
        check_server(security_of(self._config), self._address, self._key)
        handle = self._control.connect(self._address, self._key)
        spoken = versions.SPOKEN
        request = m.DirectoryRequest(
            engine_id=self._config.engine_id,
            any_engine=True,
            oldest_version=spoken.oldest,
            newest_version=spoken.newest,
        )
        self._control.send(handle, encode(request, spoken.oldest))
        deadline_s = time.monotonic() + ASK_S
        while (left_s := deadline_s - time.monotonic()) > 0:
            for event in self._control.poll(left_s):
                if not isinstance(event, Received):
                    raise event.error
                for answer in decode_batch(event.payload):
                    if isinstance(answer, m.DirectoryRefused):
                        raise refusal_error(answer.refusal, answer.text)
                    if isinstance(answer, m.Directory):
                        self._control.disconnect(handle)
                        return answer
        raise PeerUnreachableError("no directory came in time", waited_s=ASK_S)

    def greet(self, directory: m.Directory) -> list[RankCheck]:
        """Meet every rank, as a consumer does that needs them all.

        Raises:
            KVConnectorError: UCX cannot start, or a rank cannot be reached, or refuses.
        """
        theirs, config = directory.geometry.unpack(), self._config
        ours = whole_engine(theirs, config.engine_id)
        self._transport = open_transport(config, self._device)
        self.callback(self._transport.close)
        self._slots = SlotPool(1, WARM_UP_BYTES, self._device)
        self._warm_ups = WarmUps(self._transport, self._events)
        self._links = Links(
            self._control,
            self._transport,
            max_message_bytes=config.control.max_message_bytes,
            over_ucx=config.control.over_ucx,
            report=self._events.append,
        )
        self._hello = hello_of(ours, RANK, new_incarnation(), config, self._transport)
        topology = TpKVTopology(ours, RANK)
        self._engines = RemoteEngines(
            topology, config.peer, defaultdict(lambda: "NHD"), Agenda(), on_change=_raise_loss
        )
        name = EngineAddress(EngineId(theirs.engine_id), self._address, self._key)
        engine, now = self._engines.engine_of(name), time.monotonic()
        for command in self._engines.want(WantRequest("doctor", "doctor", new_secret(), name), now):
            self._carry_out(command, now)
        self._run(self._engines.patience_s(name), lambda: engine.is_ready)
        assert engine.is_ready  # else its loss was raised
        for worker in engine.workers.values():
            self._ranks[worker.link].rank = worker.geometry.rank
        checks = [self._ranks[worker.link] for worker in engine.workers.values()]
        self._run(MEASURE_S, lambda: all(len(c.round_trips_s) >= ROUND_TRIPS for c in checks))
        nbytes = engine.chunk_bytes(WARM_UP_BYTES)
        for worker in engine.workers.values():
            for _ in range(PROBES if directory.library_version else 0):
                self._probe(worker.link, nbytes)
        return checks

    def _probe(self, link: LinkId, nbytes: int) -> None:
        """All of the time counts, that of the request for it, too."""
        check = self._ranks[link]
        num_before = check.num_warm_ups
        tag, _ = self._warm_ups.expect(link, self._slots.scratch(nbytes), PROBE_MESSAGES)
        started_s = time.monotonic()
        probe = m.Probe(first_tag=tag, nbytes=nbytes, count=PROBE_MESSAGES)
        self._links.send(self._link(link), probe)
        self._run(MEASURE_S, lambda: check.num_warm_ups > num_before)
        if check.num_warm_ups > num_before:
            rate = PROBE_MESSAGES * nbytes / (time.monotonic() - started_s)
            check.bytes_per_second = max(check.bytes_per_second, rate)

    def _run(self, limit_s: float, is_enough: Callable[[], bool]) -> None:
        """Take turns until it is enough, or `limit_s` is over.

        Raises:
            KVConnectorError: the engine is lost.
        """
        deadline_s = time.monotonic() + limit_s
        while not is_enough() and time.monotonic() < deadline_s:
            self._links.flush()
            for completion in self._transport.progress():
                self._warm_ups.complete(completion)
            arrived = [(link, payload) for link, payload, _ in self._links.poll()]
            for link, payload in [*arrived, *self._links.receive()]:
                for message in decode_batch(payload):
                    self._take(link, message)
            now = time.monotonic()
            engines = self._engines
            commands = [c for e in engines.agenda.due(now) for c in engines.tick(e, ev.Tick(), now)]
            while self._events:
                event: Any = self._events.popleft()
                if isinstance(event, ev.WarmedUp):
                    self._ranks[event.link].num_warm_ups += 1
                commands += engines.handle(event, now)
            for command in commands:
                self._carry_out(command, now)

    def _take(self, link: Link, message: m.Message) -> None:
        if isinstance(message, m.Bye):
            self._links.lose(link, PeerLostError(f"the peer said goodbye: {message.text}"))
            return
        if isinstance(message, m.HelloReply):
            self._links.set_peer_inbox(link, message.control)
        elif isinstance(message, m.HeartbeatReply):
            sent_s = self._sent_s.pop((link.number, message.number), None)
            if sent_s is not None:
                self._ranks[link.number].round_trips_s.append(time.monotonic() - sent_s)
        self._events.append(ev.event_of(link.number, message))

    def _carry_out(self, command: object, now: float) -> None:
        match command:
            case cmd.OpenLink(link, address, public_key, version):
                check_server(security_of(self._config), address, public_key)
                self._links.open(link, address, public_key, version)
            case cmd.CloseLink(link):
                self._warm_ups.forget(link)
                if (open_link := self._links.get(link)) is not None:
                    self._links.close(open_link)
            case cmd.SendMessage(link, message):
                self._sent_s[link, getattr(message, "number", 0)] = now
                self._links.send(self._link(link), message)
            case cmd.ExpectWarmUp(link):
                tag, nbytes = self._warm_ups.expect(link, self._slots.scratch(WARM_UP_BYTES))
                inbox = self._links.open_inbox(self._link(link))
                hello = msgspec.structs.replace(
                    self._hello, warm_up_tag=tag, warm_up_bytes=nbytes, control=inbox
                )
                self._links.send(self._link(link), hello)
            case cmd.ConnectBack(link, transport_address):
                endpoint = self._transport.connect(transport_address)
                self._links.change_over(self._link(link), endpoint)
                check = self._ranks[link]
                check.lanes = self._transport.lanes(endpoint)
                addresses = self._transport.address, transport_address
                here, there = map(WorkerAddress.decode, addresses)
                check.is_same_host = here.same_host(there)
            case cmd.OpenExport(link):
                self._open(command, self._ranks[link])

    def _open(self, command: cmd.OpenExport, check: RankCheck) -> None:
        check.device = command.export.device
        try:
            check_export(command.export, command.theirs)
            RemotePools(command.export, self._device, self._config.paths.shared_folder).close()
            check.not_direct = ""
        except KVConnectorError as error:
            check.not_direct = error.statement

    def _link(self, number: LinkId) -> Link:
        """The link; it is forgotten only after the engine's loss, which `_run` has raised."""
        link = self._links.get(number)
        if link is None:
            raise PeerLostError("the engine closed a connection")
        return link
