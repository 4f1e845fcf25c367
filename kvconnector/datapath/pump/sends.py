"""The producer's half of the data path: endpoints, and the reads that are sent."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from kvconnector.config import ConnectorConfig
from kvconnector.datapath.event_queue import as_connector_error
from kvconnector.datapath.pump.loop import Loop
from kvconnector.datapath.pump.pacing import NS_PER_S
from kvconnector.datapath.pump.programs import Program, Programs
from kvconnector.datapath.pump.state import error_of
from kvconnector.datapath.staging import SlotPool
from kvconnector.errors import KVConnectorError, PeerLostError, TransportError
from kvconnector.layout import GroupBlocks
from kvconnector.session import Phase
from kvconnector.session import events as ev
from kvconnector.session.lease import Send
from kvconnector.session.link import Link
from kvconnector.wire.messages import Hello, Probe
from kvconnector_kernels.pump import records as r
from kvconnector_kernels.relayout import RelayoutError

logger = logging.getLogger(__name__)

GPU_LANES = ("cuda_ipc", "rc_", "dc_", "gga_", "srd")
"""Prefixes of the names of lanes that move GPU memory without a copy in host memory."""
_PHASES = ("pack", "packing_ns", "packed_ns"), ("wire", "sending_ns", "sent_ns")
"""Names of phases, and of the fields with the times at which they began and ended; 0 if they have not begun."""
MAX_PROBE_MESSAGES = 128
"""The most messages of one consumer worker's probes that have not ended: those of two of the longest probes."""
FIRST_PASSES = 4
"""Passes of the loop within which a GPU's first chunk is packed and posted."""


class Sending(Program, eq=False, kw_only=True):
    """A `send` that the loop runs."""

    send: Send


