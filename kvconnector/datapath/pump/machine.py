"""The pump's rows, and running its loop over them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvconnector.datapath.pump.copying import ChunkCopies
from kvconnector.datapath.pump.driver_lock import DriverLock
from kvconnector.datapath.pump.network import Calls, Network
from kvconnector.datapath.staging import SlotPool
from kvconnector.transport import Buffer
from kvconnector_kernels.pump import records as r
from kvconnector_kernels.pump.driver_lock import (
    notify,
    release_inline,
    try_acquire,
    wait_until_free,
)
from kvconnector_kernels.pump.loop import run

Rows = npt.NDArray[np.int64]

MAX_PULLS = 16
"""Pulls under way at a time: their copies share one thread or one stream, so more would only be slower each."""
_FIRST_CAPACITY = 16
_NS_PER_S = 1_000_000_000
_GRACE_NS = 30_000
"""An engine that asks for something and then waits for it is there within this, and needs no other thread."""
_LONG_GIL_WAIT_NS = 1_000_000
"""Above this an engine is there sooner, if it polls, than the driver's thread can have the GIL."""
_GIL_WAITS = 4
"""Their average goes back over about as many."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How eagerly the loop looks: see the columns of the head."""

    spin_s: float
    look_s: float
    pause_s: float


class Programs:
    """Rows of one direction's programs; grows as needed."""

    def __init__(self) -> None:
        self.rows: Rows = np.zeros((_FIRST_CAPACITY, r.PROGRAM_COLUMNS), np.int64)
        self._vacant = list(range(_FIRST_CAPACITY))
        self.num_active = 0

    def add(self, values: dict[int, int]) -> int:
        """A running program with these columns, the others zero; its row's number."""
        if not self._vacant:
            capacity = len(self.rows)
            self._vacant = list(range(capacity, 2 * capacity))
            self.rows = np.concatenate([self.rows, np.zeros_like(self.rows)])
        index = self._vacant.pop()
        row = self.rows[index]
        row[:] = 0
        for column, value in values.items():
            row[column] = value
        row[r.PHASE] = r.RUNNING
        self.num_active += 1
        return index

    def remove(self, index: int) -> None:
        """Forget a program that is over."""
        self.rows[index, r.PHASE] = r.VACANT
        self._vacant.append(index)
        self.num_active -= 1


class PullFunction(Protocol):
    """What does a pull: addresses of a compiled function and of its context. See `PULL` of the pump's records."""

    function: int
    context: int


class Pulls:
    """Rows of the pulls, and the flag that each one's last copy sets."""

    def __init__(self, copies: ChunkCopies) -> None:
        self._programs = Programs()
        self._fences = copies.make_fences(MAX_PULLS)
        self._fence_values = np.zeros(MAX_PULLS, np.int64)

    @property
    def rows(self) -> Rows:
        """The programs' rows."""
        return self._programs.rows

    @property
    def num_active(self) -> int:
        """Pulls that are not removed yet."""
        return self._programs.num_active

    def add(self, reader: PullFunction, jobs_address: int) -> int:
        """A running pull; its row's number. There are fewer than `MAX_PULLS`."""
        index = self._programs.add(
            {
                r.JOBS: jobs_address,
                r.PULL: reader.function,
                r.PULL_CONTEXT: reader.context,
            }
        )
        row = self.rows[index]
        row[r.PULL_FENCE] = self._fences.addresses[index]
        # the flag still has what the pull before this one set
        row[r.PULL_FENCE_VALUE] = self._fence_values[index]
        return index

    def remove(self, index: int) -> None:
        """Forget a pull that is over."""
        row = self.rows[index]
        self._fence_values[index] = row[r.PULL_FENCE_VALUE]
        self._programs.remove(index)


