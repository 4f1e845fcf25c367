"""The pump's rows, and running its loop over them."""

from __future__ import annotations

import threading
import time
from array import array
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from kvconnector.datapath.pump.copies import Copies
from kvconnector.datapath.pump.id_buffers import IdBuffers
from kvconnector.datapath.pump.network import NS_PER_S, Calls, UcxNetwork
from kvconnector.datapath.staging import SlotPool
from kvconnector.session.program import Program
from kvconnector_kernels.pump import records as r
from kvconnector_kernels.pump.driver_lock import (
    LOCK,
    notify,
    release_inline,
    try_acquire,
    wait_until_free,
)
from kvconnector_kernels.pump.loop import look, run

Records = npt.NDArray[np.void]

MAX_READS = 16
"""Direct reads under way at a time: their copies share one thread or one stream, so more would only be slower each."""
_FIRST_CAPACITY = 16
_NS_PER_MS = 1_000_000
_NS_PER_US = 1_000
_PATIENCE_NS = 2 * _NS_PER_MS
"""A consumer mostly confirms a read within this after its last chunk: one turn of the driver sees to both."""
_GRACE_NS = 30_000
"""An engine that asks for something and then waits for it is there within this, and needs no other thread."""
_TENURE_NS = _NS_PER_MS
"""How long the driver's thread works in Python until it leaves the GIL to others for `_LEAVE_US`. A thread that is
woken because the GIL was free for a moment, and finds it taken again, waits for 5 ms anew, each time."""
_LEAVE_US = 100
_LONG_GIL_WAIT_NS = _NS_PER_MS // 2
"""Above this an engine is there sooner, if it polls, than the driver's thread can have the GIL."""
_LONG_STEP_NS = 5 * _NS_PER_MS
"""The interpreter takes the GIL from a thread that computes for this time without a poll."""
_GIL_WAITS, _INLINE_TURNS = 4, 64
"""Their average covers about this many waits, and is forgotten after this many turns without one."""

_PENDING, _LOOPING, _INLINE_THREAD = (
    r.offset_of(LOCK, name) // 4 for name in ("pending", "looping", "inline_thread")
)
_ENTERING, _WANTS_SLOTS, _NUM_INLINE, _MOVED, _LEAVE, _LEFT, _TAKEN, _GRACE, _RETURN_BY = (
    r.index_of(r.STATE, name)
    for name in (
        *("entering", "wants_slots", "num_inline", "moved_ns", "leave_us"),
        *("left_ns", "taken_ns", "grace_ns", "return_by_ns"),
    )
)


T = TypeVar("T", bound=Program)


class Rows(Generic[T]):
    """One kind's rows in the arrays of a pump's `state`; grows as needed. `active` are the programs that have one."""

    def __init__(self, state: Records, kind: str, ids: IdBuffers) -> None:
        self._state = state
        self._kind = kind
        self._ids = ids
        self._fields = r.ARRAYS[kind].names or ()
        self.vacant: list[int] = []
        """Those that no program has; `add` takes the last one."""
        self._set_rows(np.zeros(_FIRST_CAPACITY, r.ARRAYS[kind]))
        self.active: dict[int, T] = {}

    def _set_rows(self, rows: Records) -> None:
        self.vacant += np.flatnonzero(rows["phase"] == r.VACANT).tolist()
        self.rows = rows
        self._numbers = r.numbers_of(rows)
        self._state[self._kind], self._state[f"num_{self._kind}"] = rows.ctypes.data, len(rows)

    def values(self, program: T) -> dict[str, int]:
        """A program's fields by name."""
        first = program.row * len(self._fields)
        return dict(
            zip(self._fields, self._numbers[first : first + len(self._fields)], strict=True)
        )

    def add(self, program: T, **values: int) -> None:
        """Run a program's jobs, with these fields and the others zero."""
        if not self.vacant:
            self._set_rows(np.concatenate([self.rows, np.zeros_like(self.rows)]))
        index = program.row = self.vacant.pop()
        begun = {"phase": r.RUNNING, "jobs": program.jobs[0]}
        row = dict.fromkeys(self._fields, 0) | values | begun
        first = index * len(row)
        self._numbers[first : first + len(row)] = array("l", row.values())
        self.active[index] = program

    def __contains__(self, program: Program) -> bool:
        return self.active.get(program.row) is program

    def set(self, program: T, name: str, value: int) -> None:
        """Change one field of a program."""
        self._numbers[program.row * len(self._fields) + self._fields.index(name)] = value

    def remove(self, program: T) -> None:
        """Forget a program that is over."""
        index, program.row = program.row, -1
        self._numbers[index * len(self._fields)] = r.VACANT  # its phase is the first field
        self.vacant.append(index)
        del self.active[index]
        self._ids.give_back(program.jobs[1])
        program.jobs = None


