"""From the driver's thread to the engine's: which requests are finished, and what it took."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from kvconnector.errors import KVConnectorError
from kvconnector.runtime.doorbell import Doorbell
from kvconnector.session import RequestTrace, TransferStats, WorkerOutput, WorkerStats
from kvconnector.session.orders import DropRequest, HoldRequest, LoadRequest, WantRequest


class Outbox:
    """What the engine's thread will take: filled by the driver, emptied by `take`. Thread safe.

    It knows which requests the engine waits for, so that all of them can be ended if the driver fails. `spin_s`: how
    long `wait` looks on before it sleeps.
    """

    def __init__(self, spin_s: float = 0.0) -> None:
        self._lock = threading.Lock()
        self._open_loads: dict[str, bool] = {}
        """Whether a load was asked for; before that the engine waits until it may."""
        self._open_holds: set[str] = set()
        self._failure: KVConnectorError | None = None
        self._filled = Doorbell(spin_s)
        self._sent: set[str] = set()
        self._received: set[str] = set()
        self._begun: set[str] = set()
        self._failed: dict[str, str] = {}
        self._refused_holds: dict[str, KVConnectorError] = {}
        self._failed_sending: dict[str, str] = {}
        self._transfers: list[TransferStats] = []
        self._failures: dict[str, int] = {}
        self._expired = 0
        self._traces: list[RequestTrace] = []

    def expect(self, events: Iterable[object]) -> None:
        """The engine waits for these loads, leases and prompts from now on; a refused lease is reported with its
        reason.
        """
        with self._lock:
            for event in events:
                if isinstance(event, LoadRequest):
                    self._open_loads[event.request_id] = True
                elif isinstance(event, WantRequest) and event.is_followed:
                    self._open_loads[event.request_id] = False
                elif isinstance(event, DropRequest):
                    self._forget_unasked(event.request_id)
                elif isinstance(event, HoldRequest) and event.is_complete:
                    self._open_holds.add(event.request_id)
                    if event.error is not None:
                        self._refused_holds[event.request_id] = event.error
            failure = self._failure
        if failure is not None:
            self.break_off(failure)

    def break_off(self, failure: KVConnectorError) -> None:
        """End every request that the engine waits for, now and from now on."""
        with self._lock:
            self._failure = failure
            loads, holds = list(self._open_loads.items()), list(self._open_holds)
        for request_id, is_asked in loads:
            if is_asked:
                self.failed(request_id, failure)
            else:
                self.begun(request_id)
        for request_id in holds:
            self.released(request_id, "aborted")

    def released(self, request_id: str, outcome: str) -> None:
        """The producer's blocks of a request are free."""
        with self._lock:
            self._open_holds.discard(request_id)
            self._sent.add(request_id)
            self._expired += outcome == "expired"
            error = self._refused_holds.pop(request_id, None)
            if error is not None:
                self._failed_sending[request_id] = _text(error)
                self._count(error)
        self._filled.ring()

    def begun(self, request_id: str) -> None:
        """The producer has begun with a request, or never will: it is time to ask for the load."""
        with self._lock:
            self._forget_unasked(request_id)
            self._begun.add(request_id)
        self._filled.ring()

    def loaded(self, request_id: str, stats: TransferStats | None) -> None:
        """The consumer's blocks of a request are filled."""
        with self._lock:
            self._open_loads.pop(request_id, None)
            self._received.add(request_id)
            if stats is not None:
                self._transfers.append(stats)
        self._filled.ring()

    def traced(self, trace: RequestTrace) -> None:
        """When the parts of a transfer happened. Nobody waits for it."""
        with self._lock:
            self._traces.append(trace)

    def failed(self, request_id: str, error: KVConnectorError) -> None:
        """The consumer's blocks of a request will not be filled; nothing writes them."""
        with self._lock:
            self._open_loads.pop(request_id, None)
            self._received.add(request_id)
            self._failed[request_id] = _text(error)
            self._count(error)
        self._filled.ring()

    def is_filled(self) -> bool:
        """Whether there is something to take."""
        return self._filled.is_rung

    def wait(self, timeout_s: float) -> bool:
        """Whether there is something to take, after waiting for it."""
        return self._filled.wait(timeout_s)

    def take(self) -> WorkerOutput:
        """Everything since the last call."""
        with self._lock:
            self._filled.clear()
            output = WorkerOutput(
                finished_sending=frozenset(self._sent),
                finished_recving=frozenset(self._received),
                begun=frozenset(self._begun),
                failed_recving=self._failed,
                failed_sending=self._failed_sending,
                stats=WorkerStats(
                    transfers=tuple(self._transfers),
                    failures=self._failures,
                    leases_expired=self._expired,
                    traces=tuple(self._traces),
                ),
            )
            self._sent, self._received, self._begun = set(), set(), set()
            self._failed, self._failed_sending = {}, {}
            self._transfers, self._failures, self._expired, self._traces = [], {}, 0, []
        return output

    def _forget_unasked(self, request_id: str) -> None:
        if not self._open_loads.get(request_id, True):
            del self._open_loads[request_id]

    def _count(self, error: KVConnectorError) -> None:
        name = type(error).__name__
        self._failures[name] = self._failures.get(name, 0) + 1


def _text(error: KVConnectorError) -> str:
    return f"{type(error).__name__}: {error}"
