"""An engine's main loop around one worker: a step's work, `start_step`, `poll`, and how long each takes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Literal

import msgspec

from kvconnector.bench.contract import TIMEOUT_S
from kvconnector.errors import ConfigError, KVConnectorError, TransferTimeoutError
from kvconnector.runtime import StepMetadata, Worker, WorkerOutput

LoadName = Literal["idle", "torch", "python", "decode"]
"""What the engine's main thread does: nothing, small torch operations, pure Python, or a decode step's GPU kernels."""
LAYERS = 32
"""Layers of a step of small torch operations; each is four of them."""
PYTHON_ITERATIONS = 20_000
# What a step of the decode-like load reads, 2 + 1 GiB of bfloat16: matrices, and caches of keys and of values that are
# layers x (sequences x heads) x tokens x elements.
WEIGHTS = (16, 8192, 8192)
CACHES = (8, 256, 1024, 128)
BATCH = 8


class Drive(msgspec.Struct, frozen=True, kw_only=True):
    """Run the loop beside `steps`, one a request, until all are over and `min_s` has passed.

    `one_by_one`: each when the one before is over; else one in each turn of the loop.
    """

    load: LoadName
    request_ids: list[str]
    steps: list[StepMetadata]
    one_by_one: bool
    min_s: float


class Driven(msgspec.Struct, kw_only=True):
    """What the loop took. One a request: `request_s`, from `start_step` until the engine's thread saw the end, and
    `chunks_s`, what the data path took of it. `start_step_s` and `poll_s` are the seconds of all calls together.
    """

    request_s: list[float] = []
    chunks_s: list[float] = []
    paths: set[str] = set()
    num_steps: int = 0
    loop_s: float = 0.0
    start_step_s: float = 0.0
    poll_s: float = 0.0


class EngineLoop:
    """One run of the loop. `step` is None for an engine that only waits for its transfers."""

    def __init__(self, worker: Worker, order: Drive, step: Callable[[], None] | None) -> None:
        self._worker = worker
        self._order = order
        self._step = step
        self._pending = deque(zip(order.request_ids, order.steps, strict=True))
        self._open_since_s: dict[str, float] = {}
        self._driven = Driven()

    def run(self) -> Driven:
        """Until every request is over and `min_s` has passed.

        Raises:
            KVConnectorError: a load failed. TransferTimeoutError: no request ended within the timeout.
        """
        order, driven = self._order, self._driven
        began_s = progressed_s = time.perf_counter()
        while self._is_busy() or time.perf_counter() - began_s < order.min_s:
            if self._pending and not (order.one_by_one and self._open_since_s):
                self._start(*self._pending.popleft())
            if self._step is not None:
                self._step()
                driven.num_steps += 1
            elif not self._pending or order.one_by_one:
                self._worker.wait(TIMEOUT_S if self._is_busy() else order.min_s)
            polled_s = time.perf_counter()
            output = self._worker.poll()
            now_s = time.perf_counter()
            driven.poll_s += now_s - polled_s
            if not output.is_empty:
                progressed_s = now_s
                self._record(output, now_s)
            elif self._is_busy() and now_s - progressed_s > TIMEOUT_S:
                raise TransferTimeoutError("no request ended", open=list(self._open_since_s))
        driven.loop_s = time.perf_counter() - began_s
        return driven

    def _is_busy(self) -> bool:
        return bool(self._pending or self._open_since_s)

    def _start(self, request_id: str, step: StepMetadata) -> None:
        started_s = time.perf_counter()
        self._worker.start_step(step)
        self._driven.start_step_s += time.perf_counter() - started_s
        self._open_since_s[request_id] = started_s

    def _record(self, output: WorkerOutput, now_s: float) -> None:
        if output.failed_recving:
            raise KVConnectorError("loads failed", reasons=output.failed_recving)
        for request_id in output.finished_recving | output.finished_sending:
            if request_id in self._open_since_s:
                self._driven.request_s.append(now_s - self._open_since_s.pop(request_id))
        for transfer in output.stats.transfers:
            self._driven.chunks_s.append(transfer.seconds)
            self._driven.paths.add(transfer.path)


def make_step(name: LoadName, device: str) -> Callable[[], None] | None:
    """A function that runs one step and returns when it is over; None for an engine that has nothing to do.

    Raises:
        ConfigError: the load does not run on this device.
    """
    if name == "idle":
        return None
    if name == "python":
        return _python_step
    return _torch_step(device) if name == "torch" else _decode_step(device)


def _python_step() -> None:
    """About a millisecond of interpreted code, which gives the GIL up only when it is made to."""
    total = 0
    for value in range(PYTHON_ITERATIONS):
        total += value & 7


def _torch_step(device: str) -> Callable[[], None]:
    """Many small operations, as a decode step without CUDA graphs launches them, and a wait for their result."""
    import torch

    hidden = torch.ones((BATCH, 256), device=device)
    weight = torch.full((256, 256), 1 / 256, device=device)

    def step() -> None:
        state = hidden
        for _ in range(LAYERS):
            state = torch.tanh(state @ weight) * 0.5 + hidden
        if device != "cpu":
            torch.cuda.current_stream(device).synchronize()

    return step


def _decode_step(device: str) -> Callable[[], None]:
    """Memory-bound kernels in one CUDA graph: reading weights for a small batch, and attention over long caches."""
    if device == "cpu":
        raise ConfigError("the decode load is made of GPU kernels", device=device)
    import torch

    def filled(*shape: int) -> torch.Tensor:
        return torch.full(shape, 1e-2, dtype=torch.bfloat16, device=device)

    weights = [filled(*WEIGHTS[1:]) for _ in range(WEIGHTS[0])]
    caches = [(filled(*CACHES[1:]), filled(*CACHES[1:])) for _ in range(CACHES[0])]
    hidden = filled(BATCH, WEIGHTS[1])
    query = filled(CACHES[1], 1, CACHES[3])

    def kernels() -> None:
        for weight in weights:
            torch.mm(hidden, weight)
        for keys, values in caches:
            scores = torch.bmm(query, keys.transpose(1, 2))
            torch.bmm(torch.softmax(scores, dim=-1), values)

    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            kernels()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kernels()

    def step() -> None:
        graph.replay()
        torch.cuda.current_stream(device).synchronize()

    return step
