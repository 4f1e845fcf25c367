"""Greeting a running engine as a consumer that wants nothing of it: what `kvconnector doctor --peer` finds out.

The look-up, the checks and the greeting are those of a consumer's session. Nothing is read and no lease is touched:
bandwidth is that of a `Probe`, which a producer answers from staging memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

import msgspec

from kvconnector.config import ConnectorConfig
from kvconnector.control.base import Disconnected, PeerHandle
from kvconnector.control.security import check_server
from kvconnector.datapath.direct.remote_pools import RemotePools
from kvconnector.datapath.endpoints import new_tags
from kvconnector.datapath.staging import WARM_UP_BYTES, SlotPool
from kvconnector.errors import KVConnectorError, PeerLostError, PeerUnreachableError
from kvconnector.ids import EngineAddress, EngineId, Rank, new_incarnation, new_secret
from kvconnector.runtime.channels import open_control, open_transport, security_of
from kvconnector.runtime.executor import hello_of
from kvconnector.runtime.tagged_control import TaggedControl
from kvconnector.session import commands as cmd
from kvconnector.session import events as ev
from kvconnector.session.commands import LinkId
from kvconnector.session.engines import RemoteEngines
from kvconnector.session.export_check import check_export
from kvconnector.session.orders import WantRequest
from kvconnector.session.remote_engine import Worker
from kvconnector.topology import EngineGeometry, GroupGeometry, RankGeometry, TpKVTopology
from kvconnector.transport import MessageSizeError
from kvconnector.transport.ucx.address import WorkerAddress
from kvconnector.wire import decode, encode, error_of
from kvconnector.wire import messages as m

PROBE_MESSAGES, PROBES = 32, 3
"""Messages of `WARM_UP_BYTES` in one probe, and how many a rank is asked for; the quickest counts."""
MEASURE_S = 5.0
"""How long a probe or a heartbeat may take."""
PINGS = 20
DIRECTORY_LINK = LinkId(0)
RANK = Rank(0, 0)


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


class PeerCheck(ExitStack):
    """A consumer worker without caches at an engine's `address`. First `ask`, then `greet`; leaving it disconnects.

    Raises:
        ConfigError: the address or the keys cannot be used.
        TransportError: UCX cannot start.
    """

    def __init__(
        self, config: ConnectorConfig, device: str, address: str, public_key: str = ""
    ) -> None:
        super().__init__()
        self._config = config
        self._device = device
        self._engines: RemoteEngines | None = None
        self._handles: dict[LinkId, PeerHandle] = {}
        self._ranks: dict[LinkId, RankCheck] = {}
        self._tickets: dict[int, LinkId] = {}
        try:
            self._control = open_control(config, 0)
            self.callback(self._control.close)
            self._transport = open_transport(config, device)
            self.callback(self._transport.close)
            self._slots = SlotPool(1, WARM_UP_BYTES, device)
        except BaseException:
            self.close()
            raise
        limit = config.control.max_message_bytes
        self._tagged = TaggedControl(
            self._transport, max_message_bytes=limit, enabled=config.control.over_ucx
        )
        self._address, self._key = address, public_key or self._control.server_key

    def ask(self) -> m.Directory:
        """What the engine says of itself.

        Raises:
            KVConnectorError: it cannot be reached, or does not let us in.
        """
        self._execute(cmd.OpenLink(DIRECTORY_LINK, self._address, self._key))
        request = m.DirectoryRequest(engine_id=self._config.engine_id, any_engine=True)
        self._execute(cmd.SendMessage(DIRECTORY_LINK, request))
        limit_s = 3 * self._config.peer.hello_timeout_s
        for event in self._until(bool, limit_s, sleep_s=0.1):
            if isinstance(event, ev.FromPeer) and isinstance(event.message, m.Directory):
                self._execute(cmd.CloseLink(DIRECTORY_LINK))
                return event.message
            if isinstance(event, ev.FromPeer) and isinstance(event.message, m.DirectoryRefused):
                raise error_of(event.message.refusal, event.message.text)
            if isinstance(event, ev.LinkLost):
                raise event.error
        raise PeerUnreachableError(
            "no directory came in time: does an engine listen at this address?",
            address=self._address,
            waited_s=limit_s,
        )

    def greet(self, directory: m.Directory) -> list[RankCheck]:
        """Meet every rank, as a consumer does that needs them all.

        Raises:
            KVConnectorError: a rank cannot be reached, or refuses.
        """
        theirs = directory.geometry.unpack()
        ours = whole_engine(theirs, self._config.engine_id)
        self._hello = hello_of(ours, RANK, new_incarnation(), self._config, self._transport)
        topology = TpKVTopology(ours, RANK)
        engines = self._engines = RemoteEngines(
            topology, self._config.peer, wants=lambda _: (), is_read=lambda _: False
        )
        name = EngineAddress(EngineId(theirs.engine_id), self._address, self._key)
        self._tell(WantRequest("check", "check", new_secret(), *name))
        while engines.ready(name) is None:  # a tick ends it in time
            self._until(lambda _: engines.ready(name) is not None, 0.1)
            self._tell(ev.Tick())
        engine = engines.ready(name)
        workers = sorted(engine.workers.items()) if engine is not None else []
        for rank, worker in workers:
            self._ranks[worker.link].rank = rank
            for _ in range(PINGS):
                self._ping(worker)
            for _ in range(PROBES if directory.library_version else 0):
                self._probe(worker)
        return [self._ranks[worker.link] for _, worker in workers]

    def _ping(self, worker: Worker) -> None:
        started_s = time.monotonic()
        number = worker.heartbeat_sent(started_s)
        answer = ev.FromPeer(worker.link, m.HeartbeatReply(number=number))
        beat = m.Heartbeat(transfers=(), number=number)
        self._execute(cmd.SendMessage(worker.link, beat))
        if answer in self._until(lambda found: answer in found, MEASURE_S):
            self._ranks[worker.link].round_trips_s.append(time.monotonic() - started_s)

    def _probe(self, worker: Worker) -> None:
        """All of the time counts, that of the request for it, too."""
        nbytes = min(WARM_UP_BYTES, worker.max_chunk_bytes or WARM_UP_BYTES)
        tag = self._post(worker.link, nbytes, PROBE_MESSAGES)
        started_s = time.monotonic()
        probe = m.Probe(first_tag=tag, nbytes=nbytes, count=PROBE_MESSAGES)
        self._execute(cmd.SendMessage(worker.link, probe))
        self._until(lambda _: not self._tickets, MEASURE_S)
        if not self._tickets:
            rank = self._ranks[worker.link]
            rate = PROBE_MESSAGES * nbytes / (time.monotonic() - started_s)
            rank.bytes_per_second = max(rank.bytes_per_second, rate)

    def _until(
        self, is_enough: Callable[[list[object]], bool], limit_s: float, *, sleep_s: float = 0.0
    ) -> list[object]:
        """What happens until it is enough, or time is over. Without sleep the times are right."""
        found: list[object] = []
        deadline_s = time.monotonic() + limit_s
        while not is_enough(found) and time.monotonic() < deadline_s:
            events = self._look(sleep_s)
            found += events
            for event in events:
                self._tell(event)
        return found

    def _look(self, sleep_s: float) -> list[object]:
        events: list[object] = []
        for completion in self._transport.progress():
            link = self._tickets.pop(completion.ticket, None)
            if link is not None:
                # a producer with smaller slots sends a shorter message
                is_shorter = isinstance(completion.error, MessageSizeError)
                events.append(ev.WarmedUp(link, None if is_shorter else completion.error))
        links = {handle: link for link, handle in self._handles.items()}
        for arrival in self._control.poll(sleep_s):
            link = links.get(arrival.handle)
            if link is None:
                continue
            if isinstance(arrival, Disconnected):
                events.append(ev.LinkLost(link, arrival.error))
            else:
                events.append(self._event_of(link, arrival.payload))
        for link, content in self._tagged.receive():
            if isinstance(content, bytes):
                events.append(self._event_of(link, content))
            else:
                events.append(ev.LinkLost(link, content))
        return events

    def _event_of(self, link: LinkId, payload: bytes) -> object:
        try:
            message = decode(payload)
            if isinstance(message, m.Bye):
                raise PeerLostError(f"the peer said goodbye: {message.text}")
            if isinstance(message, m.HelloReply):
                self._tagged.set_peer_inbox(link, message.control)
            return ev.event_of(link, message)
        except KVConnectorError as error:
            return ev.LinkLost(link, error)

    def _tell(self, event: object) -> None:
        """Raises what lost the engine."""
        if self._engines is None:
            return
        for answer in self._engines.handle(event, time.monotonic()):
            if isinstance(answer, ev.EngineLost):
                raise answer.error
            if not isinstance(answer, ev.EngineReady):
                self._execute(answer)

    def _execute(self, command: cmd.Command) -> None:
        """As `runtime.executor` does; what fails raises."""
        match command:
            case cmd.OpenLink(link, address, public_key):
                check_server(security_of(self._config), address, public_key)
                self._handles[link] = self._control.connect(address, public_key)
            case cmd.SendMessage(link, message):
                if not self._tagged.send(link, encode(message)):
                    self._control.send(self._handles[link], encode(message))
            case cmd.CloseLink(link):
                self._tagged.remove(link)
                self._control.disconnect(self._handles.pop(link))
            case cmd.ExpectWarmUp(link):
                self._ranks[link] = RankCheck()
                hello = msgspec.structs.replace(
                    self._hello,
                    warm_up_tag=self._post(link, WARM_UP_BYTES, 1),
                    warm_up_bytes=WARM_UP_BYTES,
                    control=self._tagged.open_inbox(link),
                )
                self._execute(cmd.SendMessage(link, hello))
            case cmd.ConnectBack(link, transport_address):
                endpoint = self._transport.connect(transport_address)
                self._tagged.open(link, endpoint)
                rank = self._ranks[link]
                rank.lanes = self._transport.lanes(endpoint)
                here, there = map(
                    WorkerAddress.decode, (self._transport.address, transport_address)
                )
                rank.is_same_host = here.same_host(there)
            case cmd.OpenExport(link, _, export, theirs):
                rank = self._ranks[link]
                rank.device = export.device
                try:
                    check_export(export, theirs)
                    RemotePools(export, self._device).close()
                    rank.not_direct = ""
                except KVConnectorError as error:
                    rank.not_direct = error.statement

    def _post(self, link: LinkId, nbytes: int, count: int) -> int:
        """Receives of messages without meaning: the first of their tags."""
        tag, buffer = new_tags(), self._slots.scratch(nbytes)
        for index in range(count):
            self._tickets[self._transport.recv(tag + index, buffer)] = link
        return tag