class Slots:
    """Rows of one direction's slots, all of a pool's. A pool of None has none."""

    def __init__(self, pool: SlotPool | None, copies: ChunkCopies) -> None:
        self._pool = pool
        self._places: list[int] = []
        self._detached: list[int] = []
        while pool is not None and (place := pool.take()) is not None:
            self._places.append(place)
        count = len(self._places)
        self.rows: Rows = np.zeros((count, r.SLOT_COLUMNS), np.int64)
        self.free: Rows = np.array([count, *reversed(range(count))], np.int64)
        self._fences = copies.make_fences(count)
        self.rows[:, r.PROGRAM] = -1
        self.rows[:, r.FENCE] = self._fences.addresses
        for index, place in enumerate(self._places):
            assert pool is not None  # it gave the place
            self.rows[index, r.ADDRESS] = pool.address(place)

    @property
    def pool(self) -> SlotPool:
        """The memory. Only a worker with this direction is asked for it."""
        assert self._pool is not None
        return self._pool

    @property
    def num_free(self) -> int:
        """Slots that no program and no operation holds."""
        return int(self.free[r.HEIGHT])

    @property
    def num_busy(self) -> int:
        """Slots that a program or an operation holds."""
        return len(self.rows) - len(self._detached) - int(self.free[r.HEIGHT])

    def buffer(self, slot: int, nbytes: int) -> Buffer:
        """A slot's memory, as the transport wants it."""
        return self.pool.buffer(self._places[slot], nbytes)

    def free_row(self, slot: int) -> None:
        """Free a slot whose memory nobody uses."""
        self.rows[slot, r.STATE] = r.FREE
        self.rows[slot, r.PROGRAM] = -1
        self.free[r.HEIGHT] += 1
        self.free[self.free[r.HEIGHT]] = slot

    def quarantine(self, slot: int, is_over: Callable[[], bool]) -> None:
        """Free a slot whose memory the network may use until `is_over`. Other memory takes its place, now or once there
        is some.
        """
        self.pool.quarantine(self._places[slot], is_over)
        self.rows[slot, r.STATE] = r.FREE
        self.rows[slot, r.PROGRAM] = -1
        self._detached.append(slot)
        self._attach()

    def end_quarantines(self) -> None:
        """Let memory that the network is through with be used again."""
        if self._pool is not None:
            self._pool.end_quarantines()
            self._attach()

    def _attach(self) -> None:
        """Free the rows that have no memory, as far as there is some."""
        while self._detached and (place := self.pool.take()) is not None:
            slot = self._detached.pop()
            self._places[slot] = place
            self.rows[slot, r.ADDRESS] = self.pool.address(place)
            self.free_row(slot)


