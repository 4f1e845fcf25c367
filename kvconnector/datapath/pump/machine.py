"""The pump's rows, and running its loop over them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvconnector.datapath.pump.copying import ChunkCopies
from kvconnector.datapath.pump.pulling import PoolReads
from kvconnector.datapath.pump.ucp import Calls
from kvconnector.datapath.staging import SlotPool
from kvconnector.transport import Buffer
from kvconnector_kernels.pump import records as r
from kvconnector_kernels.pump.loop import run

Rows = npt.NDArray[np.int64]

MAX_PULLS = 16
"""Pulls under way at a time: their copies share one thread or one stream, so more would only be slower each."""
_FIRST_CAPACITY = 16
_NS_PER_S = 1_000_000_000


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


class Pulls:
    """Rows of the pulls, and the flag that each one's last copy sets. `reads` of None: there are none."""

    def __init__(self, copies: ChunkCopies, reads: PoolReads | None) -> None:
        self._programs = Programs()
        self._fences = copies.make_fences(MAX_PULLS if reads is not None else 0)
        self._fence_values = np.zeros(MAX_PULLS, np.int64)

    @property
    def rows(self) -> Rows:
        """The programs' rows."""
        return self._programs.rows

    @property
    def num_active(self) -> int:
        """Pulls that are not removed yet."""
        return self._programs.num_active

    def add(self, jobs_address: int) -> int:
        """A running pull; its row's number. There are fewer than `MAX_PULLS`."""
        index = self._programs.add({r.JOBS: jobs_address})
        row = self.rows[index]
        row[r.PULL_FENCE] = self._fences.addresses[index]
        # the flag still has what the pull before this one set
        row[r.PULL_FENCE_VALUE] = self._fence_values[index]
        return index

    def remove(self, index: int) -> None:
        """Forget a pull that is over."""
        self._fence_values[index] = self.rows[index, r.PULL_FENCE_VALUE]
        self._programs.remove(index)


class Slots:
    """Rows of one direction's slots, all of a pool's. A pool of None has none."""

    def __init__(
        self, pool: SlotPool | None, copies: ChunkCopies, clock: Callable[[], float]
    ) -> None:
        self._pool = pool
        self._clock = clock
        self._places: list[int] = []
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

    def buffer(self, slot: int, nbytes: int) -> Buffer:
        """A slot's memory, as the transport wants it."""
        return self.pool.buffer(self._places[slot], nbytes)

    def free_row(self, slot: int) -> None:
        """Free a slot whose memory nobody uses."""
        self.rows[slot, r.STATE] = r.FREE
        self.rows[slot, r.PROGRAM] = -1
        self.free[r.HEIGHT] += 1
        self.free[self.free[r.HEIGHT]] = slot

    def swap(self, slot: int, rest_s: float) -> None:
        """Free a slot whose memory the network may still read: that memory rests, other memory takes its place."""
        resting = self._places[slot]
        self.pool.set_aside(resting, self._clock() + rest_s)
        place = self.pool.take()
        assert place is not None  # set aside just now
        self._places[slot] = place
        self.rows[slot, r.ADDRESS] = self.pool.address(place)
        self.free_row(slot)

    def restore_rested(self) -> None:
        """Let memory that has rested long enough be used again."""
        if self._pool is not None:
            self._pool.restore_rested(self._clock())


class Machine:
    """All rows of one worker, and the compiled loop over them. One thread at a time."""

    def __init__(
        self,
        calls: Calls,
        copies: ChunkCopies,
        reads: PoolReads | None = None,
        *,
        send_pool: SlotPool | None,
        recv_pool: SlotPool | None,
        pace: Pace,
        clock: Callable[[], float],
    ) -> None:
        self.calls = calls
        self.copies = copies
        self.sends, self.receives = Programs(), Programs()
        self.pulls = Pulls(copies, reads)
        self.send_slots = Slots(send_pool, copies, clock)
        self.recv_slots = Slots(recv_pool, copies, clock)
        head = self._head = np.zeros(r.HEAD_COLUMNS, np.int64)
        head[r.COPY] = copies.function
        head[r.COPY_CONTEXT] = copies.context
        if reads is not None:
            head[r.PULL], head[r.PULL_CONTEXT] = reads.function, reads.context
            head[r.PULL_STOP] = reads.stop_function
        head[r.JOB_BYTES] = copies.job_bytes
        head[r.SPIN_NS] = round(pace.spin_s * _NS_PER_S)
        head[r.LOOK_NS] = round(pace.look_s * _NS_PER_S)
        head[r.PAUSE_NS] = round(pace.pause_s * _NS_PER_S)
        calls.row[r.BEGIN], calls.row[r.BEGIN_ARGUMENT] = copies.begin

    @property
    def is_active(self) -> bool:
        """Whether a program is under way, or only the network still holds a slot."""
        return (
            self.sends.num_active > 0
            or self.receives.num_active > 0
            or self.pulls.num_active > 0
            or bool((self.send_slots.rows[:, r.STATE] != r.FREE).any())
        )

    @property
    def num_runs(self) -> int:
        """How often the loop was entered, and so how often it took the GIL to come back."""
        return int(self._head[r.NUM_RUNS])

    @property
    def num_sleeps(self) -> int:
        """How often the loop slept, without the GIL."""
        return int(self._head[r.NUM_SLEEPS])

    def run(self, limit_s: float, *, wants_slots: bool) -> int:
        """Move chunks until a program ends, a watched descriptor is readable, or the time is over; which of them."""
        self._head[r.WANTS_SLOTS] = wants_slots
        reason = run(
            self.calls.row,
            self._head,
            self.sends.rows,
            self.send_slots.rows,
            self.send_slots.free,
            self.receives.rows,
            self.recv_slots.rows,
            self.recv_slots.free,
            self.pulls.rows,
            round(limit_s * _NS_PER_S),
        )
        return int(reason)
