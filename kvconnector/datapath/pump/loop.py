"""The compiled loop of one data path, and the parts of it that sends, receives and direct reads share."""

from __future__ import annotations

from collections.abc import Callable

from kvconnector.datapath.event_queue import EventQueue
from kvconnector.datapath.pump.copies import Copies
from kvconnector.datapath.pump.driver_lock import DriverLock
from kvconnector.datapath.pump.state import LOOK, LoopState
from kvconnector.errors import KVConnectorError
from kvconnector.transport.ucx import UcxTransport
from kvconnector_kernels.pump import records as r
from kvconnector_kernels.pump.loop_calls import look


class Loop:
    """The loop's `state` and `lock`, the `transport` and the `copies` that it calls, and the `events` that result.

    `warm_ups` has by ticket what takes the end of a warm-up message that the transport sends or receives. The owner of
    the lock alone uses all of this, except the lock.
    """

    def __init__(
        self, transport: UcxTransport, copies: Copies, spin_s: float, clock: Callable[[], float]
    ) -> None:
        self.transport = transport
        self.copies = copies
        self.clock = clock
        self.events = EventQueue()
        self.state = LoopState(transport, copies, spin_s)
        self.lock = DriverLock(self.state)
        self.warm_ups: dict[int, Callable[[KVConnectorError | None], None]] = {}

    def begin(self, passes: int) -> None:
        """Run `passes` iterations of the loop, without releasing the GIL or the lock."""
        self.state.record.entering = LOOK
        for _ in range(passes):
            if look(self.state.address) == r.NOTICE:
                self.lock.notify()  # the next run would not find it again

    def stay_awake(self) -> None:
        """Keep the loop spinning for a while, because more work is likely to come and waking a thread costs more than
        the work.
        """
        self.state.record.moved_ns = self.state.now_ns()
