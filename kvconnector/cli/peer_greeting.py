"""The greeting of `kvconnector doctor --peer`: a consumer greets a running engine, and reads nothing.

The driver, its links and its data path are a worker's, without caches; its session keeps the answers of the producer's
ranks. It wants a request without tokens, so it reads nothing and touches no lease. It measures bandwidth by `Probe`s,
which a producer answers from staging memory. Everything runs in the caller's thread, which never sleeps after the
directory has answered: the time to wake up would count.
"""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from statistics import median

import msgspec

from kvconnector.bench.sizes import format_bytes
from kvconnector.cli.console import Finding, Verdict
from kvconnector.config import ConnectorConfig, PeerConfig
from kvconnector.control.address import parse_address
from kvconnector.control.base import Received
from kvconnector.control.lookup import Lookup
from kvconnector.control.security import check_server
from kvconnector.datapath import Pools
from kvconnector.datapath.direct.export_check import check_export
from kvconnector.datapath.pump.opening import open_datapath
from kvconnector.datapath.staging import WARM_UP_BYTES
from kvconnector.errors import KVConnectorError, PeerUnreachableError
from kvconnector.ids import EngineAddress, EngineId, Rank, new_incarnation, new_secret
from kvconnector.runtime.channels import (
    MAX_MESSAGES_PER_TURN,
    open_control,
    open_transport,
    ucx_options,
)
from kvconnector.runtime.cuda_context import CudaContext
from kvconnector.runtime.driver import Driver
from kvconnector.runtime.outbox import Outbox
from kvconnector.session import ConsumerSession
from kvconnector.session.engines import FIRST_GREETING_FACTOR
from kvconnector.session.link import FromPeer, Link
from kvconnector.session.load import RemoteWorker
from kvconnector.session.orders import LoadRequest, WantRequest
from kvconnector.session.port import Ports
from kvconnector.topology import EngineGeometry, GroupGeometry, RankGeometry
from kvconnector.transport.ucx import load_library
from kvconnector.transport.ucx.address import WorkerAddress
from kvconnector.transport.ucx.ports import active_rdma_ports
from kvconnector.transport.ucx.rdma import RDMA_LANES, RdmaChoice
from kvconnector.wire import decode_batch, encode, refusal_error, versions
from kvconnector.wire import messages as m

PROBE_MESSAGES, PROBES = 32, 3
"""Messages of `WARM_UP_BYTES` in one probe, and probes per rank; the quickest counts."""
ROUND_TRIPS = 20
RESOLVE_S, ASK_S, CONNECT_S = 1.5, 2.5, 0.5
"""Seconds for a name to resolve, for the directory to answer, and for a silent one to accept a plain connection."""
TURN_S, MEASURE_S = 1e-4, 5.0
"""Most seconds of one turn, and of the heartbeats or one probe."""
RANK = Rank(0, 0)


def whole_engine(like: EngineGeometry, engine_id: str) -> EngineGeometry:
    """Return an engine of one rank that holds everything of another engine, so that it greets each of its ranks."""
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


def reason_for_silence(address: str) -> str:
    """Find out by a plain connection why an address does not answer. Returns the reason and its remedy.

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
        if error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH):
            return (
                f"this host has no route to that address ({error}): see the address, this host's interfaces and routes,"
                " and in a pod its network policy"
            )
        return (
            f"nothing answers at this address ({error}): see whether the host is up, and whether a firewall drops"
            " packets to this port"
        )
    return (
        "something accepts connections at this port and does not answer: see whether the engine is stopped or stuck,"
        " and whether the port is that of its directory service, control.port, and no other service's"
    )


def resolve(host: str) -> str:
    """Look up a host, within `RESOLVE_S`. Returns the reason for a failure, "" if there was none."""
    ended = threading.Event()
    lookup = Lookup(host, ended.set)
    return lookup.error if ended.wait(RESOLVE_S) else f"no answer within {RESOLVE_S} s"


class _Session(ConsumerSession):
    """Greets the engine `name`, and keeps its ranks' answers; `error` is set if the engine was lost."""

    def __init__(
        self, name: EngineAddress, ours: EngineGeometry, peer: PeerConfig, ports: Ports
    ) -> None:
        element_orders = defaultdict[tuple[int, int], str](lambda: "NHD")
        super().__init__(
            ours, RANK, peer, ports, chunk_bytes=WARM_UP_BYTES, element_orders=element_orders
        )
        self.engine = self._engines.engine_of(name)
        self.patience_s = self._engines.patience_s(self.engine)
        self.replies: dict[Link, m.HelloReply] = {}
        self.round_trips_s: defaultdict[Link, list[float]] = defaultdict(list)

    @property
    def error(self) -> KVConnectorError | None:
        """The reason for the loss of the engine; None if it was not lost."""
        return self.engine.loss

    def handle(self, event: object, now: float) -> None:
        super().handle(event, now)
        match event:
            case FromPeer(link, m.HelloReply() as reply):
                self.replies[link] = reply
            case FromPeer(link, m.HeartbeatReply()):
                sent_s = {each.link: each.alive_at for each in self.engine.workers.values()}
                self.round_trips_s[link].append(now - sent_s[link])


