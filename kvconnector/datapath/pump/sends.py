"""The producer's half of the data path: endpoints, and the reads that are sent."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvconnector.config import ConnectorConfig
from kvconnector.datapath.base import EventQueue, as_connector_error
from kvconnector.datapath.pump.machine import Machine, Rows
from kvconnector.datapath.pump.network import NS_PER_S, error_of
from kvconnector.errors import KVConnectorError, PeerLostError, TransportError
from kvconnector.layout import GroupBlocks
from kvconnector.session import Phase
from kvconnector.session import events as ev
from kvconnector.session.lease import Send
from kvconnector.session.link import Link
from kvconnector.transport import Completion
from kvconnector.transport.ucx import UcxTransport
from kvconnector.wire.messages import Hello, Probe
from kvconnector_kernels.pump import records as r
from kvconnector_kernels.relayout import RelayoutError

logger = logging.getLogger(__name__)

GPU_LANES = ("cuda_ipc", "rc_", "dc_", "gga_", "srd")
"""How the lanes begin that move GPU memory without a copy in host memory."""
_PHASES = ("pack", "packing_ns", "packed_ns"), ("wire", "sending_ns", "sent_ns")
"""With the times when each began and ended; one that did not begin has none."""
FIRST_PASSES = 4
"""On a GPU the first chunk is packed within as many, and is posted."""


class Sends:
    """All sends of one worker. Slots go round between them, one chunk each, so that a long one delays a short one by a
    few chunks only.

    The slots of sends that were given up rest for `peer.timeout_s`.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        transport: UcxTransport,
        machine: Machine,
        events: EventQueue,
        clock: Callable[[], float],
    ) -> None:
        self._network = machine.network
        self._machine = machine
        self._rows: Rows[Send] = machine.sends
        self._slots = machine.send_slots
        self._quarantine_s = config.peer.timeout_s
        self._clock = clock
        self._events = events
        self._transport = transport
        self.warm_ups: dict[int, Link] = {}
        """Whom the transport's tickets of warm-up messages on their way are for."""
        self._has_sent = False
        self.may_hold_slots = False
        """Sends that were stopped may have left slots in flight."""

    def __repr__(self) -> str:
        active = [send.read.read_id for send in self._rows.active.values()]
        return f"<Sends active {active}, {self._slots!r}>"

    def open_endpoint(self, link: Link, hello: Hello) -> None:
        """Reach a consumer worker and send it the warm-up message: `EndpointOpened` or `LinkLost`."""
        self._machine.is_handshaking = True
        warm_up = self._slots.scratch(hello.warm_up_bytes)  # its bytes mean nothing
        try:
            link.endpoint = self._transport.connect(hello.transport_address)
            ticket = self._transport.send(link.endpoint, hello.warm_up_tag, warm_up)
        except KVConnectorError as error:
            self._events.append(ev.LinkLost(link, error))
            return
        self.warm_ups[ticket] = link
        self._events.append(ev.EndpointOpened(link))

    def probe(self, link: Link, probe: Probe) -> None:
        """Send the messages that a consumer worker measures by, unless it is lost."""
        self._machine.is_handshaking = True
        if not link.endpoint:
            return
        buffer = self._slots.scratch(probe.nbytes)
        for index in range(probe.count):
            ticket = self._transport.send(link.endpoint, probe.first_tag + index, buffer)
            self.warm_ups[ticket] = link

    def close_endpoint(self, link: Link) -> None:
        """Forget a consumer worker, if there is one at `link`; its sends stop."""
        if link.number < 0 and link.endpoint:
            self._give_up(link, PeerLostError("the consumer's endpoint was closed"))
            self._transport.disconnect(link.endpoint)
            link.endpoint = 0

    def expect(self, blocks: Sequence[GroupBlocks]) -> None:
        """Prepare for a read of these blocks, if any reads come this way. The `Send` of one has the same sequence."""
        if self._has_sent:
            self._machine.copies.expect(blocks)

    def submit(self, send: Send) -> None:
        """Stream a read to a consumer worker: ends in `SendOver`."""
        machine = self._machine
        machine.stay_awake()
        self._has_sent = True
        try:
            if not send.link.endpoint:
                raise PeerLostError("the consumer's endpoint was closed")
            send.jobs = machine.copies.make_jobs(send.source, send.blocks, packing=True)
        except (RelayoutError, KVConnectorError) as error:
            self._events.append(ev.SendOver(send, 0, as_connector_error(error)))
            return
        self._rows.add(
            send,
            first_tag=send.read.first_tag,
            num_chunks=send.source.num_chunks,
            window=send.read.window,
            owner=send.link.endpoint,
        )
        # the consumer waits for the first chunk, and Python goes on for a while before it enters the loop
        self.refresh_endpoints()
        machine.begin(FIRST_PASSES if machine.copies.on_gpu else 1)

    def stop(self, send: Send) -> None:
        """Send no further chunk of a read; no effect if it has ended."""
        if send in self._rows:
            self._rows.set(send, "stopped", 1)

    def complete(self, completion: Completion) -> bool:
        """Take a completion of the transport; False if it is not ours."""
        link = self.warm_ups.pop(completion.ticket, None)
        if link is None or not link.endpoint:
            return link is not None
        if completion.error is None:
            self._log_lanes(link.endpoint)
        else:
            self._events.append(ev.LinkLost(link, completion.error))
        return True

    def _log_lanes(self, endpoint: int) -> None:
        """Say once how packed reads by a consumer will travel."""
        lanes = self._network.lanes(endpoint)
        names = [lane.partition("/")[0] for lane in lanes.split("+")]
        if (
            lanes
            and self._machine.copies.on_gpu
            and not any(name.startswith(GPU_LANES) for name in names)
        ):
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
        self.refresh_endpoints()
        self.may_hold_slots = self._slots.num_busy > 0

    def refresh_endpoints(self) -> None:
        """Before every run: there are new sends, handles may have changed, and a lost peer's is none any more."""
        for send in self._rows.active.values():
            if send.error is None:
                try:
                    handle = self._network.handle(send.link.endpoint)
                    self._rows.set(send, "endpoint", handle)
                except KVConnectorError as error:
                    self._fail(send.link, error)

    def poll(self) -> None:
        """See what ended."""
        for send in list(self._rows.active.values()):
            row = self._rows.values(send)
            if row["phase"] == r.OVER:
                self._end(send, row)
                self._rows.remove(send)

    def release(self) -> None:
        """Send nothing more, and leave what UCX still holds to the transport. Its endpoints stay open."""
        closed, slots = TransportError("the data path was closed"), self._slots.rows
        for link in {send.link for send in self._rows.active.values()}:
            self._give_up(link, closed)
        self._abandon(slots["state"] == r.POSTED)

    def _fail(self, link: Link, error: KVConnectorError) -> None:
        self._give_up(link, error)
        if link.endpoint:  # else we closed it ourselves
            self._events.append(ev.LinkLost(link, error))

    def _give_up(self, link: Link, error: KVConnectorError) -> None:
        """Stop the sends to a consumer. What is in flight to it may still be read: its memory rests."""
        slots = self._slots.rows
        for send in self._rows.active.values():
            if send.link is link:
                send.error = send.error or error
                self._rows.set(send, "stopped", 1)
        if link.endpoint:
            self._abandon((slots["state"] == r.POSTED) & (slots["owner"] == link.endpoint))

    def _abandon(self, in_flight: npt.NDArray[np.bool_]) -> None:
        """Leave these slots' operations to the transport, and let their memory rest."""
        rows, slots = self._rows.rows, self._slots.rows
        for slot in in_flight.nonzero()[0].tolist():
            row = int(slots[slot]["program"])
            if row >= 0:
                rows[row]["num_in_flight"] -= 1
            request, endpoint = int(slots[slot]["request"]), int(slots[slot]["owner"])
            self._network.adopt(request, 0, self._slots.buffer(slot), endpoint)
            self._quarantine(slot)

    def _take_failed(self) -> None:
        """Put the slots of failed operations into quarantine."""
        for slot in (self._slots.rows["state"] == r.FAILED).nonzero()[0].tolist():
            self._quarantine(slot)

    def _quarantine(self, slot: int) -> None:
        until_s = self._clock() + self._quarantine_s
        self._slots.quarantine(slot, lambda: self._clock() >= until_s)

    def _end(self, send: Send, row: dict[str, int]) -> None:
        posted = row["num_posted"]
        phases = tuple(
            Phase(name, row[first] / NS_PER_S, row[last] / NS_PER_S)
            for name, first, last in _PHASES
            if row[last]
        )
        error = send.error
        if error is None and row["error_kind"] != r.NO_ERROR:
            error = error_of(row, self._network)
        if posted == row["num_chunks"] and error is None:
            self._events.append(ev.SendOver(send, phases=phases))
        else:
            self._take_failed()
            self.may_hold_slots = True
            if row["error_kind"] == r.UCX_ERROR and send.error is None and error is not None:
                self._fail(send.link, error)
            self._events.append(ev.SendOver(send, posted, error, phases))