class Machine:
    """All rows of one worker, and the compiled loop over them, which the owner of the `lock` calls."""

    def __init__(
        self,
        network: Network,
        copies: ChunkCopies,
        *,
        device: str,
        send_pool: SlotPool | None,
        recv_pool: SlotPool | None,
        pace: Pace,
    ) -> None:
        self.network = network
        self.copies = copies
        self.lock = DriverLock()
        self._is_inline = False
        self._gil_wait_ns = 0
        self._driver_calls, self._inline_calls = (
            self._make_calls(device, who) for who in (r.DRIVER, r.INLINE)
        )
        self.sends, self.receives = Programs(), Programs()
        self.pulls = Pulls(copies)
        self.send_slots = Slots(send_pool, copies)
        self.recv_slots = Slots(recv_pool, copies)
        self._driver_rows = self._rows()
        head = self._head = np.zeros(r.HEAD_COLUMNS, np.int64)
        head[r.COPY] = copies.function
        head[r.COPY_CONTEXT] = copies.context
        head[r.JOB_BYTES] = copies.job_bytes
        head[r.SPIN_NS] = round(pace.spin_s * _NS_PER_S)
        head[r.LOOK_NS] = round(pace.look_s * _NS_PER_S)
        head[r.PAUSE_NS] = round(pace.pause_s * _NS_PER_S)
        head[r.GRACE_NS] = _GRACE_NS
        self._warm_up()

    def _warm_up(self) -> None:
        """Compile what an engine's thread would have to wait for in its first request."""
        self.notify()
        self.lock.clear_pending()
        release_inline(self._inline_calls.row)
        wait_until_free(self._driver_calls.row)
        try_acquire(self._driver_calls.row, 0)

    def _make_calls(self, device: str, who: int) -> Calls:
        calls = Calls(
            self.network,
            device,
            who=who,
            lock_address=self.lock.address,
            wake_fd=self.lock.wake_fd,
        )
        calls.row[r.BEGIN], calls.row[r.BEGIN_ARGUMENT] = self.copies.begin
        return calls

    @property
    def is_active(self) -> bool:
        """Whether a program is under way, or only the network still holds a slot."""
        return self.uses_network or self.pulls.num_active > 0

    @property
    def uses_network(self) -> bool:
        """Whether chunks are sent or received, or the network still holds a slot."""
        return (
            self.sends.num_active > 0
            or self.receives.num_active > 0
            or self.send_slots.num_busy > 0
        )

    @property
    def num_runs(self) -> int:
        """How often the loop was entered, and so how often it took the GIL to come back."""
        return int(self._head[r.NUM_RUNS])

    @property
    def num_sleeps(self) -> int:
        """How often the loop slept, without the GIL."""
        return int(self._head[r.NUM_SLEEPS])

    def stay_awake(self) -> None:
        """There was something to do: soon there is more, and waking a thread costs more than the work."""
        self._head[r.MOVED_NS] = self.network.now_ns()

    def run(self, limit_s: float, *, wants_slots: bool, fds: tuple[int, ...] | None = None) -> int:
        """Move chunks until a program ends, one of `fds` is readable, those of the run before if there are none, or the
        time is over; which of them. A limit below 0 is for one look at everything.

        Another thread may have made progress inline while this one, the driver's, waited for the GIL.
        """
        calls = self._inline_calls if self._is_inline else self._driver_calls
        if fds is not None:
            calls.watch(fds)
        self._head[r.WANTS_SLOTS] = wants_slots
        rows = self._rows()
        if not self._is_inline:
            self._driver_rows = rows
        reason = run(calls.row, self._head, rows, round(limit_s * _NS_PER_S))
        if calls is self._driver_calls:
            self._acquire_again()
        self.network.check()
        return int(reason)

    def _acquire_again(self) -> None:
        """The driver's thread has the GIL. As long as it waited for that, others get to take what is pending."""
        waited_ns = self.network.now_ns() - int(self._head[r.LEFT_NS])
        self._gil_wait_ns += (waited_ns - self._gil_wait_ns) // _GIL_WAITS
        is_long = self._gil_wait_ns > _LONG_GIL_WAIT_NS
        self._head[r.GRACE_NS] = self._gil_wait_ns if is_long else _GRACE_NS
        while not try_acquire(self._driver_calls.row, 0):
            wait_until_free(self._driver_calls.row)

    def notify(self) -> bool:
        """There is something to do. Whether the driver's thread sees it by itself. Any thread may say so."""
        return bool(notify(self._driver_calls.row))

    def try_acquire(self, limit_s: float) -> bool:
        """Make the calling thread the owner, if the driver has released the lock within the time, which should be
        microseconds: it keeps the GIL.
        """
        if not try_acquire(self._inline_calls.row, round(limit_s * _NS_PER_S)):
            return False
        self._is_inline = True
        return True

    def release(self, return_by_s: float, *, wants_slots: bool) -> None:
        """End inline progress. The driver's thread goes on with what is under way, until `return_by_s` of the monotonic
        clock at the latest.
        """
        head = self._head
        head[r.WANTS_SLOTS] = wants_slots
        head[r.NUM_INLINE] += 1
        is_current = all(map(operator.is_, self._rows(), self._driver_rows))
        head[r.RETURN_BY_NS] = round(return_by_s * _NS_PER_S) if is_current else r.AT_ONCE
        self._is_inline = False
        release_inline(self._inline_calls.row)

    def _rows(self) -> r.Rows:
        sending, receiving = self.send_slots, self.recv_slots
        return r.Rows(
            self.sends.rows,
            sending.rows,
            sending.free,
            self.receives.rows,
            receiving.rows,
            receiving.free,
            self.pulls.rows,
        )