class Sends(Programs[Sending]):
    """All sends of one worker. They take turns using the slots, one chunk each, so that a long send delays a short one
    by only a few chunks.

    The slots of sends that were given up are quarantined for `peer.timeout_s`.
    """

    def __init__(self, loop: Loop, config: ConnectorConfig, slots: SlotPool) -> None:
        super().__init__(loop, "sends")
        self.slots = slots
        slots.attach(loop.state.record, "send_slots", loop.copies.make_fences(len(slots.rows)))
        self._transport = loop.transport
        self._by_send: dict[Send, Sending] = {}
        self._endpoints: dict[Link, int] = {}
        """The endpoints to consumer workers."""
        self._num_probes: Counter[Link] = Counter()
        """The messages of probes to each that have not ended."""
        self._quarantine_s = config.peer.timeout_s
        self.may_hold_slots = False
        """True if sends that were stopped may have left slots in flight."""
        self.num_begun = 0
        """How many reads were handed to the loop."""

    def __repr__(self) -> str:
        active = [each.send.read.read_id for each in self.active.values()]
        return f"<Sends active {active}, {self.slots!r}>"

    def open_endpoint(self, link: Link, hello: Hello) -> None:
        """Connect to a consumer worker and send it the warm-up message. `EndpointOpened` or `LinkLost` follows."""
        try:
            self._endpoints[link] = self._transport.connect(hello.transport_address)
            self._warm_up(link, hello.warm_up_tag, hello.warm_up_bytes, self._warmed_up)
        except KVConnectorError as error:
            self.loop.events.append(ev.LinkLost(link, error))
        else:
            self.loop.events.append(ev.EndpointOpened(link))

    def endpoint(self, link: Link) -> int:
        """Return the endpoint to a consumer worker; 0 if there is none."""
        return self._endpoints.get(link, 0)

    def probe(self, link: Link, probe: Probe) -> None:
        """Send the messages by which a consumer worker measures bandwidth, unless it is lost or does not receive those
        of its earlier probes.
        """
        is_behind = self._num_probes[link] + probe.count > MAX_PROBE_MESSAGES
        for index in range(0 if is_behind or link not in self._endpoints else probe.count):
            self._warm_up(link, probe.first_tag + index, probe.nbytes, self._probed)
            self._num_probes[link] += 1

    def _warm_up(
        self,
        link: Link,
        tag: int,
        nbytes: int,
        end: Callable[[Link, KVConnectorError | None], None],
    ) -> None:
        """Send a consumer worker a message with meaningless content. `end` takes its end."""
        ticket = self._transport.send(self._endpoints[link], tag, self.slots.scratch(nbytes))
        self.loop.warm_ups[ticket] = partial(end, link)
        self.loop.lock.is_greeting = True

    def _warmed_up(self, link: Link, error: KVConnectorError | None) -> None:
        endpoint = self._endpoints.get(link)
        if endpoint is None:
            return
        if error is None:
            self._log_lanes(endpoint)
        else:
            self.loop.events.append(ev.LinkLost(link, error))

    def _probed(self, link: Link, error: KVConnectorError | None) -> None:
        if link in self._endpoints:
            self._num_probes[link] -= 1
            if error is not None:
                self.loop.events.append(ev.LinkLost(link, error))

    def close_endpoint(self, link: Link) -> None:
        """Stop the sends to a consumer worker and disconnect from it, if there is one at `link`."""
        if link in self._endpoints:
            self._give_up(link, PeerLostError("the consumer's endpoint was closed"))
            self._transport.disconnect(self._endpoints.pop(link))
            del self._num_probes[link]

    def expect(self, blocks: Sequence[GroupBlocks]) -> None:
        """Prepare for a read of these blocks, if reads have been packed before. The read's `Send` has the same
        sequence.
        """
        if self.num_begun:
            self.loop.copies.expect(blocks)

    def submit(self, send: Send) -> None:
        """Stream a read to a consumer worker. `SendOver` follows."""
        loop, endpoint = self.loop, self._endpoints.get(send.link)
        loop.stay_awake()
        try:
            if endpoint is None:
                raise PeerLostError("the consumer's endpoint was closed")
            jobs = loop.copies.make_jobs(send.source, send.blocks, packing=True)
        except (RelayoutError, KVConnectorError) as error:
            loop.events.append(ev.SendOver(send, 0, as_connector_error(error)))
            return
        sending = self._by_send[send] = Sending(send=send)
        self.run(
            sending,
            jobs,
            first_tag=send.read.first_tag,
            num_chunks=send.source.num_chunks,
            window=send.read.window,
            owner=endpoint,
        )
        # the consumer waits for the first chunk, and Python would run for a while before it enters the loop
        self.refresh_endpoints()
        loop.begin(FIRST_PASSES if loop.copies.on_gpu else 1)
        self.num_begun += 1

    def stop(self, send: Send) -> None:
        """Send no further chunk of a read; no effect if it has ended."""
        sending = self._by_send.get(send)
        if sending is not None:
            self.set(sending, "stopped", 1)

    def _log_lanes(self, endpoint: int) -> None:
        """Log the lanes of packed reads by a consumer. Whether it reads directly is not known here."""
        lanes = self._transport.lanes(endpoint)
        names = [lane.partition("/")[0] for lane in lanes.split("+")]
        if (
            lanes
            and self.loop.copies.on_gpu
            and not any(name.startswith(GPU_LANES) for name in names)
        ):
            logger.warning(
                "where a consumer does not read directly, its packed reads are copied through host memory, over %s: UCX"
                " has no lane between the GPUs (cuda_ipc on one host, RDMA between hosts)",
                lanes,
            )
        elif lanes:
            logger.info(
                "where a consumer does not read directly, its packed reads are sent over %s", lanes
            )

    def refresh(self) -> None:
        """Quarantine the slots of failed operations, and check the endpoints, whose peers may be lost."""
        self._take_failed()
        self.slots.end_quarantines()
        self.refresh_endpoints()
        self.may_hold_slots = self.slots.num_busy > 0

    def refresh_endpoints(self) -> None:
        """Look up the endpoints of all sends, before each run of the loop: handles change, and a lost peer has none."""
        for sending in self.active.values():
            if sending.error is None:
                link = sending.send.link
                try:
                    handle = self._transport.endpoint_handle(self.endpoint(link))
                    self.set(sending, "endpoint", handle)
                except KVConnectorError as error:
                    self._fail(link, error)

    def poll(self) -> None:
        """Report the sends that ended."""
        for sending in list(self.active.values()):
            row = self.values(sending)
            if row["phase"] == r.OVER:
                self._end(sending, row)
                self.forget(sending)
                del self._by_send[sending.send]

    def release(self) -> None:
        """Send nothing more, and leave operations under way to the transport. Its endpoints stay open."""
        closed, slots = TransportError("the data path was closed"), self.slots.rows
        for link in {each.send.link for each in self.active.values()}:
            self._give_up(link, closed)
        self._abandon(slots["state"] == r.POSTED)

    def _fail(self, link: Link, error: KVConnectorError) -> None:
        self._give_up(link, error)
        if link in self._endpoints:  # otherwise we closed it ourselves
            self.loop.events.append(ev.LinkLost(link, error))

    def _give_up(self, link: Link, error: KVConnectorError) -> None:
        """Stop the sends to a consumer. UCX may still read slots in flight to it, so their memory is quarantined."""
        slots = self.slots.rows
        for sending in self.active.values():
            if sending.send.link is link:
                sending.error = sending.error or error
                self.set(sending, "stopped", 1)
        endpoint = self._endpoints.get(link)
        if endpoint is not None:
            self._abandon((slots["state"] == r.POSTED) & (slots["owner"] == endpoint))

    def _abandon(self, in_flight: npt.NDArray[np.bool_]) -> None:
        """Leave these slots' operations to the transport, and quarantine their memory."""
        slots = self.slots.rows
        for slot in in_flight.nonzero()[0].tolist():
            row = int(slots[slot]["program"])
            if row >= 0:
                self.rows[row]["num_in_flight"] -= 1
            request, endpoint = int(slots[slot]["request"]), int(slots[slot]["owner"])
            self._transport.adopt(request, 0, self.slots.buffer(slot), endpoint)
            self._quarantine(slot)

    def _take_failed(self) -> None:
        """Quarantine the slots of failed operations."""
        for slot in (self.slots.rows["state"] == r.FAILED).nonzero()[0].tolist():
            self._quarantine(slot)

    def _quarantine(self, slot: int) -> None:
        clock, until_s = self.loop.clock, self.loop.clock() + self._quarantine_s
        self.slots.quarantine(slot, lambda: clock() >= until_s)

    def _end(self, sending: Sending, row: dict[str, int]) -> None:
        send, posted = sending.send, row["num_posted"]
        phases = tuple(
            Phase(name, row[first] / NS_PER_S, row[last] / NS_PER_S)
            for name, first, last in _PHASES
            if row[last]
        )
        error = sending.error
        if error is None and row["error_kind"] != r.NO_ERROR:
            error = error_of(row, self._transport)
        if posted == row["num_chunks"] and error is None:
            self.loop.events.append(ev.SendOver(send, phases=phases))
        else:
            self._take_failed()
            self.may_hold_slots = True
            if row["error_kind"] == r.UCX_ERROR and sending.error is None and error is not None:
                self._fail(send.link, error)
            self.loop.events.append(ev.SendOver(send, posted, error, phases))
