"""The producer's half of the pump: endpoints, and the programs that send."""

from __future__ import annotations

from dataclasses import dataclass

from kvconnector.datapath.base import DataEvent, Program
from kvconnector.datapath.pump.copying import Jobs
from kvconnector.datapath.pump.failures import error_of
from kvconnector.datapath.pump.machine import Machine
from kvconnector.errors import KVConnectorError, PeerLostError, TransportError
from kvconnector.session import events as ev
from kvconnector.session.commands import LinkId
from kvconnector.transport import Completion
from kvconnector.transport.ucx import UcxTransport
from kvconnector_kernels.pump import records as r
from kvconnector_kernels.relayout import RelayoutError


@dataclass(slots=True, eq=False)
class _Send:
    """What the rows do not say about a send."""

    link: LinkId
    read_id: int
    jobs: Jobs
    error: KVConnectorError | None = None


class PumpSends:
    """All sends of one worker, see `Sender`: the same contract, but the chunks move in the machine.

    The slots of sends that were given up rest for `quarantine_s`.
    """

    def __init__(self, transport: UcxTransport, machine: Machine, *, quarantine_s: float) -> None:
        self._transport = transport
        self._machine = machine
        self._slots = machine.send_slots
        self._quarantine_s = quarantine_s
        self._endpoints: dict[LinkId, int] = {}
        self._sends: dict[int, _Send] = {}
        self._rows: dict[tuple[LinkId, int], int] = {}
        self._warm_ups: dict[int, LinkId] = {}
        self._events: list[DataEvent] = []

    def open_endpoint(self, link: LinkId, address: bytes, warm_up_tag: int, nbytes: int) -> None:
        """See `DataPath.open_endpoint`."""
        pool = self._slots.pool
        try:
            endpoint = self._transport.connect(address)
            self._endpoints[link] = endpoint
            buffer = pool.buffer(pool.scratch, min(nbytes, pool.slot_bytes))
            self._warm_ups[self._transport.send(endpoint, warm_up_tag, buffer)] = link
        except KVConnectorError as error:
            self._events.append(ev.EndpointFailed(link, error))
            return
        self._events.append(ev.EndpointOpened(link))

    def close_endpoint(self, link: LinkId) -> None:
        """See `DataPath.close_endpoint`."""
        if link in self._endpoints:
            self._give_up(link, PeerLostError("the consumer's endpoint was closed"))
            self._transport.disconnect(self._endpoints.pop(link))

    def endpoint(self, link: LinkId) -> int | None:
        """See `DataPath.endpoint`."""
        return self._endpoints.get(link)

    def submit(
        self, link: LinkId, read_id: int, program: Program, *, first_tag: int, window: int
    ) -> None:
        """See `DataPath.submit_send`."""
        try:
            endpoint, handle = self._endpoint(link)
            jobs = self._machine.copies.make_jobs(program, packing=True)
        except (RelayoutError, KVConnectorError) as error:
            failure = error if isinstance(error, KVConnectorError) else TransportError(str(error))
            self._events.append(ev.SendStopped(link, read_id, 0, failure))
            return
        row = self._machine.sends.add(
            {
                r.FIRST_TAG: first_tag,
                r.JOBS: jobs.address,
                r.NUM_CHUNKS: len(program.chunks),
                r.WINDOW: window,
                r.ENDPOINT: handle,
                r.OWNER: endpoint,
            }
        )
        self._sends[row] = _Send(link, read_id, jobs)
        self._rows[link, read_id] = row

    def stop(self, link: LinkId, read_id: int) -> None:
        """See `DataPath.stop_send`."""
        row = self._rows.get((link, read_id))
        if row is not None:
            self._machine.sends.rows[row, r.STOPPED] = 1

    def complete(self, completion: Completion) -> bool:
        """Take a completion of the transport; False if it is not ours."""
        if completion.ticket not in self._warm_ups:
            return False
        link = self._warm_ups.pop(completion.ticket)
        if completion.error is not None and link in self._endpoints:
            self._events.append(ev.EndpointFailed(link, completion.error))
        return True

    def is_warming_up(self) -> bool:
        """Whether a warm-up message is on its way."""
        return bool(self._warm_ups)

    def refresh(self) -> None:
        """Look at the endpoints: their handles may have changed, their peers may be lost."""
        self._slots.restore_rested()
        for link in {send.link for send in self._sends.values()}:
            try:
                _, handle = self._endpoint(link)
            except KVConnectorError as error:
                self._fail(link, error)
                continue
            for row, send in self._sends.items():
                if send.link == link:
                    self._machine.sends.rows[row, r.ENDPOINT] = handle

    def take_events(self) -> list[DataEvent]:
        """What ended, and what else there is to tell."""
        rows = self._machine.sends.rows
        for index in [index for index in self._sends if rows[index, r.PHASE] == r.OVER]:
            self._end(index)
        events, self._events = self._events, []
        return events

    def release(self) -> None:
        """Leave what UCX still holds to the transport, which is about to close."""
        for link in list(self._endpoints):
            self._give_up(link, TransportError("the data path was closed"))

    def _endpoint(self, link: LinkId) -> tuple[int, int]:
        """The endpoint's id and handle."""
        endpoint = self._endpoints.get(link)
        if endpoint is None:
            raise PeerLostError("the consumer's endpoint was closed")
        return endpoint, self._transport.endpoint_handle(endpoint)

    def _fail(self, link: LinkId, error: KVConnectorError) -> None:
        self._give_up(link, error)
        if link in self._endpoints:
            self._events.append(ev.EndpointFailed(link, error))

    def _give_up(self, link: LinkId, error: KVConnectorError) -> None:
        """Stop the sends to a consumer. What is in flight to it may still be read: its memory rests."""
        rows, slots = self._machine.sends.rows, self._slots.rows
        for row, send in self._sends.items():
            if send.link == link:
                send.error = send.error or error
                rows[row, r.STOPPED] = 1
        endpoint = self._endpoints.get(link)
        if endpoint is None:
            return
        in_flight = (slots[:, r.STATE] == r.POSTED) & (slots[:, r.SLOT_OWNER] == endpoint)
        for slot in in_flight.nonzero()[0].tolist():
            row = int(slots[slot, r.PROGRAM])
            if row >= 0:
                rows[row, r.NUM_IN_FLIGHT] -= 1
            buffer = self._slots.buffer(slot, self._slots.pool.slot_bytes)
            self._transport.adopt(int(slots[slot, r.REQUEST]), 0, buffer, endpoint)
            self._slots.swap(slot, self._quarantine_s)

    def _end(self, index: int) -> None:
        send = self._sends[index]
        row = self._machine.sends.rows[index]
        error = send.error or error_of(row, self._transport.libucp)
        posted = int(row[r.NUM_POSTED])
        if posted == row[r.NUM_CHUNKS] and error is None:
            self._events.append(ev.SendFinished(send.link, send.read_id))
        else:
            if row[r.ERROR_KIND] == r.UCX_ERROR and send.error is None and error is not None:
                self._fail(send.link, error)
            self._events.append(ev.SendStopped(send.link, send.read_id, posted, error))
        del self._sends[index], self._rows[send.link, send.read_id]
        self._machine.sends.remove(index)
