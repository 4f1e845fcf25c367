"""Greeting a running engine as a consumer that wants nothing of it: what `kvconnector doctor --peer` finds out.

It says what a consumer's session says, one rank after the other. Nothing is read and no lease is touched: bandwidth is
that of a `Probe`, which a producer answers from staging memory.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

import msgspec

from kvconnector.config import ConnectorConfig
from kvconnector.control.security import check_server
from kvconnector.datapath.direct.remote_pools import RemotePools
from kvconnector.datapath.endpoints import new_tags
from kvconnector.datapath.staging import WARM_UP_BYTES, SlotPool
from kvconnector.errors import KVConnectorError, PeerLostError, PeerUnreachableError
from kvconnector.ids import Rank, new_incarnation
from kvconnector.runtime.channels import open_control, open_transport, security_of
from kvconnector.runtime.executor import hello_of
from kvconnector.runtime.links import Link, Links
from kvconnector.session import events as ev
from kvconnector.session.commands import LinkId
from kvconnector.session.engines import FIRST_GREETING_FACTOR
from kvconnector.session.export_check import check_export
from kvconnector.topology import EngineGeometry, GroupGeometry, RankGeometry
from kvconnector.transport import MessageSizeError
from kvconnector.transport.ucx.address import WorkerAddress
from kvconnector.wire import decode_batch, error_of
from kvconnector.wire import messages as m
from kvconnector.wire.export import PoolExport

PROBE_MESSAGES, PROBES = 32, 3
"""Messages of `WARM_UP_BYTES` in one probe, and how many a rank is asked for; the quickest counts."""
MEASURE_S = 5.0
"""How long a probe or a heartbeat may take."""
PINGS = 20
DIRECTORY_LINK = LinkId(0)
RANK = Rank(0, 0)
"""Ours."""


@dataclass(slots=True, eq=False)
class RankCheck:
    """What one rank answered. `not_direct` says why its pools cannot be read from here; empty: they can."""

    rank: Rank
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
        self._lost: deque[ev.LinkLost] = deque()
        self._tickets: set[int] = set()
        self._limit_s = FIRST_GREETING_FACTOR * config.peer.hello_timeout_s
        try:
            control = open_control(config, 0)
            self.callback(control.close)
            self._transport = open_transport(config, device)
            self.callback(self._transport.close)
            self._slots = SlotPool(1, WARM_UP_BYTES, device)
        except BaseException:
            self.close()
            raise
        self._links = Links(
            control,
            self._transport,
            max_message_bytes=config.control.max_message_bytes,
            over_ucx=config.control.over_ucx,
            report=self._lost.append,
        )
        self._address, self._key = address, public_key or control.server_key

    def ask(self) -> m.Directory:
        """Return the engine's directory.

        Raises:
            KVConnectorError: it cannot be reached, or does not let us in.
        """
        link = self._connect(DIRECTORY_LINK, self._address, self._key)
        self._send(link, m.DirectoryRequest(engine_id=self._config.engine_id, any_engine=True))
        for answer in self._messages(link, bool, self._limit_s, sleep_s=0.02):
            if isinstance(answer, m.DirectoryRefused):
                raise error_of(answer.refusal, answer.text)
            if isinstance(answer, m.Directory):
                self._links.close(link)
                return answer
        raise PeerUnreachableError(
            "no directory came in time: does an engine listen at this address?",
            address=self._address,
            waited_s=self._limit_s,
        )

    def greet(self, directory: m.Directory) -> list[RankCheck]:
        """Meet every rank, as a consumer does that needs them all.

        Raises:
            KVConnectorError: a rank cannot be reached, or refuses.
        """
        theirs = directory.geometry.unpack()
        ours = whole_engine(theirs, self._config.engine_id)
        self._hello = hello_of(ours, RANK, new_incarnation(), self._config, self._transport)
        ranks = []
        for number, worker in enumerate(directory.workers, 1):
            rank = RankCheck(Rank(worker.pp_rank, worker.tp_rank))
            try:
                link = self._connect(LinkId(number), worker.control_address, worker.public_key)
                reply = self._meet(link, rank, theirs.rank_geometry(rank.rank))
                for ping in range(1, PINGS + 1):
                    self._ping(link, rank, ping)
                for _ in range(PROBES if directory.library_version else 0):
                    self._probe(link, rank, reply.max_chunk_bytes or WARM_UP_BYTES)
            except KVConnectorError as error:
                error.context.setdefault("engine", theirs.engine_id)
                error.context.setdefault("rank", str(rank.rank))
                raise
            ranks.append(rank)
        return ranks

    def _meet(self, link: Link, rank: RankCheck, theirs: RankGeometry) -> m.HelloReply:
        hello = msgspec.structs.replace(
            self._hello,
            warm_up_tag=self._post(WARM_UP_BYTES, 1),
            warm_up_bytes=WARM_UP_BYTES,
            control=self._links.open_inbox(link),
        )
        self._send(link, hello)
        answers = self._messages(link, bool, self._limit_s)
        reply = next((answer for answer in answers if isinstance(answer, m.HelloReply)), None)
        if reply is None:
            raise PeerUnreachableError(
                "the engine did not complete the handshake in time", waited_s=self._limit_s
            )
        if reply.refusal is not None:
            raise error_of(reply.refusal, reply.text)
        self._links.set_peer_inbox(link, reply.control)
        if reply.transport_address:
            endpoint = self._transport.connect(reply.transport_address)
            self._links.change_over(link, endpoint)
            rank.lanes = self._transport.lanes(endpoint)
            here, there = map(
                WorkerAddress.decode, (self._transport.address, reply.transport_address)
            )
            rank.is_same_host = here.same_host(there)
        if reply.export is not None:
            self._open(reply.export, rank, theirs)
        self._messages(link, lambda _: not self._tickets, self._limit_s)
        return reply

    def _open(self, export: PoolExport, rank: RankCheck, theirs: RankGeometry) -> None:
        rank.device = export.device
        try:
            check_export(export, theirs)
            RemotePools(export, self._device).close()
            rank.not_direct = ""
        except KVConnectorError as error:
            rank.not_direct = error.statement

    def _ping(self, link: Link, rank: RankCheck, number: int) -> None:
        started_s = time.monotonic()
        answer = m.HeartbeatReply(number=number)
        self._send(link, m.Heartbeat(transfers=(), number=number))
        if answer in self._messages(link, lambda found: answer in found, MEASURE_S):
            rank.round_trips_s.append(time.monotonic() - started_s)

    def _probe(self, link: Link, rank: RankCheck, max_bytes: int) -> None:
        """All of the time counts, that of the request for it, too."""
        nbytes = min(WARM_UP_BYTES, max_bytes)
        tag = self._post(nbytes, PROBE_MESSAGES)
        started_s = time.monotonic()
        self._send(link, m.Probe(first_tag=tag, nbytes=nbytes, count=PROBE_MESSAGES))
        self._messages(link, lambda _: not self._tickets, MEASURE_S)
        if not self._tickets:
            rate = PROBE_MESSAGES * nbytes / (time.monotonic() - started_s)
            rank.bytes_per_second = max(rank.bytes_per_second, rate)

    def _messages(
        self,
        link: Link,
        is_enough: Callable[[list[m.Message]], bool],
        limit_s: float,
        *,
        sleep_s: float = 0.0,
    ) -> list[m.Message]:
        """Return what comes on a link until it is enough, or `limit_s` is over. Without sleep the times are right."""
        found: list[m.Message] = []
        deadline_s = time.monotonic() + limit_s
        while not is_enough(found) and time.monotonic() < deadline_s:
            for completion in self._transport.progress():
                self._tickets.discard(completion.ticket)
                # a producer with smaller slots sends a shorter message
                if completion.error and not isinstance(completion.error, MessageSizeError):
                    raise completion.error
            arrived = [(where, payload) for where, payload, _ in self._links.poll()]
            for where, payload in [*arrived, *self._links.receive()]:
                for message in decode_batch(payload) if where is link else ():
                    if isinstance(message, m.Bye):
                        raise PeerLostError(f"the peer said goodbye: {message.text}")
                    found.append(message)
            if self._lost:
                raise self._lost.popleft().error
            if sleep_s and not found:
                time.sleep(sleep_s)
        return found

    def _connect(self, number: LinkId, address: str, public_key: str) -> Link:
        check_server(security_of(self._config), address, public_key)
        return self._links.open(number, address, public_key)

    def _send(self, link: Link, message: m.Message) -> None:
        self._links.send(link, message)
        self._links.outgoing.flush()

    def _post(self, nbytes: int, count: int) -> int:
        """Receives of messages without meaning: the first of their tags."""
        tag, buffer = new_tags(), self._slots.scratch(nbytes)
        self._tickets |= {self._transport.recv(tag + index, buffer) for index in range(count)}
        return tag
