"""The data path of one worker: reads in, events out.

*Purpose.* It sends the chunks of reads to consumers, receives those that this worker asked for, and reads pools of
other workers on this host. Chunks move in a compiled loop that takes no GIL; Python sees where reads begin and end.

*Threads.* It has none of its own, and one owner at a time: the driver's thread, but while that sleeps in `pump` or
waits for the GIL an engine's thread may become the owner by `lock.try_acquire`, until it calls `release`. See
`DriverLock` for what any thread may call; all else is the owner's.

*A turn.* The driver's thread calls `pump`, which returns when there is something to do, then clears what is pending,
then calls `step` until that adds nothing to `events`. In between the sessions call `sends`, `receives` and `reads`,
through their port. In an engine's thread they do, too; it calls `poll_once` and `step`, and releases.

*Ownership.* The blocks of a read belong to it from `submit` on until the one event that ends it: `SendOver`,
`ReceiveFinished`, `ReceiveFailed` or `ReceiveStopped`. Slots are a receive's until it has finished or `ReceiveDrained`
follows. Memory that UCX or a GPU may still touch is kept, by a quarantine or for as long as the process lives, and
never handed out.

*Clock.* `clock` is for quarantines, for reads that wait for a lease, and for the pace of checks of peers. The loop
reads the network's clock, which is the same except in tests.

*Blocking.* `pump` sleeps. `sends.open_endpoint`, `receives.expect_warm_up` and `reads.open` may compile kernels and map
memory, so no engine's thread gets there: see `DriverLock.is_greeting`. `close` waits for a GPU, with a deadline.
Nothing else waits.

*What breaks if this is changed.* The loop reads rows by their addresses. So rows may grow and jobs may go only while
their caller owns the lock, jobs stay until their row is over, and a send's endpoint is looked up before each run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack

from kvconnector.config import ConnectorConfig
from kvconnector.datapath.device_memory import CLOSE_S, kept_unless_idle
from kvconnector.datapath.direct.board import LeaseBoard
from kvconnector.datapath.pump import pacing
from kvconnector.datapath.pump.copies import Copies
from kvconnector.datapath.pump.direct_reads import MAX_READS, DirectReads
from kvconnector.datapath.pump.loop import Loop
from kvconnector.datapath.pump.receives import Receives
from kvconnector.datapath.pump.sends import Sends
from kvconnector.datapath.pump.state import LOOK
from kvconnector.datapath.staging import SlotPool
from kvconnector.errors import KVConnectorError, TransportError
from kvconnector.planning import Route
from kvconnector.transport.ucx import UcxTransport
from kvconnector.wire.export import PoolExport
from kvconnector_kernels.pump import records as r
from kvconnector_kernels.pump.loop_calls import look, run

logger = logging.getLogger(__name__)


class DataPath:
    """Sends and receives over a transport, and reads from pools on this host.

    Consumers may read the leases on `board` out of this worker's pools, which `export` describes; both are None where
    that is not possible or not wanted, as `why_packed` says. `export_again` describes the pools anew.
    `why_reads_packed` says why this worker reads no pools of others; empty if it does. Events of reads and peers go to
    `events`, from where the caller takes them.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        transport: UcxTransport,
        copies: Copies,
        *,
        board: LeaseBoard | None = None,
        export: PoolExport | None = None,
        export_again: Callable[[], PoolExport] | None = None,
        why_packed: str = "",
        why_reads_packed: str = "",
        send_slots: SlotPool,
        recv_slots: SlotPool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.board, self.export, self.why_packed = board, export, why_packed
        self._export_again = export_again if export is not None and export.segments else None
        self._loop = loop = Loop(transport, copies, config.spin_s(copies.pools.device), clock)
        self.transport, self.copies, self.clock = transport, copies, clock
        self.events, self.state, self.lock = loop.events, loop.state, loop.lock
        self.warm_ups = loop.warm_ups
        self.sends = Sends(loop, config, send_slots)
        self.receives = Receives(loop, config, recv_slots)
        self.reads = DirectReads(loop, self.receives, config.paths, why_packed=why_reads_packed)
        self._next_check_s = 0.0
        self._closed = False

    def __repr__(self) -> str:
        is_greeting = self.lock.is_greeting
        state = "closed" if self._closed else "greeting" if is_greeting else "open"
        return f"<DataPath {state}, {self.sends!r}, {self.receives!r}, {self.reads!r}>"

    def prepare_chunks(self, route: Route, *, packing: bool) -> None:
        """If elements of a route are converted here, compile what its first packed read would otherwise wait for. If
        that fails, the read reports it.
        """
        try:
            self.copies.prepare_chunks(route, packing=packing)
        except TransportError as error:
            logger.warning("reads with rank %s will fail: %s", route.peer, error)

    @property
    def maps_segments(self) -> bool:
        """Returns True if the pools' memory may be shared segment by segment, and so may be replaced."""
        return self._export_again is not None

    def withdraw(self) -> bool:
        """Stop sharing the pools' memory, before it is taken away. All leases have ended. Returns False if it is not
        shared segment by segment, or was already withdrawn.
        """
        if self.board is None or self.export is None or not self.export.segments:
            return False
        self.board.memory.withdraw()
        self.export, self.why_packed = None, "its memory is taken away for a while"
        return True

    def renew(self) -> bool:
        """Describe the pools again, because their memory was replaced or has grown. Returns False if nothing has
        changed.
        """
        before, reason, board = self.export, self.why_packed, self.board
        if self._export_again is not None:
            try:
                self.export, self.why_packed = self._export_again(), ""
            except KVConnectorError as error:
                self.export, self.why_packed = None, error.statement
        elif before is not None and board is not None and not board.memory.is_intact():
            board.memory.withdraw()
            self.export, self.why_packed = (
                None,
                "the caches have other memory than the one that is shared",
            )
        if self.export is None and self.why_packed != reason:
            logger.warning("consumers cannot read these pools directly: %s", self.why_packed)
        return self.export != before

    def step(self, *, may_check: bool = True) -> None:
        """Move everything that can move, and add the resulting events to `events`. Call it until there are none. The
        last call of a turn may also check for lost peers, which takes longer than the rest of a turn.
        """
        num_events = len(self.events)
        if self.sends.active:
            self.sends.poll()
        if self.receives.active:
            self.receives.poll()
        if self.reads.active or self.reads.waiting:
            self.reads.poll()
        # last, because slots may be free again, and direct reads may have become packed ones
        if self.receives.waiting:
            self.receives.admit()
        if may_check and len(self.events) == num_events:
            now_s = self.clock()
            is_greeting = self.lock.is_greeting and self._is_greeting()
            if is_greeting or now_s >= self._next_check_s:
                self._check_peers(now_s)
        if len(self.events) > num_events:
            self._loop.stay_awake()  # the engine or a peer waits for it

    def pump(self, timeout_s: float) -> None:
        """Move chunks, without the GIL, until `step` has something to add, a descriptor that `state` watches is
        readable, a control message waits in the transport, or `timeout_s` is over.

        Another thread may have made progress inline while this one, the driver's, waited for the GIL.
        """
        timeout_s = self._prepared(timeout_s)
        state, owner = self.state, self.lock.enter()
        state.runs[owner].limit_ns = round(timeout_s * pacing.NS_PER_S)
        state.record.entering = owner
        reason = run(state.address)
        if owner == r.DRIVER:
            self.lock.acquire_again()
        if reason == r.TIMEOUT:
            self.copies.check_device()

    def poll_once(self) -> bool:
        """Begin copies and look for those that have ended, which takes microseconds. Returns True if `step` may have
        something to add.
        """
        if self.copies.on_gpu and self.lock.is_looping:
            return False
        self._prepared(0.0)
        self.state.record.entering = LOOK
        return bool(look(self.state.address) != r.TIMEOUT)

    def release(self, timeout_s: float) -> None:
        """End inline progress. The driver's thread continues in its `pump`, for `timeout_s` at most."""
        self.lock.release(self._prepared(timeout_s))

    def close(self) -> None:
        """Release everything, after waits of `CLOSE_S` and the transport's in all. Idempotent."""
        if self._closed:
            return
        self._closed = True
        until_s = time.monotonic() + CLOSE_S
        # in reverse order, and completely even if a device has failed
        with ExitStack() as stack:
            stack.callback(self.state.close)
            stack.callback(self.transport.close)
            stack.callback(self.receives.release)
            stack.callback(self.sends.release)
            if self.board is not None:
                stack.callback(self.board.close, until_s)
            with kept_unless_idle(self, "staging memory, and flags that copies set"):
                self.copies.finish()
            # only then: a copy that does not end may still read pools of others
            self.reads.release()

    @property
    def uses_network(self) -> bool:
        """Returns True if chunks are sent or received, or the network still holds a slot."""
        is_active = self.sends.active or self.receives.active
        return bool(is_active) or self.sends.slots.num_busy > 0

    def _prepared(self, timeout_s: float) -> float:
        """Prepare a run of the loop. Returns the longest time that it can do without Python."""
        if self.receives.promised:
            self.receives.begin()
        if self.sends.active:
            self.sends.refresh_endpoints()
        self.state.record.wants_slots = bool(self.receives.waiting)
        if timeout_s <= pacing.LOOK_AT_LEASE_S:
            return timeout_s
        if self.reads.waiting and len(self.reads.active) < MAX_READS:
            return pacing.LOOK_AT_LEASE_S
        is_greeting = self.lock.is_greeting and self._is_greeting()
        if is_greeting or self.transport.arriving_control:
            return min(timeout_s, pacing.LOOK_AGAIN_S)
        rows = self.reads.active or self.receives.active or self.sends.active
        return (
            min(timeout_s, pacing.CHECK_PEERS_S) if rows or self.sends.may_hold_slots else timeout_s
        )

    def _is_greeting(self) -> bool:
        """Returns True while a peer is being greeted. Only the owner may call this; any thread may read its last
        result.
        """
        self.lock.is_greeting = bool(self.warm_ups)
        return self.lock.is_greeting

    def _check_peers(self, now_s: float) -> None:
        """Collect warm-up messages that have ended, and look for lost peers."""
        self._next_check_s = now_s + pacing.CHECK_PEERS_S
        for completion in self.transport.progress(others_move=self.uses_network):
            end = self.warm_ups.pop(completion.ticket, None)
            if end is not None:
                end(completion.error)
        self.sends.refresh()
        self.receives.refresh()
