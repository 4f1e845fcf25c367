"""The thread that runs a worker's driver, and the engine's thread where it makes progress inline.

Theory of operation
-------------------
Two threads, one driver. The driver's thread turns until it is asked to stop. An engine's thread posts orders (`put`),
takes results from the outbox, and drives itself where the driver's thread sleeps or waits for the GIL: in `put`, in
`progress_inline` (called by `poll`), in `wait` and in `await_withdrawal`. The thread that drives holds the driver lock;
see kernels/native/driver_lock.c.

Ownership. Both threads use the posted orders, a deque whose `append` and `popleft` are atomic, and the outbox, which
has a lock. `_is_stopping`, `_failure` and `_in_use` are only ever set; each is set before whatever makes others look (a
wake-up, the end of the thread). All else, from transport to sessions, belongs to the driver, and so to the lock's
holder; `await_withdrawal` only looks up leases. `_held` keeps the owners of the caches' memory alive until `_release`
has succeeded, maybe after the worker's end: until then something may read or write there.

GPU order. `put` makes a mark in the engine's current stream before the orders are posted. The thread that takes them
makes copies of these blocks wait for the mark. No thread waits for the GPU here.

Inline progress. The engine's thread always releases the data path. A signal's handler runs between any two instructions
of the main thread, and may raise there: so `_run_inline` asks the lock who owns it, and tries twice to release it.

Blocking. For an engine's thread nothing beyond microseconds: `_run_inline` gives up at once where the driver is at
work, and leaves what takes long. `wait`, `await_withdrawal`, `withdraw_pools`, `renew_pools` and `close` block by name,
each within its limit, and give the GIL back meanwhile: the driver's thread may need it to be done. The
driver's thread blocks in the data path alone.

The end. After `close` the driver's thread says goodbye, waits until consumers have unmapped the caches, and releases
everything, in the thread that used it. If a worker is collected without `close`, `abandon` stops its thread. It may run
inside any call, even in the driver's own thread: so it sets a flag, wakes the thread, and does not wait. `_close_all`
closes what is left at the interpreter's exit.

Failure. An exception that leaves the driver is one of the data path or the transport (others end one request or one
link, see `session.containment`): a bug or a failing machine. It ends this worker's transfers but not its engine: every
request that the engine waits for ends. If copies could not be ended, requests that have blocks do not end either: the
engine would give blocks that are still written to other requests.

A call that does not return, such as one of a CUDA driver whose GPU hangs, keeps the lock and the thread that drives.
No other thread can go on for it: what it shares with the loop may be torn. So `look_for_stuck`, in the engine's thread,
notices that no turn has begun for `stuck_after_s`, breaks off the worker as after a failure whose copies could not be
ended, and logs where the thread is. Peers notice by themselves, after `peer.timeout_s`, since no heartbeat is sent or
answered. If the call returns after all, the driver's thread leaves its loop, releases everything, and the requests
that had blocks end, too. A call that keeps the GIL holds up the whole process, and can only be noticed from outside.

What breaks if this changes: memory that is freed while a copy runs is corrupted without an error; a result reported
before the release lets the engine reuse blocks too early; a wait in `abandon` can stop the interpreter in an unrelated
call.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from kvconnector.config import ConnectorConfig
from kvconnector.datapath.pools import Pools
from kvconnector.datapath.pump import pacing
from kvconnector.datapath.pump.opening import open_datapath
from kvconnector.errors import KVConnectorError, MemoryInUseError, WorkerStuckError
from kvconnector.ids import Incarnation, Rank
from kvconnector.runtime.channels import open_control, open_transport
from kvconnector.runtime.cuda_context import CudaContext
from kvconnector.runtime.driver import Driver
from kvconnector.runtime.outbox import Outbox
from kvconnector.session import LoadInFlight
from kvconnector.session.orders import Order
from kvconnector.topology import EngineGeometry

if TYPE_CHECKING:
    from kvconnector.datapath.pump.datapath import DataPath

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 8.0
"""More than all of a closing worker's waits: for consumers, in the data path (`CLOSE_S` and the transport's) and in the
control channel.
"""
UNMAP_TIMEOUT_S = 3.0
"""The part of this time for which `close` waits for consumers to unmap the pools, which normally takes milliseconds."""

RENEW_TIMEOUT_S = 2.0
"""How long, in seconds, an engine that wakes up waits for the driver. The driver's turns are shorter, unless it is
greeting peers.
"""

MAX_LOOK_S = 1.0
"""The most seconds that one check for a stuck driver may add: if the engine's thread was away for longer, the process
may have been stopped, or the driver's thread may have been waiting for the GIL.
"""

_held: dict[DriverThread, tuple[int, object]] = {}
"""The threads that are not closed, with their process and the owners of the caches' memory. If copies could not be
ended, the owners are kept alive forever.
"""


class DriverThread:
    """A worker's resources and the thread that drives them, from registration to `close`.

    Raises:
        ConfigError, TransportError: see `Worker.register`.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        pools: Pools,
        outbox: Outbox,
        rank: Rank,
        memory: object = None,
    ) -> None:
        self._name = f"kvconnector-{config.engine_id}-{rank}"
        self.pools = pools
        self._outbox = outbox
        self._is_stopping = False
        self._failure: KVConnectorError | None = None
        self._in_use: MemoryInUseError | None = None
        self._driver: Driver | None = None
        self._thread: threading.Thread | None = None
        self._stuck_after_s = config.stuck_after_s
        self._seen_turns, self._seen_at_s, self._silent_s = 0, 0.0, 0.0
        self._context = None if pools.device == "cpu" else CudaContext(pools.device)
        with ExitStack() as opened:
            transport = open_transport(config, pools.device)
            opened.callback(transport.close)
            self._datapath: DataPath = open_datapath(config, pools, transport)
            opened.callback(self._datapath.close)
            self.control = open_control(config, 0)
            opened.pop_all()
        self._build = partial(
            Driver,
            config,
            rank=rank,
            pools=pools,
            control=self.control,
            transport=transport,
            datapath=self._datapath,
            outbox=outbox,
            context=self._context,
        )
        _held[self] = os.getpid(), memory

    def __repr__(self) -> str:
        is_driving = self._thread is not None and self._thread.is_alive()
        state = "driving" if is_driving else "stopped" if self._is_stopping else "not started"
        return f"<DriverThread {self._name}, {state}>"

    def begin(self, engine: EngineGeometry, incarnation: Incarnation) -> None:
        """Start driving, now that the engine's geometry is known."""
        driver = self._build(engine=engine, incarnation=incarnation)
        thread = threading.Thread(target=self._run, args=(driver,), name=self._name, daemon=True)
        thread.start()
        self._driver, self._thread = driver, thread

    def put(self, orders: Sequence[Order], *, inline_s: float = 0.0) -> None:
        """Take orders from the engine's thread, after `begin`. With `inline_s` above 0, also work on them here, for
        `inline_s` seconds at most, unless that would take long. After a failure orders are ignored: the outbox has
        ended their requests, or will.
        """
        assert self._driver is not None  # the worker begins with its first orders
        if self._failure is not None:
            return
        self._driver.put(orders)
        if inline_s > 0.0 and not self._datapath.lock.is_greeting:
            progress = partial(Driver.progress_inline, limit_s=inline_s, orders_only=True)
            if self._run_inline(progress):
                return
        if not self._datapath.lock.notify():
            self.control.wake()

    def progress_inline(self) -> None:
        """Do the work that the driver's thread would do if it had the GIL. Takes a microsecond if there is none."""
        if not self._datapath.lock.has_pending():
            return
        progress = partial(Driver.progress_inline, limit_s=pacing.WORK_S)
        if self._run_inline(progress) and self._datapath.lock.is_starved:
            time.sleep(pacing.YIELD_S)

    def look_for_stuck(self, now_s: float) -> None:
        """End the worker if no turn has begun for `stuck_after_s`. One thread calls this, about every second."""
        driver = self._driver
        if driver is None or self._is_stopping:
            return
        turns, silent_s = driver.num_turns, min(now_s - self._seen_at_s, MAX_LOOK_S)
        self._silent_s = self._silent_s + silent_s if turns == self._seen_turns else 0.0
        self._seen_turns, self._seen_at_s = turns, now_s
        if self._silent_s < self._stuck_after_s:
            return
        place, stack = self._where_it_drives()
        logger.error("the driver is stuck; this worker transfers nothing more:\n%s", stack)
        self._failure = WorkerStuckError(
            "the connector's driver does not return from a call",
            place=place,
            stuck_after_s=self._stuck_after_s,
        )
        self._is_stopping = True
        self._outbox.break_off(self._failure, may_write=True)

    def _where_it_drives(self) -> tuple[str, str]:
        """Return the line that the driving thread is executing, and its stack."""
        inline = self._datapath.lock.inline_thread
        threads = (t for t in threading.enumerate() if t.native_id == inline)
        thread = next(threads, self._thread) if inline else self._thread
        frame = sys._current_frames().get(thread.ident or 0) if thread is not None else None
        if frame is None:
            return "an unknown place", "its stack is not known"
        *_, last = stack = traceback.extract_stack(frame)
        place = f"{os.path.basename(last.filename)}:{last.lineno} in {last.name}"
        return place, "".join(traceback.format_list(stack)).rstrip()

    def wait(self, timeout_s: float) -> bool:
        """Drive until there is something in the outbox. Returns False if `timeout_s` passed before."""
        until_s = time.monotonic() + timeout_s
        while not self._outbox.is_filled:
            left_s = until_s - time.monotonic()
            if left_s <= 0.0:
                return False
            if not self._run_inline(partial(self._drive, until_s)):
                self._outbox.wait(min(left_s, pacing.LOOK_AGAIN_S))
        return True

    def await_withdrawal(self, request_ids: Sequence[str], timeout_s: float) -> None:
        """Drive, for `timeout_s` at most, until consumers can no longer read the blocks of these withdrawn prompts."""
        driver = self._driver
        assert driver is not None  # the driver got the orders
        producer, until_s = driver.producer, time.monotonic() + timeout_s
        assert producer is not None  # these are its orders
        progress = partial(Driver.progress_inline, limit_s=pacing.WORK_S)
        # a queued order may still grant one
        while driver.num_queued or any(map(producer.holds, request_ids)):
            if time.monotonic() >= until_s:
                logger.debug("withdrawn prompts can be read for longer: %s", request_ids)
                return
            if not self._run_inline(progress):
                time.sleep(pacing.LOOK_AGAIN_S)

    def withdraw_pools(self, timeout_s: float) -> None:
        """Make consumers unmap the caches' memory if it may be replaced, because memory that the engine releases is
        free only once consumers have unmapped it. All transfers have ended before.

        Raises:
            MemoryInUseError: a consumer has not unmapped it within `timeout_s`.
        """
        if not self._datapath.maps_segments:
            return
        until_s = time.monotonic() + timeout_s
        left: list[str] | None = None
        if self._driver is None:
            self._datapath.withdraw()
            left = []

        def look(driver: Driver) -> None:
            nonlocal left
            driver.withdraw_pools()
            driver.progress_inline(pacing.WORK_S)
            left = sorted(driver.links.mappers)

        while left is None or left:
            if time.monotonic() >= until_s or self._is_stopping:
                raise MemoryInUseError(
                    "consumers have not unmapped the caches, so keep their memory",
                    consumers=left or "not known: the driver is busy",
                    timeout_s=timeout_s,
                )
            if not self._run_inline(look) or left:
                time.sleep(pacing.LOOK_AGAIN_S)

    def renew_pools(self) -> None:
        """Let consumers map the caches again, if their memory has changed."""
        if self._driver is None:
            self._datapath.renew()
            return
        until_s = time.monotonic() + RENEW_TIMEOUT_S
        while not self._run_inline(Driver.renew_pools):
            if time.monotonic() >= until_s or self._is_stopping:
                logger.warning("no consumer can read these pools directly: the driver is busy")
                return
            time.sleep(pacing.LOOK_AGAIN_S)

    def in_flight(self) -> tuple[LoadInFlight, ...]:
        """Return the loads that are being read."""
        return () if self._driver is None else self._driver.in_flight()

    def close(self) -> None:
        """Stop the thread and release the resources. May be called again after it has raised.

        Raises:
            MemoryInUseError: the thread did not stop within `CLOSE_TIMEOUT_S`, or could not end what was under way, or
                consumers still map the caches.
        """
        self._stop()
        if self._thread is None:
            return
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            raise MemoryInUseError(
                "the connector's thread did not stop: the caches may still be read and written, so keep their memory",
                timeout_s=CLOSE_TIMEOUT_S,
            )
        if self._in_use is not None:
            raise self._in_use

    def abandon(self) -> None:
        """Close without waiting, because the worker was garbage-collected without `close`. The driver's thread does the
        rest.
        """
        if not self._is_here():
            return
        self._stop()
        warnings.warn(
            f"a kvconnector worker ({self._name}) was not closed: call close(), or use it in a with statement",
            ResourceWarning,
            stacklevel=2,
        )

    def _is_here(self) -> bool:
        """Returns True if it is not closed and belongs to this process: a forked child has no driver's thread."""
        return _held.get(self, (None, None))[0] == os.getpid()

    def _stop(self) -> None:
        self._is_stopping = True
        if self._thread is None:
            self._release()
        else:
            self._datapath.lock.notify()
            self.control.wake()

    def _drive(self, until_s: float, driver: Driver) -> None:
        """Take turns until there is something in the outbox, or `until_s` has passed."""
        while not (self._outbox.is_filled or self._is_stopping):
            left_s = until_s - time.monotonic()
            if left_s <= 0.0:
                break
            driver.turn(left_s, stop_after_report=True)

    def _run_inline(self, drive: Callable[[Driver], None]) -> bool:
        """Let the caller drive in place of the driver's thread. Returns False if that thread is driving."""
        driver, lock = self._driver, self._datapath.lock
        if driver is None or self._is_stopping:
            return False
        try:
            try:
                if not lock.try_acquire():
                    return False
                # no `try` in here: the handlers around it would not catch an interrupt just before that keyword
                if self._context is None:
                    drive(driver)
                else:
                    self._context.run(partial(drive, driver))
            except Exception as error:
                self._fail(error)
            except BaseException as error:
                if lock.is_ours:  # an interrupt may come in the middle of anything
                    self._fail(error)
                raise
            finally:
                if lock.is_ours:
                    self._give_back(driver)
        except BaseException:
            if lock.is_ours:  # an interrupt came just before the release, or within it
                self._give_back(driver)
            raise
        return True

    def _give_back(self, driver: Driver) -> None:
        try:
            self._datapath.release(driver.pump_s(pacing.MAX_SLEEP_S))
        except Exception as error:
            self._fail(error)
            # otherwise no thread could ever acquire it, not even to close
            self._datapath.release(0.0)

    def _run(self, driver: Driver) -> None:
        try:
            if self._context is not None:
                self._context.allow_captures()
            while not self._is_stopping:
                driver.turn(pacing.MAX_SLEEP_S)
            if self._failure is None:
                self._leave(driver)
        except Exception as error:
            self._fail(error)
        if driver.links.mappers:
            self._in_use = MemoryInUseError(
                "consumers have not unmapped the caches, so keep their memory",
                consumers=sorted(driver.links.mappers),
                timeout_s=UNMAP_TIMEOUT_S,
            )
        may_write = False
        try:
            self._release()
        except Exception as error:
            may_write = True
            logger.error("the data path could not be closed", exc_info=error)
            self._in_use = MemoryInUseError(
                "a transfer could not be ended: the caches may still be read and written, so keep their memory:"
                f" {error}"
            )
            self._in_use.__cause__ = error
        finally:
            if self._failure is not None:
                # a bug or a failing machine: the engine must survive, so every request that it waits for ends now,
                # unless copies could not be ended
                self._outbox.break_off(self._failure, may_write=may_write)

    def _leave(self, driver: Driver) -> None:
        """Disconnect, and wait until consumers have unmapped the caches, because CUDA does not allow freeing them
        before.
        """
        driver.links.say_goodbye()
        until_s = time.monotonic() + UNMAP_TIMEOUT_S
        while driver.links.mappers and (left_s := until_s - time.monotonic()) > 0.0:
            driver.turn(left_s)

    def _fail(self, error: BaseException) -> None:
        logger.error("the driver failed; this worker transfers nothing more", exc_info=error)
        self._failure = KVConnectorError(
            f"the connector's driver failed: {error!r}; restart this engine, its log has the traceback"
        )
        self._is_stopping = True

    def _release(self) -> None:
        try:
            self._datapath.close()
        finally:
            self.control.close()
        if self._in_use is None:
            _held.pop(self, None)


@atexit.register
def _close_all() -> None:
    """Close the remaining threads at the interpreter's exit: native code must not run while it ends."""
    left = [each for each in list(_held) if each._is_here()]
    for each in left:
        each._stop()
    until_s = time.monotonic() + CLOSE_TIMEOUT_S
    for each in left:
        if each._thread is not None:
            each._thread.join(max(0.0, until_s - time.monotonic()))
