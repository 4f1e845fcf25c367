"""From the driver's thread to the engine's: which requests are finished, and how long they took."""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Iterable

import numpy as np
from msgspec.structs import replace

from kvconnector.errors import (
    KVConnectorError,
    LeaseExpiredError,
    LocalProtocolError,
    TransferAbortedError,
)
from kvconnector.folded_log import FoldedLog
from kvconnector.session import RequestTrace, WorkerOutput
from kvconnector.session.orders import (
    DropRequest,
    GrowRequest,
    HoldRequest,
    LeaseOrder,
    LoadRequest,
    Order,
    ProducerOrder,
    ReclaimRequest,
    WantRequest,
    WithdrawRequest,
)
from kvconnector_kernels.pump.flag import wait_flag

logger = logging.getLogger(__name__)

MIN_SPIN_S = 1e-3
"""A shorter spin is not worth a call."""


class Outbox:
    """Results for the engine's thread: filled by the driver, emptied by `take`. Thread safe.

    It knows which requests the engine waits for, to end them if the driver fails. `wait` spins for `spin_s` first.
    """

    def __init__(self, spin_s: float = 0.0) -> None:
        self.is_filled = False
        """`take` would return something that the engine waits for."""
        self.num_reports = 0
        """Ends and starts of requests that were reported so far."""
        self._bell = threading.Lock()
        """Acquired by `wait`, released by a report: an Event would take several locks in Python at each of them."""
        self._flag = np.zeros(1, np.int32)
        """1 while it is filled, for a thread that spins."""
        self._spin_s = spin_s if spin_s >= MIN_SPIN_S else 0.0
        self._lock = threading.RLock()
        self._bugs = FoldedLog(logger)
        self._bugs_lock = threading.Lock()
        """For `_bugs`, so that nobody waits for a log with the other lock held."""
        self._loads: dict[str, bool] = {}
        """Loads that the engine waits for. True if it has asked for the load, False while it waits until it may."""
        self._leases: dict[str, LeaseOrder] = {}
        """Leases that have not ended, as last ordered. Only the end of a complete one is reported."""
        self._failure: KVConnectorError | None = None
        self._given_up: set[str] = set()
        self._stuck_loads: set[str] = set()
        self._stuck_leases: dict[str, LeaseOrder] = {}
        """Requests whose blocks may be read and written although the driver has failed."""
        self._unreported = WorkerOutput()
        """The requests that ended since the engine's last step, maybe thousands."""

    def __repr__(self) -> str:
        state = ", broken" if self._failure else ""
        waits = f"{len(self._loads)} loads, {len(self._leases)} leases awaited"
        filled = "filled" if self.is_filled else "empty"
        return f"<Outbox {filled}, {waits}{state}>"

    def expect(self, orders: Iterable[Order]) -> list[str]:
        """Record that the engine waits for these from now on. A refused lease is reported with its reason.

        Returns:
            The requests that the orders withdraw while they are computed: the engine fills their blocks anew at once.
        """
        withdrawn = []
        with self._lock:
            for order in orders:
                if isinstance(order, DropRequest):  # first: an engine may abort thousands at once
                    self._forget_unasked(order.request_id)
                elif isinstance(order, LoadRequest):
                    self._loads[order.request_id] = True
                elif isinstance(order, WantRequest):
                    if order.is_followed:
                        self._loads[order.request_id] = False
                elif self._expect_lease(order):
                    withdrawn.append(order.request_id)
            if self._failure is not None:
                self._end_all(self._failure)
        return withdrawn

    @property
    def is_waiting(self) -> bool:
        """Returns True while a load has not ended, or may not be requested yet."""
        return bool(self._loads)

    def refuse(self, orders: Iterable[object], error: KVConnectorError) -> None:
        """End the requests of orders that the driver does not get, if the engine waits for them."""
        for order in orders:
            if isinstance(order, LoadRequest):
                self.load_ended(order.request_id, error)
            elif isinstance(order, HoldRequest):
                with self._lock:
                    self._leases[order.request_id] = replace(order, error=error)
                self.released(order.request_id, "aborted")
            elif isinstance(order, WantRequest) and order.is_followed:
                self.producer_started(order.request_id)

    def give_up(self) -> list[Order]:
        """Return the orders that end every load, and every lease on blocks. A load that completes meanwhile is reported
        as failed, as is one whose end was not taken yet: otherwise the engine would use its tokens.
        """
        with self._lock:
            ended = self._unreported
            for request_id in ended.finished_recving - ended.failed_recving.keys():
                ended.failed_recving[request_id] = _text(_lost())
                _count(ended.stats.failures, TransferAbortedError.__name__)
            ended.extras.clear()
            ended.filled_tokens.clear()
            loads = self._asked()
            self._given_up |= {*loads}
            orders: list[Order] = [DropRequest(request_id) for request_id in loads]
            for request_id, lease in self._leases.items():
                if not _has_blocks(lease):
                    continue  # a prompt that is queued: its followers wait for it
                if isinstance(lease, GrowRequest):
                    # only the end of a complete lease is reported, once nothing reads its blocks any more
                    names = request_id, lease.transfer_id, lease.secret
                    complete = HoldRequest(*names, lease.blocks, lease.watermark.num_tokens)
                    self._leases[request_id] = complete
                    self._given_up.add(request_id)
                    orders.append(complete)
                orders.append(WithdrawRequest(request_id))
        return orders

    def awaited(self) -> list[str]:
        """Return requests whose blocks may still be read or written."""
        with self._lock:
            leases = (name for name, lease in self._leases.items() if _has_blocks(lease))
            return sorted({*self._asked(), *leases, *self._stuck_loads, *self._stuck_leases})

    def break_off(self, failure: KVConnectorError, *, may_write: bool = False) -> None:
        """End every request that the engine waits for, now and from now on: once, although two threads may call this.

        If copies under way `may_write` or read blocks, requests that have blocks do not end: the engine would give the
        blocks to other requests. They end with a later call, without it, or one by one, as the driver reports. Until
        then they count as one failure.
        """
        with self._lock:
            self._failure = failure
            if not may_write:
                self._loads |= dict.fromkeys(self._stuck_loads, True)
                self._leases = self._stuck_leases | self._leases
                self._stuck_loads, self._stuck_leases = set(), {}
            else:
                self._stuck_loads |= {*self._asked()}
                self._stuck_leases |= self._leases
                self._loads = {
                    name: False for name, is_asked in self._loads.items() if not is_asked
                }
                if stuck := sorted({*self._stuck_loads, *self._stuck_leases}):
                    # none of them ends, so that nothing else would count
                    _count(self._unreported.stats.failures, type(failure).__name__)
                    self._ring()
                    logger.error(
                        "the blocks of these requests may still be read and written, so they do not end: %s",
                        stuck,
                    )
            self._end_all(failure)

    def _end_all(self, failure: KVConnectorError) -> None:
        """End the requests that are not stuck. The lock is held."""
        # a prompt that was computed to its end meanwhile
        self._stuck_leases |= {r: self._leases[r] for r in self._stuck_leases.keys() & self._leases}
        # leases that grow are dropped, too: no end of theirs would be reported if they were given up
        holds = {r for r in self._leases if self._is_complete(r)} - self._stuck_leases.keys()
        self._leases = {r: replace(self._leases[r], error=failure) for r in holds}
        for request_id, is_asked in list(self._loads.items()):
            if is_asked:
                self.load_ended(request_id, failure)
            else:
                self.producer_started(request_id)
        for request_id in holds:
            self.released(request_id, "aborted")

    def released(
        self,
        request_id: str,
        outcome: str,
        trace: RequestTrace | None = None,
        error: KVConnectorError | None = None,
    ) -> None:
        """Report that the producer's blocks of a request are free. `outcome` is a lease's, see `RequestTrace`; `error`
        is the reason if it is not "released".
        """
        with self._lock:
            lease = self._leases.pop(request_id, None) or self._stuck_leases.pop(request_id, None)
            if request_id in self._given_up:
                self._given_up.discard(request_id)
                return  # the engine still computes the request
            ended = self._unreported
            if outcome == "expired":
                if error is None:
                    ended.stats.leases_expired += 1
                    error = LeaseExpiredError(
                        "the lease ended before every consumer had confirmed its read"
                    )
                else:  # the pool was full
                    _count(ended.stats.failures, type(error).__name__)
                ended.failed_sending[request_id] = _text(error)
            elif lease is not None and (error := lease.error or error) is not None:
                ended.failed_sending[request_id] = _text(error)
                if not isinstance(error, TransferAbortedError):  # somebody wanted that
                    _count(ended.stats.failures, type(error).__name__)
            if trace is not None:
                ended.stats.traces.append(trace)
            ended.finished_sending.add(request_id)
            self._ring()

    def producer_started(self, request_id: str) -> None:
        """Report that the producer has started a request, or never will: the engine should ask for the load."""
        with self._lock:
            self._forget_unasked(request_id)
            self._unreported.producer_started.add(request_id)
            self._ring()

    def note_contained(self, subject: str, error: Exception) -> None:
        """Log and count an exception that ended only `subject`. Refusals by one of our own errors are no bugs: whoever
        they concern is told.
        """
        if isinstance(error, KVConnectorError) and not isinstance(error, LocalProtocolError):
            logger.debug("%s ends: %s", subject, error)
            return
        with self._lock:
            _count(self._unreported.stats.contained, type(error).__name__)
            self._ring()
        # many bugs are one bug many times: the traceback is the same
        place = _place_of(error)
        with self._bugs_lock:
            self._bugs.warn(
                f"{type(error).__name__} at {place}",
                f"{subject} was ended by an unexpected exception at {place}, and nothing else; this is a bug, please"
                f" report it:\n{''.join(traceback.format_exception(error)).rstrip()}",
            )

    def read_packed(self, reason: str) -> None:
        """Count a producer rank whose pools cannot be read from here. This wakes no thread."""
        with self._lock:
            _count(self._unreported.stats.packed, reason)

    def load_ended(
        self,
        request_id: str,
        error: KVConnectorError | None = None,
        trace: RequestTrace | None = None,
        *,
        filled_tokens: int | None = None,
        extra: bytes = b"",
    ) -> None:
        """Report that the consumer's blocks of a request are filled. With an `error` they are not: nothing writes them
        any more, and they hold the first `filled_tokens` tokens, if that is known. `extra`: see `Progress`.
        """
        with self._lock:
            self._loads.pop(request_id, None)
            self._stuck_loads.discard(request_id)
            if request_id in self._given_up:
                self._given_up.discard(request_id)
                error = error or _lost()
                filled_tokens = None
            ended = self._unreported
            if error is not None:
                ended.failed_recving[request_id] = _text(error)
                if filled_tokens is not None:
                    ended.filled_tokens[request_id] = filled_tokens
                _count(ended.stats.failures, type(error).__name__)
            elif extra:
                ended.extras[request_id] = extra
            if trace is not None:
                ended.stats.traces.append(trace)
            ended.finished_recving.add(request_id)
            self._ring()

    def take(self) -> WorkerOutput:
        """Return all results since the last call."""
        if not self.is_filled:
            return WorkerOutput()
        with self._lock:
            self.is_filled = False
            self._flag[0] = 0
            ended, self._unreported = self._unreported, WorkerOutput()
        return ended

    def wait(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` for something to `take`. Returns True if there is. Of several threads that wait, a
        report wakes one.
        """
        until_s = time.monotonic() + timeout_s
        if self._spin_s and not self.is_filled:
            wait_flag(self._flag.ctypes.data, min(self._spin_s, timeout_s))
        while not self.is_filled:
            if not self._bell.acquire(timeout=max(0.0, until_s - time.monotonic())):
                break
        return self.is_filled

    def _ring(self) -> None:
        """Wake a thread in `wait`. The lock is held."""
        self.is_filled = True
        self._flag[0] = 1
        self.num_reports += 1
        if self._bell.locked():
            self._bell.release()

    def _expect_lease(self, order: ProducerOrder) -> bool:
        """Returns True if the order withdraws an incomplete lease on blocks."""
        if isinstance(order, ReclaimRequest):
            return False  # if it ends a lease, that is reported
        # a complete lease lasts until its end is reported
        if isinstance(order, HoldRequest) or not self._is_complete(order.request_id):
            if isinstance(order, WithdrawRequest):
                lease = self._leases.pop(order.request_id, None)
                return lease is not None and _has_blocks(lease)
            self._leases[order.request_id] = order
        return False

    def _asked(self) -> list[str]:
        return [request_id for request_id, is_asked in self._loads.items() if is_asked]

    def _is_complete(self, request_id: str) -> bool:
        return isinstance(self._leases.get(request_id), HoldRequest)

    def _forget_unasked(self, request_id: str) -> None:
        if not self._loads.get(request_id, True):
            del self._loads[request_id]


def _has_blocks(lease: LeaseOrder) -> bool:
    return any(group.num_blocks for group in lease.blocks)


def _lost() -> TransferAbortedError:
    return TransferAbortedError("the engine gave up its loads")


def _place_of(error: Exception) -> str:
    """Return the line in which an exception was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "an unknown place"


def _count(times: dict[str, int], reason: str) -> None:
    times[reason] = times.get(reason, 0) + 1


def _text(error: KVConnectorError) -> str:
    return f"{type(error).__name__}: {error}"