class Machine:
    """A pump's state, the compiled loop over it, and the driver lock, whose owner calls the loop. See
    `kvconnector_kernels.pump.driver_lock`.
    """

    def __init__(
        self,
        network: UcxNetwork,
        copies: Copies,
        send_slots: SlotPool,
        recv_slots: SlotPool,
        pace_s: tuple[float, float, float],
    ) -> None:
        """`pace_s`: how eagerly the loop looks, `spin_ns`, `look_ns` and `pause_ns` of the pump's `STATE`."""
        self.network = network
        self.copies = copies
        self.is_handshaking = False
        """A peer is greeted, which may compile kernels and map memory: nobody does that inline. The owner writes it."""
        lock = np.zeros(1, LOCK)
        self._lock = lock.view(np.int32).data
        self._gil_wait_ns = self._polled_ns = self._poll_interval_ns = 0
        state = np.zeros((), r.STATE)
        self._address = state.ctypes.data
        self._numbers = r.numbers_of(state)
        self.calls = Calls(state, network, on_gpu=copies.on_gpu)
        self.sends, self.receives, self.reads = (
            Rows[Any](state, kind, copies.ids) for kind in ("sends", "receives", "reads")
        )
        self.send_slots, self.recv_slots = send_slots, recv_slots
        send_slots.attach(state, "send_slots", copies.make_fences(len(send_slots.rows)))
        recv_slots.attach(state, "recv_slots", copies.make_fences(len(recv_slots.rows)))
        state["lock"] = lock.ctypes.data
        state["copy"], state["copy_context"] = copies.function, copies.context
        state["begin"], state["begin_argument"] = copies.begin
        state["job_bytes"] = copies.job.itemsize
        state["spin_ns"], state["look_ns"], state["pause_ns"] = (
            round(seconds * NS_PER_S) for seconds in pace_s
        )
        state["grace_ns"], state["patience_ns"] = _GRACE_NS, _PATIENCE_NS
        if copies.digests is not None:
            copies.digests.attach(state)
        self._warm_up()

    def close(self) -> None:
        """Release what wakes the driver, whose last run is over; `notify` then wakes nobody. Idempotent."""
        self.calls.close()

    def _warm_up(self) -> None:
        """Compile what an engine's thread would have to wait for in its first request."""
        self.notify()
        self.clear_pending()
        release_inline(self._address)
        wait_until_free(self._address)
        try_acquire(self._address, r.DRIVER, 0, 0)
        look.compile("(int64,)")

    @property
    def uses_network(self) -> bool:
        """Returns True if chunks are sent or received, or the network still holds a slot."""
        return bool(self.sends.active or self.receives.active) or self.send_slots.num_busy > 0

    def stay_awake(self) -> None:
        """There was something to do: soon there is more, and waking a thread costs more than the work."""
        self._numbers[_MOVED] = self.network.now_ns()

    def run(self, limit_s: float, *, wants_slots: bool, fds: tuple[int, ...] | None = None) -> int:
        """Move chunks until a program ends, one of `fds` is readable, those of the run before if there are none, or the
        time is over; which of them. A limit below 0 is for one look at everything, which keeps the GIL.

        Another thread may have made progress inline while this one, the driver's, waited for the GIL.
        """
        owner, calls = r.INLINE if self._lock[_INLINE_THREAD] else r.DRIVER, self.calls
        if fds is not None and fds != calls.watched[owner]:
            calls.watch(owner, fds)
        if owner == r.DRIVER:
            entered_ns = self.network.now_ns()
            has_worked_long = entered_ns - self._numbers[_TAKEN] >= _TENURE_NS
            self._numbers[_LEAVE] = _LEAVE_US * has_worked_long
        calls.limits[owner] = round(limit_s * NS_PER_S)
        self._numbers[_ENTERING] = owner
        self._numbers[_WANTS_SLOTS] = wants_slots
        reason = (look if limit_s < 0 else run)(self._address)
        if owner == r.DRIVER:
            self._acquire_again(entered_ns)
        return int(reason)

    def begin(self, passes: int) -> None:
        """Run `passes` iterations of the loop, without releasing the GIL or the lock."""
        # as if inline, which releases nothing
        self.calls.limits[r.INLINE] = -1
        self._numbers[_ENTERING] = r.INLINE
        for _ in range(passes):
            if look(self._address) == r.NOTICE:
                self.notify()  # the next run would not find it again

    def _acquire_again(self, entered_ns: int) -> None:
        """The driver's thread has the GIL. As long as it waited for that, others get to take what is pending.

        Who waits for the GIL slows down who has it: a busy engine that polls often is waited for in the loop.
        """
        now_ns = self.network.now_ns()
        if self._numbers[_LEAVE] or now_ns - entered_ns >= _LEAVE_US * _NS_PER_US:
            self._numbers[_TAKEN] = now_ns
        waited_ns = now_ns - self._numbers[_LEFT]
        self._gil_wait_ns += (waited_ns - self._gil_wait_ns) // _GIL_WAITS
        grace_ns = _GRACE_NS
        if self._gil_wait_ns > _LONG_GIL_WAIT_NS:
            interval_ns = max(self._poll_interval_ns, time.monotonic_ns() - self._polled_ns)
            is_polling = interval_ns < _LONG_STEP_NS
            grace_ns = max(2 * interval_ns if is_polling else self._gil_wait_ns, _NS_PER_MS)
        self._numbers[_GRACE] = grace_ns
        while not try_acquire(self._address, r.DRIVER, 0, 0):
            wait_until_free(self._address)

    @property
    def is_starved(self) -> bool:
        """Returns True if the driver's thread has waited long for the GIL: each time that another thread has released
        it for a moment, it waits anew.
        """
        left_ns = time.monotonic_ns() - self._numbers[_LEFT]
        return not self._lock[_LOOPING] and left_ns > _LONG_GIL_WAIT_NS

    @property
    def is_looping(self) -> bool:
        """Returns True if the driver's thread is in the loop, or sleeps there."""
        return bool(self._lock[_LOOPING])

    @property
    def is_ours(self) -> bool:
        """Returns True if the calling thread owns the lock, for inline progress."""
        return bool(self._lock[_INLINE_THREAD] == threading.get_native_id())

    def has_pending(self) -> bool:
        """Returns True if inline progress may find something to do. Each call counts as a poll of the engine's
        thread.
        """
        now_ns = time.monotonic_ns()
        self._poll_interval_ns, self._polled_ns = now_ns - self._polled_ns, now_ns
        if self.is_handshaking:
            return False
        # out of the loop the driver's thread is at work, or waits for the GIL and nobody looks at anything
        return bool(self._lock[_PENDING]) or not self._lock[_LOOPING]

    def clear_pending(self) -> None:
        """The owner is about to do all that there is to do."""
        self._lock[_PENDING] = 0

    def notify(self) -> bool:
        """There is something to do. Returns True if the driver's thread sees it by itself. Any thread may call it."""
        return bool(notify(self._address))

    def try_acquire(self, limit_s: float) -> bool:
        """Make the calling thread the owner, if the driver releases the lock within microseconds: it keeps the GIL."""
        thread = threading.get_native_id()
        return bool(try_acquire(self._address, r.INLINE, round(limit_s * NS_PER_S), thread))

    def release(self, limit_s: float, *, wants_slots: bool) -> None:
        """End inline progress. The driver's thread goes on with what is under way, for `limit_s` at most."""
        self._gil_wait_ns -= self._gil_wait_ns // _INLINE_TURNS
        self._numbers[_WANTS_SLOTS] = wants_slots
        self._numbers[_NUM_INLINE] += 1
        self._numbers[_RETURN_BY] = self.network.now_ns() + round(limit_s * NS_PER_S)
        release_inline(self._address)
