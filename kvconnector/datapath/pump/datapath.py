"""The data path of one worker: reads in, events out.

*What it does.* It sends the chunks of reads to consumers, receives those that this worker asked for, and reads pools of
other workers on this host. Chunks move in a compiled loop that takes no GIL; Python sees where reads begin and end.

*Threads.* It has none of its own, and one owner at a time: the driver's thread, but while that sleeps in `pump` or
waits for the GIL an engine's thread may become the owner by `machine.try_acquire`, until it calls `release`. Any thread
may call `machine`'s `has_pending`, `notify`, `is_starved`, `is_ours` and `try_acquire`, and read its `is_handshaking`;
all else is the owner's.

*A turn.* The driver's thread calls `pump`, which returns when there is something to do, then clears what is pending,
then calls `step` until that adds nothing to `events`. In between the sessions call `sends`, `receives` and `reads`,
through their port. In an engine's thread they do, too; it calls `poll_once` and `step`, and releases.

*Who owns what.* The blocks of a read belong to it from `submit` on until the one event that ends it: `SendOver`,
`ReceiveFinished`, `ReceiveFailed` or `ReceiveStopped`. Slots are a receive's until it has finished or
`ReceiveDrained` follows. Memory that UCX or a GPU may still touch is kept, by a quarantine or for as long as the
process lives, and never handed out.

*Clock.* `clock` is for quarantines, for reads that wait for a lease, and for how often peers are looked at. The loop
reads the network's clock, which is the same but in tests.

*What may block.* `pump` sleeps. `sends.open_endpoint`, `receives.expect_warm_up` and `reads.open` may compile kernels
and map memory, so no engine's thread gets there: see `Machine.is_handshaking`. `close` waits for a GPU, with a
deadline. Nothing else waits.

*What breaks if this is changed.* The loop reads rows by their addresses. So rows may grow and jobs may go only while
their caller owns the lock, jobs stay until their row is over, and a send's endpoint is looked up before each run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack

from kvconnector.config import ConnectorConfig
from kvconnector.datapath.base import EventQueue
from kvconnector.datapath.device_memory import kept_unless_idle
from kvconnector.datapath.direct.export import PoolExporter
from kvconnector.datapath.pump.copies import Copies
from kvconnector.datapath.pump.machine import MAX_READS, Machine
from kvconnector.datapath.pump.network import UcxNetwork
from kvconnector.datapath.pump.reads import DirectReads
from kvconnector.datapath.pump.receives import Receives
from kvconnector.datapath.pump.sends import Sends
from kvconnector.datapath.staging import SlotPool
from kvconnector.transport.ucx import UcxTransport
from kvconnector_kernels.pump import records as r

# Seconds between two looks at descriptors, and at what is under way. A GPU's chunk takes tens of microseconds, and
# every look at it may take the driver's locks from the engine's thread.
CPU_LOOKS_S = (50e-6, 0.0)
CUDA_LOOKS_S = (10e-6, 5e-6)
MAX_RUN_S = 0.1
"""Python looks after peers and the device this often while chunks move."""
MAX_LEASE_RUN_S = 1e-4
"""The same while a lease is awaited, at which Python looks."""
MAX_AWAITED_RUN_S = 1e-3
"""The same while something is awaited that the loop does not look at: a warm-up, the rest of a long control message, a
lease."""


class DataPath:
    """Sends and receives over a transport, and reads from pools on this host. `network` is the transport's, as the loop
    calls it.

    `share` lets consumers read this worker's pools; None where that is not possible, or nobody's wish. `reads_directly`
    lets it read those of others. What happens to reads and peers goes to `events`, from where the caller takes it.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        transport: UcxTransport,
        network: UcxNetwork,
        copies: Copies,
        *,
        share: PoolExporter | None = None,
        reads_directly: bool = False,
        send_slots: SlotPool,
        recv_slots: SlotPool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._transport = transport
        self.copies = copies
        self.share = share
        self.events = EventQueue()
        self._clock = clock
        looks_s = CUDA_LOOKS_S if copies.on_gpu else CPU_LOOKS_S
        pace_s = config.spin_s(copies.pools.device), *looks_s
        self.machine = Machine(network, copies, send_slots, recv_slots, pace_s)
        shared = self.machine, self.events, clock
        self.sends = Sends(config, transport, *shared)
        self.receives = Receives(config, transport, *shared)
        self.reads = DirectReads(
            config.paths, *shared, receives=self.receives, is_enabled=reads_directly
        )
        self._next_check_s = 0.0
        self._closed = False

    def __repr__(self) -> str:
        is_handshaking = self.machine.is_handshaking
        state = "closed" if self._closed else "greeting" if is_handshaking else "open"
        return f"<DataPath {state}, {self.sends!r}, {self.receives!r}, {self.reads!r}>"

    def step(self) -> None:
        """Move what can move, and add what happened to `events`. Call it until nothing did."""
        machine, num_events = self.machine, len(self.events)
        if machine.sends.active:
            self.sends.poll()
        if machine.receives.active:
            self.receives.poll()
        if machine.reads.active or self.reads.waiting:
            self.reads.poll()
        # last: slots are free again, and reads are to be sent that were not before
        if self.receives.waiting:
            self.receives.admit()
        if len(self.events) == num_events:
            now_s = self._clock()
            is_greeted = machine.is_handshaking and self._is_handshaking()
            if is_greeted or now_s >= self._next_check_s:
                self._check_peers(now_s)
        if len(self.events) > num_events:
            # somebody waits for it
            machine.stay_awake()

    def pump(self, timeout_s: float, fds: tuple[int, ...]) -> None:
        """Move chunks, without the GIL, until `step` has something to add, one of `fds` is readable, a control message
        waits in the transport, or `timeout_s` is over.
        """
        timeout_s = self._prepared(timeout_s)
        reason = self.machine.run(timeout_s, wants_slots=bool(self.receives.waiting), fds=fds)
        if reason == r.TIMEOUT:
            self.copies.check_device()

    def poll_once(self) -> bool:
        """Begin and notice what takes microseconds. Returns True if `step` may have something to add."""
        if self.copies.on_gpu and self.machine.is_looping:
            return False
        self._prepared(0.0)
        return self.machine.run(-1.0, wants_slots=bool(self.receives.waiting)) != r.TIMEOUT

    def release(self, timeout_s: float) -> None:
        """End inline progress. The driver's thread goes on in its `pump`, for `timeout_s` at most."""
        timeout_s = self._prepared(timeout_s)
        self.machine.release(timeout_s, wants_slots=bool(self.receives.waiting))

    def close(self) -> None:
        """Release everything. Idempotent."""
        if self._closed:
            return
        self._closed = True
        # in reverse, and all of it even where a device has failed
        with ExitStack() as stack:
            stack.callback(self.machine.close)
            stack.callback(self._transport.close)
            stack.callback(self.receives.release)
            stack.callback(self.sends.release)
            stack.callback(self.reads.release)
            if self.share is not None:
                stack.callback(self.share.board.close)
            stack.callback(self._finish_copies)

    def _finish_copies(self) -> None:
        with kept_unless_idle(self.machine, "staging memory, and flags that copies set"):
            self.copies.finish()

    def _prepared(self, timeout_s: float) -> float:
        """Do what the loop takes for granted. Returns for how long at most it can do without Python."""
        machine = self.machine
        if self.receives.promised:
            self.receives.begin()
        if machine.sends.active:
            self.sends.refresh_endpoints()
        if timeout_s <= MAX_LEASE_RUN_S:
            return timeout_s
        if self.reads.waiting and len(machine.reads.active) < MAX_READS:
            return MAX_LEASE_RUN_S
        is_greeted = machine.is_handshaking and self._is_handshaking()
        if is_greeted or machine.network.arriving_control:
            return min(timeout_s, MAX_AWAITED_RUN_S)
        rows = machine.reads.active or machine.receives.active or machine.sends.active
        return min(timeout_s, MAX_RUN_S) if rows or self.sends.may_hold_slots else timeout_s

    def _is_handshaking(self) -> bool:
        """Returns True while a peer is greeted. For the owner alone; any thread may read what it found last."""
        self.machine.is_handshaking = bool(self.sends.warm_ups) or self.receives.warm_ups.is_awaited
        return self.machine.is_handshaking

    def _check_peers(self, now_s: float) -> None:
        """What the loop does not do: warm-up messages, and lost peers."""
        self._next_check_s = now_s + MAX_RUN_S
        for completion in self.machine.network.progress(others_move=self.machine.uses_network):
            _ = self.sends.complete(completion) or self.receives.warm_ups.complete(completion)
        self.sends.refresh()
        self.receives.refresh()