class PeerGreeting(ExitStack):
    """A consumer worker without caches at an engine's `address`. First `ask`, then `greet`, which disconnects last.

    Raises:
        ConfigError: The address or the keys cannot be used.
    """

    def __init__(
        self, config: ConnectorConfig, device: str, address: str, public_key: str = ""
    ) -> None:
        super().__init__()
        self._staging_bytes = config.staging.budget_bytes  # as for an engine here
        # The shortest interval that the session accepts, unless an engine that does not answer would get too many: it
        # keeps `MAX_MESSAGES_PER_TURN` unread. If a peer goes while more are waiting, libzmq 4.3.5 aborts an engine of
        # an earlier build, whose channel still sends ZMTP heartbeats (see `control.zmq_sockets`).
        patience_s = FIRST_GREETING_FACTOR * config.peer.hello_timeout_s
        interval_s = max(config.peer.timeout_s / 1000, 2 * patience_s / MAX_MESSAGES_PER_TURN)
        peer = msgspec.structs.replace(config.peer, heartbeat_interval_s=interval_s)
        staging = msgspec.structs.replace(
            config.staging, chunk_bytes=WARM_UP_BYTES, budget_bytes=4 * WARM_UP_BYTES, spin_s=1.0
        )
        self._config = msgspec.structs.replace(config, peer=peer, staging=staging)
        self._device, self._address = device, address
        self._control = open_control(config, 0)
        self.callback(self._control.close)
        self._key = public_key or self._control.server_key

    def ask(self) -> m.Directory:
        """Return the engine's directory. Raises KVConnectorError: it cannot be reached, or refuses our keys."""
        check_server(self._control.security, self._address, self._key)
        handle = self._control.connect(self._address, self._key)
        spoken = versions.SPOKEN
        request = m.DirectoryRequest(
            engine_id=self._config.engine_id,
            any_engine=True,
            oldest_version=spoken.oldest,
            newest_version=spoken.newest,
            max_message_bytes=self._config.control.max_message_bytes,
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

    def greet(self, directory: m.Directory) -> Iterator[Finding]:
        """Greet every rank, as a consumer that needs all of them does. Yields the findings of each.

        Raises:
            KVConnectorError: UCX cannot start, or a rank cannot be reached, or refuses.
        """
        theirs, config = directory.geometry.unpack(), self._config
        ours = whole_engine(theirs, config.engine_id)
        pools = Pools([], self._device)
        if self._device != "cpu":
            CudaContext(self._device).make_current()
        self._transport = open_transport(config, self._device)
        self.callback(self._transport.close)
        self._datapath = open_datapath(config, pools, self._transport)
        self.callback(self._datapath.close)
        self._driver = Driver(
            config,
            engine=ours,
            rank=RANK,
            incarnation=new_incarnation(),
            pools=pools,
            control=self._control,
            transport=self._transport,
            datapath=self._datapath,
            outbox=Outbox(),
        )
        name = EngineAddress(EngineId(theirs.engine_id), self._address, self._key)
        self._session = session = _Session(name, ours, config.peer, self._driver.ports)
        self._driver.consumer = session
        no_tokens = ((0, 0),) * ours.num_groups
        want = WantRequest("doctor", "doctor", new_secret(), name)
        self._driver.put([want, LoadRequest("doctor", no_tokens, (), ())])
        self._run(2 * session.patience_s, lambda: session.engine.is_ready)
        assert session.engine.is_ready  # otherwise its loss was raised
        workers, trips_s = [*session.engine.workers.values()], session.round_trips_s
        self._run(MEASURE_S, lambda: all(len(trips_s[w.link]) >= ROUND_TRIPS for w in workers))
        for worker in workers:
            yield from self._rank(worker, PROBES if directory.library_version else 0)

    def _rank(self, worker: RemoteWorker, num_probes: int) -> Iterator[Finding]:
        name, trips_s = str(worker.geometry.rank), self._session.round_trips_s[worker.link]
        if not trips_s:
            yield Finding(name, "warn", "it answered the greeting, but no heartbeat")
            return
        text = (
            f"round trip {median(trips_s) * 1e6:.0f} us, {min(trips_s) * 1e6:.0f} to {max(trips_s) * 1e6:.0f} us,"
            f" {len(trips_s)} heartbeats"
        )
        yield Finding(name, "ok", text, {"round_trip_s": median(trips_s)})
        why = self._reason_for_packing(worker)
        path = f"packed: {why}" if why else "direct: its pools can be read here"
        yield Finding("  path", "note" if why else "ok", f"transfers are {path}")
        yield self._lanes(worker.link)
        rate = max((self._probe(worker.link) for _ in range(num_probes)), default=0.0)
        if not rate:
            text = "not measured: its version sends nothing to measure by"
            yield Finding("  bandwidth", "note", text)
            return
        text = (
            f"{rate / 1e9:.2f} GB/s over these lanes: {PROBE_MESSAGES} messages of {format_bytes(WARM_UP_BYTES)}"
            " between staging memory, no blocks read"
        )
        yield Finding("  bandwidth", "ok", text, {"bytes_per_second": rate})

    def _reason_for_packing(self, worker: RemoteWorker) -> str:
        """Return the reason why the rank's pools cannot be read from here; "" if they can."""
        if self._config.paths.direct == "never":
            return "paths.direct=never here"
        if self._config.verify == "checksum":
            return "verify=checksum"
        reply = self._session.replies[worker.link]
        export = reply.export
        if export is None and reply.text:
            return f"it offers its pools to nobody: {reply.text}"
        if export is None:
            return "it offers its pools to nobody: paths.direct=never there, or see its log"
        try:
            if not worker.link.maps_pools:  # the worker's attempt has failed
                check_export(export, worker.geometry)
                self._datapath.reads.open(worker.link, export)
        except KVConnectorError as error:
            is_elsewhere = (export.device, self._device) == ("cuda", "cpu")
            hint = "; its caches are on a GPU: give --device cuda:N" if is_elsewhere else ""
            return error.statement + hint
        return ""

    def _lanes(self, link: Link) -> Finding:
        lanes = self._datapath.receives.lanes(link)
        theirs = WorkerAddress.decode(self._session.replies[link].transport_address)
        if WorkerAddress.decode(self._transport.address).same_host(theirs):
            return Finding("  lanes", "ok", f"{lanes} within this host")
        if any(lane.startswith(RDMA_LANES) for lane in lanes.split("+")):
            return Finding("  lanes", "ok", f"{lanes}: RDMA")
        library = load_library(self._config.ucx.library)
        choice = RdmaChoice(library, self._device, staging_bytes=self._staging_bytes)
        why = choice.explain(ucx_options(self._config))
        verdict: Verdict = "warn" if active_rdma_ports() else "note"
        return Finding("  lanes", verdict, f"{lanes}, no RDMA: {why}")

    def _probe(self, link: Link) -> float:
        """Measure bytes per second, from sending the request to the last byte; 0 if they did not arrive in time."""
        nbytes = self._session.engine.chunk_bytes
        datapath = self._datapath
        tag, _ = datapath.receives.expect_warm_up(link, nbytes, PROBE_MESSAGES)
        started_s = time.monotonic()
        probe = m.Probe(first_tag=tag, nbytes=nbytes, count=PROBE_MESSAGES)
        self._driver.links.send(link, probe)
        self._run(MEASURE_S, lambda: not datapath.warm_ups)
        is_over = not datapath.warm_ups
        return PROBE_MESSAGES * nbytes / (time.monotonic() - started_s) if is_over else 0.0

    def _run(self, limit_s: float, is_enough: Callable[[], bool]) -> None:
        """Take turns until `is_enough`, or until `limit_s` has passed. Raises KVConnectorError: the engine is lost."""
        deadline_s = time.monotonic() + limit_s
        while not is_enough() and time.monotonic() < deadline_s:
            self._driver.turn(TURN_S)
            if self._session.error is not None:
                raise self._session.error
