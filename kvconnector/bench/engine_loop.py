"""An engine's main loop around one worker: a step's work, `start_step`, `poll`, and how long each takes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from kvconnector.bench.messages import Drive, Driven
from kvconnector.errors import KVConnectorError, TransferTimeoutError
from kvconnector.runtime import StepMetadata, Worker, WorkerOutput


class EngineLoop:
    """One run of the loop. `step` is None for an engine that only waits for its transfers."""

    def __init__(
        self, worker: Worker, request: Drive, step: Callable[[], None] | None, timeout_s: float
    ) -> None:
        self._worker = worker
        self._pending: deque[tuple[str, StepMetadata]] = deque(
            zip(request.request_ids, request.steps, strict=True)
        )
        self._one_by_one = request.one_by_one
        self._min_s = request.min_s
        self._step = step
        self._timeout_s = timeout_s
        self._open_since_s: dict[str, float] = {}
        self._request_s: list[float] = []
        self._chunks_s: list[float] = []
        self._paths: set[str] = set()
        self._start_step_s = self._poll_s = 0.0
        self._num_steps = 0

    def run(self) -> Driven:
        """Until every request is over and `min_s` has passed.

        Raises:
            KVConnectorError: a load failed. TransferTimeoutError: no request ended within the timeout.
        """
        began_s = self._progressed_s = time.perf_counter()
        while self._is_busy() or time.perf_counter() - began_s < self._min_s:
            if self._pending and not (self._one_by_one and self._open_since_s):
                self._start(*self._pending.popleft())
            if self._step is not None:
                self._step()
                self._num_steps += 1
            elif not self._pending or self._one_by_one:
                self._worker.wait(self._timeout_s if self._is_busy() else self._min_s)
            self._poll()
        return Driven(
            request_s=tuple(self._request_s),
            chunks_s=tuple(self._chunks_s),
            path="+".join(sorted(self._paths)),
            num_steps=self._num_steps,
            loop_s=time.perf_counter() - began_s,
            start_step_s=self._start_step_s,
            poll_s=self._poll_s,
        )

    def _is_busy(self) -> bool:
        return bool(self._pending or self._open_since_s)

    def _start(self, request_id: str, step: StepMetadata) -> None:
        started_s = time.perf_counter()
        self._worker.start_step(step)
        self._start_step_s += time.perf_counter() - started_s
        self._open_since_s[request_id] = started_s

    def _poll(self) -> None:
        began_s = time.perf_counter()
        output = self._worker.poll()
        ended_s = time.perf_counter()
        self._poll_s += ended_s - began_s
        if output.is_empty:
            if self._is_busy() and ended_s - self._progressed_s > self._timeout_s:
                raise TransferTimeoutError(
                    "no request ended in time", open=list(self._open_since_s)
                )
            return
        self._progressed_s = ended_s
        self._take(output, ended_s)

    def _take(self, output: WorkerOutput, now_s: float) -> None:
        if output.failed_recving:
            raise KVConnectorError("loads failed", reasons=output.failed_recving)
        for request_id in output.finished_recving | output.finished_sending:
            if request_id in self._open_since_s:
                self._request_s.append(now_s - self._open_since_s.pop(request_id))
        for transfer in output.stats.transfers:
            self._chunks_s.append(transfer.seconds)
            self._paths.add(transfer.path)
