"""The pumped data path: chunks move in a compiled loop that holds no GIL; Python sees where programs begin and end."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import ClassVar

from kvconnector.datapath.base import DataEvent, Program, ReadOrigin, TransferRecord
from kvconnector.datapath.device_memory import kept_unless_through
from kvconnector.datapath.direct.share import PoolShare
from kvconnector.datapath.pump.copying import ChunkCopies
from kvconnector.datapath.pump.machine import Machine, Pace
from kvconnector.datapath.pump.pulling import PoolReads
from kvconnector.datapath.pump.pulls import FallbackToPacked, PumpPulls
from kvconnector.datapath.pump.receives import PumpReceives
from kvconnector.datapath.pump.sends import PumpSends
from kvconnector.datapath.report import Report
from kvconnector.datapath.staging import SlotPool
from kvconnector.session.commands import LinkId
from kvconnector.transport.ucx import UcxTransport
from kvconnector.wire.export import PoolExport
from kvconnector_kernels.pump import records as r

MAX_RUN_S = 0.1
"""Python looks after peers and the device this often while chunks move."""
MAX_LEASE_RUN_S = 1e-4
"""The same while a lease is awaited, at which Python looks."""
MAX_AWAITED_RUN_S = 1e-3
"""The same while something is awaited that the loop does not look at: a warm-up, the rest of a long control message, a
lease."""


class PumpDataPath:
    """`DataPath` over UCX, and directly from pools on this host. Bytes move in `pump` alone; `step` tells what happened
    there and looks after the peers.

    `share` lets consumers read this worker's pools, `reads` lets it read those of others; None where that is not
    possible, or nobody's wish. `always_direct`: see `PumpPulls`.

    Raises:
        TransportError: a version of libucp that is not known.
    """

    name: ClassVar[str] = "pump"

    def __init__(
        self,
        transport: UcxTransport,
        copies: ChunkCopies,
        *,
        share: PoolShare | None = None,
        reads: PoolReads | None = None,
        always_direct: bool = False,
        device: str,
        send_slots: SlotPool | None,
        recv_slots: SlotPool | None,
        window: int,
        quarantine_s: float,
        pace: Pace,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._transport = transport
        self._copies = copies
        self._clock = clock
        self.machine = Machine(
            transport,
            copies,
            device=device,
            send_pool=send_slots,
            recv_pool=recv_slots,
            pace=pace,
        )
        self._report = Report()
        self._sends = PumpSends(
            transport, self.machine, self._report.events, quarantine_s=quarantine_s, clock=clock
        )
        self._receives = PumpReceives(
            transport,
            self.machine,
            self._report,
            window=window,
            quarantine_s=quarantine_s,
            clock=clock,
        )
        self._pulls = PumpPulls(
            self.machine, reads, self._report, device=device, always=always_direct, clock=clock
        )
        self._share = share
        self._are_copies_quick = device != "cpu"
        self._next_look_s = 0.0
        self._is_meeting = False
        self._closed = False

    def open_endpoint(
        self, link: LinkId, transport_address: bytes, warm_up_tag: int, warm_up_bytes: int
    ) -> None:
        """See `DataPath`."""
        self._is_meeting = True
        self._sends.open_endpoint(link, transport_address, warm_up_tag, warm_up_bytes)

    def close_endpoint(self, link: LinkId) -> None:
        """See `DataPath`."""
        self._sends.close_endpoint(link)

    def endpoint(self, link: LinkId) -> int | None:
        """See `DataPath`."""
        return self._sends.endpoint(link)

    def expect_warm_up(self, link: LinkId) -> tuple[int, int]:
        """See `DataPath`."""
        self._is_meeting = True
        return self._receives.expect_warm_up(link)

    def forget_warm_up(self, link: LinkId) -> None:
        """See `DataPath`."""
        self._receives.forget_warm_up(link)

    def submit_send(
        self, link: LinkId, read_id: int, program: Program, *, first_tag: int, window: int
    ) -> None:
        """See `DataPath`."""
        self.machine.stay_awake()
        self._sends.submit(link, read_id, program, first_tag=first_tag, window=window)

    def stop_send(self, link: LinkId, read_id: int) -> None:
        """See `DataPath`."""
        self._sends.stop(link, read_id)

    def submit_receive(
        self, read_id: int, program: Program, origin: ReadOrigin | None = None
    ) -> None:
        """See `DataPath`."""
        self.machine.stay_awake()
        if origin is None:
            self._receives.submit(read_id, program)
        else:
            self._await(self._pulls.submit(read_id, program, origin))

    def stop_receive(self, read_id: int) -> None:
        """See `DataPath`."""
        if not self._pulls.stop(read_id):
            self._receives.stop(read_id)

    def drain_receive(self, read_id: int, sent_chunks: int | None) -> None:
        """See `DataPath`."""
        self._receives.drain(read_id, sent_chunks)

    def export(self) -> PoolExport | None:
        """See `DataPath`."""
        return None if self._share is None else self._share.export

    def publish_lease(self, key: bytes, num_tokens: int) -> None:
        """See `DataPath`."""
        if self._share is not None:
            self._share.publish(key, num_tokens)

    def retract_lease(self, key: bytes) -> None:
        """See `DataPath`."""
        if self._share is not None:
            self._share.retract(key)

    def open_export(self, link: LinkId, export: PoolExport) -> str:
        """See `DataPath`."""
        return self._pulls.open(link, export)

    def close_export(self, link: LinkId) -> None:
        """See `DataPath`."""
        self._pulls.close(link)

    def order_after(self, event: object) -> None:
        """See `DataPath`."""
        self._copies.order_after(event)

    @property
    def num_busy_slots(self) -> int:
        """See `DataPath`."""
        return self.machine.send_slots.num_busy + self.machine.recv_slots.num_busy

    def step(self) -> list[DataEvent]:
        """See `DataPath`."""
        self._look_after_peers()
        if self.machine.sends.num_active:
            self._sends.look()
        if self.machine.receives.num_active:
            self._receives.look()
        self._pulls.look()
        if self._pulls.is_waiting:
            self._await(self._pulls.look_again())
        # last: slots are free again, and reads are to be sent that were not before
        self._receives.admit()
        events = self._report.events.take()
        if events:
            self.machine.stay_awake()
        return events

    def pump(self, timeout_s: float, fds: tuple[int, ...]) -> None:
        """See `DataPath`."""
        self._refresh()
        if self._pulls.is_waiting:
            timeout_s = min(timeout_s, MAX_LEASE_RUN_S)
        elif self._is_waited_for():
            timeout_s = min(timeout_s, MAX_AWAITED_RUN_S)
        elif self.machine.is_active:
            timeout_s = min(timeout_s, MAX_RUN_S)
        reason = self.machine.run(timeout_s, wants_slots=self._receives.wants_slots(), fds=fds)
        if reason == r.TIMEOUT:
            self._copies.check_device()

    @property
    def is_pumping(self) -> bool:
        """See `DataPath`. Where there is nothing to move its thread sleeps there, too, and can be visited."""
        return True

    def tell_news(self) -> bool:
        """See `DataPath`."""
        return self.machine.tell_news()

    def take_news(self) -> None:
        """See `DataPath`."""
        self.machine.seat.take_news()

    def has_news(self) -> bool:
        """See `DataPath`."""
        if self._is_meeting:
            return False  # meeting a peer compiles and maps: nobody does that in passing
        seat = self.machine.seat
        # out of the loop the driver's thread is at work, or waits for the GIL and nobody looks at anything
        return seat.has_news or not seat.is_looping

    def sit(self, limit_s: float) -> bool:
        """See `DataPath`."""
        return self.machine.sit(limit_s)

    def glance(self) -> None:
        """See `DataPath`."""
        if self._are_copies_quick or not self.machine.seat.is_looping:
            self._refresh()
            self.machine.run(-1.0, wants_slots=self._receives.wants_slots())

    def rise(self, return_by_s: float) -> None:
        """See `DataPath`."""
        self._refresh()
        self.machine.rise(return_by_s, wants_slots=self._receives.wants_slots())

    def take_records(self) -> list[TransferRecord]:
        """See `DataPath`."""
        return self._report.records.take()

    def is_waiting_for_device(self) -> bool:
        """See `DataPath`. Whatever is under way is for `pump` to notice."""
        return False

    def fileno(self) -> int:
        """See `DataPath`."""
        return self._transport.fileno()

    def close(self) -> None:
        """See `DataPath`."""
        if not self._closed:
            self._closed = True
            with ExitStack() as stack:
                stack.callback(self.machine.seat.close)
                stack.callback(self._transport.close)
                stack.callback(self._release)

    def abandon(self) -> None:
        """As `close`, but the transport stays open for others, and keeps the memory that it still has to do with."""
        if not self._closed:
            self._closed = True
            self._release()
            self._sends.close_endpoints()

    def _release(self) -> None:
        # in reverse, and all of it even where a device has failed
        with ExitStack() as stack:
            stack.callback(self._receives.release)
            stack.callback(self._sends.release)
            stack.callback(self._pulls.release)
            if self._share is not None:
                stack.callback(self._share.close)
            stack.callback(self._finish_copies)

    def _finish_copies(self) -> None:
        with kept_unless_through(self.machine, "staging memory, and flags that copies set"):
            self._copies.finish()

    def _await(self, reads: list[FallbackToPacked]) -> None:
        for read in reads:
            self._receives.submit(read.read_id, read.program)

    def _refresh(self) -> None:
        """What the loop takes for granted."""
        self._receives.begin()
        if self.machine.sends.num_active:
            self._sends.refresh_endpoints()

    def _is_waited_for(self) -> bool:
        """Whether something is awaited that the loop does not look at."""
        return self._is_warming_up() or self._transport.is_control_arriving()

    def _is_warming_up(self) -> bool:
        """Whether a peer is being met. For the owner alone; any thread may read what it found last."""
        if self._is_meeting:
            self._is_meeting = self._sends.is_warming_up() or self._receives.is_warming_up()
        return self._is_meeting

    def _look_after_peers(self) -> None:
        """What the loop does not do: warm-up messages, and lost peers."""
        now_s = self._clock()
        if now_s < self._next_look_s and not self._is_warming_up():
            return
        self._next_look_s = now_s + MAX_RUN_S
        for completion in self._transport.progress(others_move=self.machine.uses_network):
            _ = self._sends.complete(completion) or self._receives.complete(completion)
        self._sends.refresh()
        self._receives.refresh()
