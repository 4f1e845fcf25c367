"""The data path of one worker: reads in, events out.

*What it does.* It sends the chunks of reads to consumers, receives those that this worker asked for, and reads pools of
other workers on this host. Chunks move in a compiled loop that takes no GIL; Python sees where reads begin and end.

*Threads.* It has none of its own, and one owner at a time: the driver's thread, but while that sleeps in `pump` or
waits for the GIL an engine's thread may become the owner by `machine.try_acquire`, until it calls `release`. Any thread
may call `has_pending`, `is_handshaking`, and of `machine` `notify`, `is_starved`, `lock.is_ours` and `try_acquire`; all
else is the owner's.

*A turn.* The driver's thread calls `pump`, which returns when there is something to do, then clears what is pending,
then calls `step` until it returns nothing. In between it calls what the sessions command, here and in `sends`,
`receives` and `reads`. An engine's thread commands, calls `poll_once` and `step`, and releases.

*Who owns what.* The blocks of a read belong to it from `submit_*` on until the one event that ends it: `SendFinished`,
`SendStopped`, `ReceiveFinished`, `ReceiveFailed` or `ReceiveStopped`. Slots are a receive's until it has finished or
`ReceiveDrained` follows. Memory that UCX or a GPU may still touch is kept, by a quarantine or for as long as the
process lives, and never handed out.

*Clock.* `clock` is for quarantines, for reads that wait for a lease, and for how often peers are looked at. The loop
reads the network's clock, which is the same but in tests.

*What may block.* `pump` sleeps. `open_endpoint`, `expect_warm_up` and `reads.open` may compile kernels and map memory,
so no engine's thread gets there: see `is_handshaking`. `close` waits for a GPU, with a deadline. Nothing else waits.

*What breaks if this is changed.* The loop reads rows by their addresses. So rows may grow and jobs may go only while
their caller owns the lock, jobs stay until their row is over, and a send's endpoint is looked up before each run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from kvconnector.config import PathsConfig
from kvconnector.datapath.base import DataEvent, EventQueue, Program
from kvconnector.datapath.device_memory import kept_unless_idle
from kvconnector.datapath.direct.export import PoolExporter
from kvconnector.datapath.pump.copies import Copies
from kvconnector.datapath.pump.machine import Machine, Pace
from kvconnector.datapath.pump.network import Network
from kvconnector.datapath.pump.reads import DirectReads
from kvconnector.datapath.pump.receives import Receives
from kvconnector.datapath.pump.sends import Sends
from kvconnector.datapath.staging import WARM_UP_BYTES, SlotPool
from kvconnector.layout import GroupBlocks, Watermark
from kvconnector.session.commands import LinkId, StartReceive
from kvconnector.transport import Transport
from kvconnector.wire.export import PoolExport
from kvconnector.wire.messages import Probe
from kvconnector_kernels.pump import records as r

logger = logging.getLogger(__name__)

MAX_RUN_S = 0.1
"""Python looks after peers and the device this often while chunks move."""
FIRST_PASSES = 4
"""On a GPU the first chunk is packed within as many, and is posted."""
MAX_LEASE_RUN_S = 1e-4
"""The same while a lease is awaited, at which Python looks."""
MAX_AWAITED_RUN_S = 1e-3
"""The same while something is awaited that the loop does not look at: a warm-up, the rest of a long control message, a
lease."""


class DataPath:
    """Sends and receives over a transport, and reads from pools on this host. `network` is the transport's, as the loop
    calls it.

    `share` lets consumers read this worker's pools; None where that is not possible, or nobody's wish. `reads_directly`
    lets it read those of others. `paths`: see `DirectReads`.
    """

    def __init__(
        self,
        transport: Transport,
        network: Network,
        copies: Copies,
        *,
        share: PoolExporter | None = None,
        reads_directly: bool = False,
        paths: PathsConfig,
        device: str,
        send_slots: SlotPool | None,
        recv_slots: SlotPool | None,
        window: int,
        quarantine_s: float,
        pace: Pace,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._transport = transport
        self.copies = copies
        self._clock = clock
        self.machine = Machine(
            network,
            copies,
            device=device,
            send_pool=send_slots,
            recv_pool=recv_slots,
            pace=pace,
        )
        self._report = EventQueue()
        self.sends = Sends(
            transport,
            self.machine,
            self._report,
            quarantine_s=quarantine_s,
            on_gpu=device != "cpu",
            clock=clock,
        )
        self.receives = Receives(
            transport,
            self.machine,
            self._report,
            window=window,
            quarantine_s=quarantine_s,
            clock=clock,
        )
        self.reads = DirectReads(
            self.machine,
            self._report,
            is_enabled=reads_directly,
            device=device,
            fall_back=self.receives.submit,
            paths=paths,
            clock=clock,
        )
        self._share = share
        self._are_copies_quick = device != "cpu"
        self._next_check_s = 0.0
        self._is_handshaking = False
        self._closed = False

    def __repr__(self) -> str:
        state = "closed" if self._closed else "greeting" if self._is_handshaking else "open"
        return f"<DataPath {state}, {self.sends!r}, {self.receives!r}, {self.reads!r}>"

    def open_endpoint(
        self, link: LinkId, transport_address: bytes, warm_up_tag: int, warm_up_bytes: int
    ) -> None:
        """Reach a consumer worker and send it the warm-up message: `EndpointOpened` or `EndpointFailed`."""
        self._is_handshaking = True
        warm_up = self.machine.send_slots.pool.scratch(warm_up_bytes)
        self.sends.endpoints.open(link, transport_address, warm_up_tag, warm_up)

    def send_probe(self, link: LinkId, probe: Probe) -> None:
        """Send the messages that a consumer worker measures by, unless it is lost."""
        self._is_handshaking = True
        buffer = self.machine.send_slots.pool.scratch(probe.nbytes)
        self.sends.endpoints.probe(link, probe, buffer)

    def expect_warm_up(self, link: LinkId) -> tuple[int, int]:
        """Post the warm-up receive for `link`; returns its tag and size for the hello. `WarmedUp` follows."""
        self._is_handshaking = True
        warm_up = self.machine.recv_slots.pool.scratch(WARM_UP_BYTES)
        return self.receives.warm_ups.expect(link, warm_up)

    def submit_send(
        self, link: LinkId, read_id: int, program: Program, *, first_tag: int, window: int
    ) -> None:
        """Stream a read to `link`: ends in `SendFinished` or `SendStopped`."""
        self.machine.stay_awake()
        self.sends.submit(link, read_id, program, first_tag=first_tag, window=window)
        # the consumer waits for the first chunk, and Python goes on for a while before it enters the loop
        self._refresh()
        self.machine.begin(FIRST_PASSES if self._are_copies_quick else 1)

    def expect_send(self, blocks: Sequence[GroupBlocks]) -> None:
        """Prepare for a read of these blocks, if any reads come this way. `submit_send` is given the same sequence."""
        if self.sends.has_sent:
            self.copies.expect(blocks)

    def submit_receive(self, read_id: int, program: Program) -> None:
        """Receive a read: `ReceivePosted` once there are slots, then `ReceiveFinished`; or `ReceiveFailed` or
        `ReceiveStopped` when nothing writes its blocks any more, and `ReceiveDrained` when its slots are free.
        """
        self.machine.stay_awake()
        self.receives.submit(read_id, program)

    def submit_direct(self, read: StartReceive, lease_key: bytes) -> None:
        """The same without the producer, if it publishes the lease: then there is no `ReceivePosted`, and
        `LeaseExpiredError` is the failure of a read whose lease ended in the meantime.
        """
        self.machine.stay_awake()
        self.reads.submit(read, lease_key)
        if self._are_copies_quick:
            # a GPU copies meanwhile
            self.machine.begin(1)

    def stop_receive(self, read_id: int) -> None:
        """Write no further chunk into the blocks: `ReceiveStopped` follows, unless the read has ended."""
        if not self.reads.stop(read_id):
            self.receives.stop(read_id)

    def export(self) -> PoolExport | None:
        """What consumers need to read these pools themselves; None if they cannot. Always the same."""
        return None if self._share is None else self._share.message

    def publish_lease(self, key: bytes, watermark: Watermark) -> None:
        """Let consumers read blocks that are leased, once the engine's kernels before now have filled them."""
        if self._share is not None and not self._share.board.publish(key, watermark):
            logger.debug("a lease is not published: its bucket of the board is full")

    def retract_lease(self, key: bytes) -> None:
        """From now on, no read of these blocks succeeds; no effect if they are not published."""
        if self._share is not None:
            self._share.board.retract(key)

    def step(self) -> list[DataEvent]:
        """Move what can move; return what happened. Call it until nothing did."""
        if self.machine.sends.num_active:
            self.sends.poll()
        if self.machine.receives.num_active:
            self.receives.poll()
        self.reads.poll()
        # last: slots are free again, and reads are to be sent that were not before
        if self.receives.waiting:
            self.receives.admit()
        now_s = self._clock()
        is_greeted = self._is_handshaking and self._is_warming_up()
        if not self._report and (is_greeted or now_s >= self._next_check_s):
            self._check_peers(now_s)
        if not self._report:
            return []
        # somebody waits for it
        self.machine.stay_awake()
        return self._report.drain()

    def reported(self) -> list[DataEvent]:
        """What is known without a look at anything: whoever asked for something goes on with that at once."""
        return self._report.drain()

    def pump(self, timeout_s: float, fds: tuple[int, ...]) -> None:
        """Move chunks, without the GIL, until `step` has something to return, one of `fds` is readable, a control
        message waits in the transport, or `timeout_s` is over.
        """
        self._refresh()
        timeout_s = self._run_s(timeout_s)
        reason = self.machine.run(timeout_s, wants_slots=bool(self.receives.waiting), fds=fds)
        if reason == r.TIMEOUT:
            self.copies.check_device()

    @property
    def is_handshaking(self) -> bool:
        """Returns True while a peer is greeted, which may compile kernels and map memory: nobody does that inline."""
        return self._is_handshaking

    def has_pending(self) -> bool:
        """Returns True if inline progress may find something to do. Each call counts as a poll of the engine's
        thread.
        """
        self.machine.note_poll()
        if self._is_handshaking:
            return False
        lock = self.machine.lock
        # out of the loop the driver's thread is at work, or waits for the GIL and nobody looks at anything
        return lock.has_pending or not lock.is_looping

    def poll_once(self) -> bool:
        """Begin and notice what takes microseconds. Returns True if `step` may have something to return."""
        if not self._are_copies_quick and self.machine.lock.is_looping:
            return False
        self._refresh()
        return self.machine.run(-1.0, wants_slots=bool(self.receives.waiting)) != r.TIMEOUT

    def release(self, timeout_s: float) -> None:
        """End inline progress. The driver's thread goes on in its `pump`, for `timeout_s` at most."""
        self._refresh()
        wants_slots = bool(self.receives.waiting)
        self.machine.release(self._run_s(timeout_s), wants_slots=wants_slots)

    def close(self) -> None:
        """Release everything. Idempotent."""
        if not self._closed:
            self._closed = True
            with ExitStack() as stack:
                stack.callback(self.machine.close)
                stack.callback(self._transport.close)
                stack.callback(self._release)

    def _release(self) -> None:
        # in reverse, and all of it even where a device has failed
        with ExitStack() as stack:
            stack.callback(self.receives.release)
            stack.callback(self.sends.release)
            stack.callback(self.reads.release)
            if self._share is not None:
                stack.callback(self._share.board.close)
            stack.callback(self._finish_copies)

    def _finish_copies(self) -> None:
        with kept_unless_idle(self.machine, "staging memory, and flags that copies set"):
            self.copies.finish()

    def _refresh(self) -> None:
        """What the loop takes for granted."""
        if self.receives.promised:
            self.receives.begin()
        if self.machine.sends.num_active:
            self.sends.refresh_endpoints()

    def _run_s(self, timeout_s: float) -> float:
        """For how long at most the loop can do without Python."""
        if timeout_s <= MAX_LEASE_RUN_S:
            return timeout_s
        if self.reads.is_waiting:
            return MAX_LEASE_RUN_S
        is_greeted = self._is_handshaking and self._is_warming_up()
        if is_greeted or self.machine.network.is_control_arriving():
            return min(timeout_s, MAX_AWAITED_RUN_S)
        return min(timeout_s, MAX_RUN_S) if self.machine.is_active else timeout_s

    def _is_warming_up(self) -> bool:
        """Returns True while a peer is greeted. For the owner alone; any thread may read what it found last."""
        self._is_handshaking = (
            self.sends.endpoints.is_warming_up or self.receives.warm_ups.is_awaited
        )
        return self._is_handshaking

    def _check_peers(self, now_s: float) -> None:
        """What the loop does not do: warm-up messages, and lost peers."""
        self._next_check_s = now_s + MAX_RUN_S
        for completion in self.machine.network.progress(others_move=self.machine.uses_network):
            _ = self.sends.complete(completion) or self.receives.warm_ups.complete(completion)
        self.sends.refresh()
        self.receives.refresh()
