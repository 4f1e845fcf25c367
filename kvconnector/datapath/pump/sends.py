"""The producer's half of the book of reads: endpoints, and the programs that send."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from kvconnector.datapath.base import Program, Report, as_connector_error
from kvconnector.datapath.endpoints import Endpoints
from kvconnector.datapath.pump.copies import Jobs
from kvconnector.datapath.pump.machine import Machine
from kvconnector.datapath.pump.network import error_of, phases_of
from kvconnector.errors import (
    KVConnectorError,
    PeerLostError,
    TransferTimeoutError,
    TransportError,
)
from kvconnector.session import events as ev
from kvconnector.session.commands import LinkId
from kvconnector.transport import Buffer, Completion, Transport
from kvconnector_kernels.pump import records as r
from kvconnector_kernels.relayout import RelayoutError

logger = logging.getLogger(__name__)

GPU_LANES = ("cuda_ipc", "rc_", "dc_", "gga_", "srd")
"""How the lanes begin that move GPU memory without a copy in host memory."""
# What needs no memory registered before it is sent from, and was measured.
IN_PLACE_LANES = frozenset(("self", "tcp", "sysv", "posix", "cma"))


@dataclass(slots=True, eq=False)
class _Send:
    """What the rows do not say about a send.

    `held` tell which of its operations, given up while they read its blocks, are over; at most until `free_at_s`;
    `stopped_s` is when it was found to be stopped with such operations in flight.
    """

    link: LinkId
    read_id: int
    jobs: Jobs
    error: KVConnectorError | None = None
    held: list[Callable[[], bool]] = field(default_factory=list)
    free_at_s: float = 0.0
    stopped_s: float | None = None


class Sends:
    """All sends of one worker. Slots go round between them, one chunk each, so that a long one delays a short one by a
    few chunks only.

    The slots of sends that were given up rest for `quarantine_s`. Sends from the pools end once UCX is through with the
    blocks, or as long after they were given up. A consumer that leaves a stopped one unreceived for that time is given
    up.
    """

    def __init__(
        self,
        transport: Transport,
        machine: Machine,
        events: Report,
        *,
        quarantine_s: float,
        on_gpu: bool = False,
        clock: Callable[[], float],
    ) -> None:
        self._network = machine.network
        self._on_gpu = on_gpu
        self._machine = machine
        self._slots = machine.send_slots
        self._quarantine_s = quarantine_s
        self._clock = clock
        self._events = events
        self.endpoints = Endpoints(transport, self._events)
        self._in_place: dict[LinkId, bool] = {}
        self._sends: dict[int, _Send] = {}
        self._rows: dict[tuple[LinkId, int], int] = {}
        self.has_sent = False

    def close_endpoint(self, link: LinkId) -> None:
        """See `DataPath.close_endpoint`."""
        if link in self.endpoints:
            self._give_up(link, PeerLostError("the consumer's endpoint was closed"))
            self._in_place.pop(link, None)
            self.endpoints.close(link)

    def submit(
        self, link: LinkId, read_id: int, program: Program, *, first_tag: int, window: int
    ) -> None:
        """See `DataPath.submit_send`."""
        self.has_sent = True
        try:
            endpoint = self._endpoint(link)
            jobs = self._machine.copies.make_jobs(program, packing=True)
        except (RelayoutError, KVConnectorError) as error:
            self._events.append(ev.SendStopped(link, read_id, 0, as_connector_error(error)))
            return
        if jobs.places is not None and not self._sends_in_place(link, endpoint):
            jobs = msgspec.structs.replace(jobs, places=None)
        row = self._machine.sends.add(
            places=0 if jobs.places is None else jobs.places.ctypes.data,
            first_tag=first_tag,
            jobs=jobs.address,
            num_chunks=len(program.chunks),
            window=window,
            owner=endpoint,
        )
        self._sends[row] = _Send(link, read_id, jobs)
        self._rows[link, read_id] = row

    def stop(self, link: LinkId, read_id: int) -> None:
        """See `DataPath.stop_send`."""
        row = self._rows.get((link, read_id))
        if row is not None:
            self._machine.sends.rows[row]["stopped"] = 1

    def complete(self, completion: Completion) -> bool:
        """Take a completion of the transport; False if it is not ours."""
        link = self.endpoints.complete(completion)
        if link is not None and completion.error is None:
            self._log_lanes(link)
        return link is not None

    def _log_lanes(self, link: LinkId) -> None:
        """Say once how packed reads by a consumer will travel."""
        endpoint = self.endpoints.get(link)
        if endpoint is None:
            return
        lanes = self._network.lanes(endpoint)
        names = [lane.partition("/")[0] for lane in lanes.split("+")]
        if lanes and self._on_gpu and not any(name.startswith(GPU_LANES) for name in names):
            logger.warning(
                "packed reads by a consumer are copied through host memory, over %s: UCX has no lane between the GPUs"
                " (cuda_ipc on one host, RDMA between hosts)",
                lanes,
            )
        elif lanes:
            logger.info("packed reads by a consumer travel over %s", lanes)

    def refresh(self) -> None:
        """Look at the endpoints: their handles may have changed, their peers may be lost."""
        self._take_failed()
        self._slots.end_quarantines()
        self._refresh_in_place()
        self.refresh_endpoints()

    def refresh_endpoints(self) -> None:
        """Before every run: there are new sends, handles may have changed, and a lost peer's is none any more."""
        for row, send in self._sends.items():
            if send.error is None:
                try:
                    handle = self._network.handle(self._endpoint(send.link))
                    self._machine.sends.rows[row]["endpoint"] = handle
                except KVConnectorError as error:
                    self._fail(send.link, error)

    def poll(self) -> None:
        """See what ended."""
        self._take_failed()
        rows = self._machine.sends.rows
        for index in [index for index in self._sends if rows[index]["phase"] == r.OVER]:
            self._end(index)

    def release(self) -> None:
        """Send nothing more, and leave what UCX still holds to the transport. Its endpoints stay open."""
        for link in self.endpoints.links():
            self._give_up(link, TransportError("the data path was closed"))

    def _endpoint(self, link: LinkId) -> int:
        endpoint = self.endpoints.get(link)
        if endpoint is None:
            raise PeerLostError("the consumer's endpoint was closed")
        return endpoint

    def _sends_in_place(self, link: LinkId, endpoint: int) -> bool:
        """Whether the pools may be sent from to a consumer; decided, and told, with its first read that could be."""
        if link not in self._in_place:
            lanes = self._network.lanes(endpoint)
            names = {lane.partition("/")[0] for lane in lanes.split("+")}
            may = self._in_place[link] = names <= IN_PLACE_LANES
            logger.info(
                "chunks of one run are %s, over %s", "not packed" if may else "packed", lanes
            )
        return self._in_place[link]

    def _refresh_in_place(self) -> None:
        """See which blocks UCX has let go of, and give up the consumers that keep those of stopped sends."""
        rows, now_s = self._machine.sends.rows, self._clock()
        for index, send in list(self._sends.items()):
            row = rows[index]
            if send.held:
                held = [is_over for is_over in send.held if not is_over()]
                held = held if now_s < send.free_at_s else []
                row["num_in_flight"] -= len(send.held) - len(held)
                send.held = held
            elif row["places"] and row["stopped"] and row["num_in_flight"]:
                send.stopped_s = now_s if send.stopped_s is None else send.stopped_s
                if now_s - send.stopped_s >= self._quarantine_s:
                    error = "the consumer did not take what was sent to it"
                    self._fail(send.link, TransferTimeoutError(error, read_id=send.read_id))

    def _fail(self, link: LinkId, error: KVConnectorError) -> None:
        self._give_up(link, error)
        self.endpoints.fail(link, error)

    def _give_up(self, link: LinkId, error: KVConnectorError) -> None:
        """Stop the sends to a consumer. What is in flight to it may still be read: its memory rests."""
        rows, slots = self._machine.sends.rows, self._slots.rows
        for row, send in self._sends.items():
            if send.link == link:
                send.error = send.error or error
                rows[row]["stopped"] = 1
        endpoint = self.endpoints.get(link)
        if endpoint is None:
            return
        in_flight = (slots["state"] == r.POSTED) & (slots["owner"] == endpoint)
        for slot in in_flight.nonzero()[0].tolist():
            if slots[slot]["source"] != slots[slot]["address"]:
                self._hold(slot, endpoint)
                continue
            row = int(slots[slot]["program"])
            if row >= 0:
                rows[row]["num_in_flight"] -= 1
            buffer = self._slots.pool.buffer(slot, self._slots.pool.slot_bytes)
            self._network.adopt(int(slots[slot]["request"]), 0, buffer, endpoint)
            self._slots.quarantine(slot, self._after(self._quarantine_s))

    def _take_failed(self) -> None:
        """Put the slots of failed operations into quarantine, unless those took their bytes from the pools."""
        rows = self._slots.rows
        for slot in (rows["state"] == r.FAILED).nonzero()[0].tolist():
            if rows[slot]["source"] == rows[slot]["address"]:
                self._slots.quarantine(slot, self._after(self._quarantine_s))
            else:
                self._slots.free(slot)

    def _after(self, delay_s: float) -> Callable[[], bool]:
        until_s = self._clock() + delay_s
        return lambda: self._clock() >= until_s

    def _hold(self, slot: int, endpoint: int) -> None:
        """Give up an operation that reads blocks: its send stays in flight until nothing does, see `refresh`."""
        row = self._slots.rows[slot]
        send = self._sends[int(row["program"])]
        nbytes = int(send.jobs.words[row["chunk"], 0])
        buffer = Buffer(address=int(row["source"]), nbytes=nbytes, device="cpu", owner=send)
        send.held.append(self._network.adopt(int(row["request"]), 0, buffer, endpoint))
        send.free_at_s = self._clock() + self._quarantine_s
        self._slots.free(slot)

    def _end(self, index: int) -> None:
        send = self._sends[index]
        row = self._machine.sends.rows[index]
        error = send.error or error_of(row, self._network)
        phases = phases_of(row, pack=("packing_ns", "packed_ns"), wire=("sending_ns", "sent_ns"))
        posted = int(row["num_posted"])
        if posted == row["num_chunks"] and error is None:
            self._events.append(ev.SendFinished(send.link, send.read_id, phases))
        else:
            if row["error_kind"] == r.UCX_ERROR and send.error is None and error is not None:
                self._fail(send.link, error)
            self._events.append(ev.SendStopped(send.link, send.read_id, posted, error, phases))
        self._machine.copies.end_jobs(send.jobs)
        del self._sends[index], self._rows[send.link, send.read_id]
        self._machine.sends.remove(index)
