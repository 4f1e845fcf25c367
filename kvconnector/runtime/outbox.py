"""From the driver's thread to the engine's: which requests are finished, and what it took."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable

from kvconnector.errors import KVConnectorError, LeaseExpiredError, TransferAbortedError
from kvconnector.runtime.doorbell import Doorbell
from kvconnector.session import RequestTrace, TransferStats, WorkerOutput
from kvconnector.session.orders import (
    DropRequest,
    GrowRequest,
    HoldRequest,
    LoadRequest,
    Order,
    WantRequest,
    WithdrawRequest,
)

logger = logging.getLogger(__name__)


class Outbox:
    """Results for the engine's thread: filled by the driver, emptied by `take`. Thread safe.

    It knows what the engine waits for, to end it if the driver fails. `wait` looks on for `spin_s` before it sleeps.
    """

    def __init__(self, spin_s: float = 0.0) -> None:
        self._lock = threading.Lock()
        self._open_loads: dict[str, bool] = {}
        """True if the load was asked for; before that the engine waits until it may."""
        self._open_holds: set[str] = set()
        self._failure: KVConnectorError | None = None
        self._filled = Doorbell(spin_s)
        self._refused_holds: dict[str, KVConnectorError] = {}
        self._filling: dict[str, GrowRequest] = {}
        """Leases on prompts that the engine still computes, whose end is not reported."""
        self._given_up: set[str] = set()
        self._stuck: set[str] = set()
        """Requests whose copies the driver could not end. They never end."""
        self._unreported = WorkerOutput()
        """What has ended since the engine's last step, maybe thousands of requests."""

    def __repr__(self) -> str:
        state = ", broken" if self._failure else ""
        waits = f"{len(self._open_loads)} loads, {len(self._open_holds)} leases awaited"
        filled = "filled" if self.is_filled() else "empty"
        return f"<Outbox {filled}, {waits}{state}>"

    def expect(self, events: Iterable[object]) -> None:
        """The engine waits for these from now on. A refused lease is reported with its reason."""
        with self._lock:
            for event in events:
                if isinstance(event, DropRequest):  # first: an engine may abort thousands at once
                    self._forget_unasked(event.request_id)
                elif isinstance(event, LoadRequest):
                    self._open_loads[event.request_id] = True
                elif isinstance(event, WantRequest) and event.is_followed:
                    self._open_loads[event.request_id] = False
                elif isinstance(event, GrowRequest):
                    self._filling[event.request_id] = event
                elif isinstance(event, HoldRequest | WithdrawRequest):
                    self._filling.pop(event.request_id, None)
                    if isinstance(event, HoldRequest):
                        self._open_holds.add(event.request_id)
                        if event.error is not None:
                            self._refused_holds[event.request_id] = event.error
            failure = self._failure
        if failure is not None:
            self.break_off(failure)

    @property
    def is_waiting(self) -> bool:
        """Returns True while a load has not ended, or may not be asked for yet."""
        return bool(self._open_loads)

    def refuse(self, orders: Iterable[object], error: KVConnectorError) -> None:
        """End the requests of orders that nobody carries out, as far as the engine waits for them."""
        for order in orders:
            if isinstance(order, LoadRequest):
                self.load_ended(order.request_id, error)
            elif isinstance(order, HoldRequest):
                with self._lock:
                    self._refused_holds[order.request_id] = error
                self.released(order.request_id, "aborted")
            elif isinstance(order, WantRequest) and order.is_followed:
                self.begun(order.request_id)

    def give_up(self) -> list[Order]:
        """Return the orders that end every load and lease. What loads bring meanwhile does not count."""
        with self._lock:
            loads = [request_id for request_id, is_asked in self._open_loads.items() if is_asked]
            orders: list[Order] = [DropRequest(request_id) for request_id in loads]
            orders += [WithdrawRequest(request_id) for request_id in self._open_holds]
            for request_id, grown in self._filling.items():
                # only the end of a complete lease is reported, once nothing reads its blocks any more
                names = request_id, grown.transfer_id, grown.secret
                orders.append(HoldRequest(*names, grown.blocks, grown.watermark.num_tokens))
                orders.append(WithdrawRequest(request_id))
            self._given_up |= {*loads, *self._filling}
            self._open_holds |= self._filling.keys()
            self._filling.clear()
        return orders

    def awaited(self) -> list[str]:
        """Requests whose blocks may still be read or written."""
        with self._lock:
            loads = [request_id for request_id, is_asked in self._open_loads.items() if is_asked]
            return sorted({*loads, *self._open_holds, *self._stuck})

    def break_off(self, failure: KVConnectorError, *, may_write: bool = False) -> None:
        """End every request that the engine waits for, now and from now on.

        Where copies under way `may_write` or read blocks, requests that have blocks never end: an engine that took them
        for free would let others write there.
        """
        with self._lock:
            self._failure = failure
            if may_write:
                asked = [
                    request_id for request_id, is_asked in self._open_loads.items() if is_asked
                ]
                self._stuck |= {*asked, *self._open_holds, *self._filling}
                self._open_loads = dict.fromkeys(self._open_loads.keys() - asked, False)
            self._filling.clear()  # nobody else would end them if they were given up
            self._open_holds -= self._stuck
            loads, holds = list(self._open_loads.items()), list(self._open_holds)
        if may_write and self._stuck:
            logger.error(
                "the blocks of these requests may still be read and written, so they never end: %s",
                sorted(self._stuck),
            )
        for request_id, is_asked in loads:
            if is_asked:
                self.load_ended(request_id, failure)
            else:
                self.begun(request_id)
        for request_id in holds:
            self.released(request_id, "aborted")

    def released(self, request_id: str, outcome: str, trace: RequestTrace | None = None) -> None:
        """The producer's blocks of a request are free. `outcome` is a lease's, see `RequestTrace`."""
        with self._lock:
            self._open_holds.discard(request_id)
            error = self._refused_holds.pop(request_id, None)
            if request_id in self._given_up:
                self._given_up.discard(request_id)
                return  # the engine still computes it
            ended = self._unreported
            if error is not None:
                _count(ended.stats.failures, type(error).__name__)
            if outcome == "expired":
                ended.stats.leases_expired += 1
                error = LeaseExpiredError(
                    "the lease ended before every consumer had confirmed its read"
                )
            if error is not None:
                ended.failed_sending[request_id] = _text(error)
            if trace is not None:
                ended.stats.traces.append(trace)
            ended.finished_sending.add(request_id)
        self._filled.ring()

    def begun(self, request_id: str) -> None:
        """The producer has begun with a request, or never will: it is time to ask for the load."""
        with self._lock:
            self._forget_unasked(request_id)
            self._unreported.begun.add(request_id)
        self._filled.ring()

    def read_packed(self, reason: str) -> None:
        """A producer rank was greeted whose pools cannot be read from here. The engine need not wake for it."""
        with self._lock:
            _count(self._unreported.stats.packed, reason)

    def load_ended(
        self,
        request_id: str,
        error: KVConnectorError | None = None,
        trace: RequestTrace | None = None,
        moved: TransferStats | None = None,
        *,
        filled_tokens: int | None = None,
        extra: bytes = b"",
    ) -> None:
        """The consumer's blocks of a request are filled; or, for an `error`, will not be, and nothing writes them. The
        first `filled_tokens` tokens are in them then, if that is known. `extra`: see `Progress`.
        """
        with self._lock:
            self._open_loads.pop(request_id, None)
            if request_id in self._given_up:
                self._given_up.discard(request_id)
                error = error or TransferAbortedError("the engine gave up its loads")
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
            if moved is not None:
                ended.stats.transfers.append(moved)
            ended.finished_recving.add(request_id)
        self._filled.ring()

    def is_filled(self) -> bool:
        """Returns True if there is something to take."""
        return self._filled.is_rung

    def wait(self, timeout_s: float) -> bool:
        """Wait until there is something to take. Returns False if `timeout_s` passed before."""
        return self._filled.wait(timeout_s)

    def take(self) -> WorkerOutput:
        """Everything since the last call."""
        if not self._filled.is_rung:
            return WorkerOutput()
        with self._lock:
            self._filled.clear()
            ended, self._unreported = self._unreported, WorkerOutput()
        return ended

    def _forget_unasked(self, request_id: str) -> None:
        if not self._open_loads.get(request_id, True):
            del self._open_loads[request_id]


def _count(times: dict[str, int], reason: str) -> None:
    times[reason] = times.get(reason, 0) + 1


def _text(error: KVConnectorError) -> str:
    return f"{type(error).__name__}: {error}"
