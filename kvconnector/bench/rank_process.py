"""One rank of one engine in a process of its own: `python -m kvconnector.bench.rank_process FD OPTIONS`.

The parent plays both engines' schedulers and the router. It calls the public methods of `RankProcess` by name, with
msgpack on a pipe; their annotations say what the bytes are.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from kvconnector.bench.contract import SEED, TIMEOUT_S
from kvconnector.bench.engine_loop import Drive, Driven, EngineLoop, LoadName, make_step
from kvconnector.bench.nixl import AgentOpened, NixlAgent
from kvconnector.bench.pools import RankPools
from kvconnector.bench.shapes import EngineShape, ModelShape
from kvconnector.config import ConnectorConfig
from kvconnector.errors import KVConnectorError, LocalProtocolError, TransferTimeoutError
from kvconnector.ids import Rank
from kvconnector.runtime import StepMetadata, Worker, WorkerMetadata, WorkerOutput
from kvconnector.runtime.steps import HoldRequest

ROUTER_HOP_S = 2e-3
"""From a producer's answer to a consumer's request for its blocks; no part of any time that is reported."""


class RankOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Which rank a process is."""

    model: ModelShape
    shape: EngineShape
    rank: Rank
    num_blocks: int
    device: str


class Started(msgspec.Struct, frozen=True):
    """A worker's metadata, its data path, and what it warned of when it started."""

    metadata: WorkerMetadata
    data_path: str
    warnings: list[str]


class Stepped(msgspec.Struct, frozen=True):
    """When the step was taken and when the engine's thread saw the report: seconds of the host's monotonic clock.

    `path`: how a load came, see `TransferStats`.
    """

    started_s: float
    ended_s: float
    path: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A method raised."""

    text: str


class RankProcess:
    """A rank's pools, and a worker or a peer's agent over them. One call at a time, as from an engine's thread."""

    def __init__(self, options: RankOptions) -> None:
        self._options = options
        self._pools = RankPools(
            options.model,
            options.shape,
            options.rank,
            num_blocks=options.num_blocks,
            device=options.device,
        )
        self._worker: Worker | None = None
        self._agent: NixlAgent | None = None
        self._loads: dict[LoadName, Callable[[], None] | None] = {}

    def ready(self) -> None:
        """Answers once the pools are there."""

    def close(self) -> None:
        """Release everything."""
        for each in (self._worker, self._agent):
            if each is not None:
                each.close()

    def start_worker(self, config: ConnectorConfig) -> Started:
        """Register the pools with a worker of this configuration."""
        warnings = _Warnings()
        logging.getLogger("kvconnector").addHandler(warnings)
        model = self._options.model.description()
        self._worker = Worker(config, rank=self._options.rank, model=model)
        self._worker.register([self._pools.cache_group()])
        return Started(self._worker.handshake(), self._worker.data_path, warnings.unique())

    def write(self, block_ids: list[int], num_tokens: int) -> None:
        """Put the sequence into these blocks."""
        self._pools.write(SEED, block_ids, num_tokens)
        self._settle()

    def poison(self) -> None:
        """Fill the pools with poison."""
        self._pools.poison()
        self._settle()

    def mismatch(self, block_ids: list[int], num_tokens: int) -> str:
        """Compare these blocks with the sequence and all others with poison; empty if all is well."""
        self._settle()
        return self._pools.mismatch(SEED, block_ids, num_tokens)

    def step(self, step: StepMetadata, received: str, released: str) -> Stepped:
        """Start a step; wait for the report of the request that is named, if any.

        Raises:
            KVConnectorError: the load failed. TransferTimeoutError: it was not reported in time.
        """
        worker = self._started()
        started_s = time.perf_counter()
        worker.start_step(step)
        if any(isinstance(order, HoldRequest) for order in step.orders):
            # A consumer hears of a request through a router: the producer has been at its next step for a while.
            worker.wait(ROUTER_HOP_S)
        path = self._await(worker, received, released) if received or released else ""
        return Stepped(started_s, time.perf_counter(), path)

    def turn(self, step: StepMetadata, wait_s: float) -> WorkerOutput:
        """One turn of an engine's loop, whose model runs for at most so long."""
        worker = self._started()
        worker.start_step(step)
        worker.wait(wait_s)
        return worker.poll()

    def usage(self) -> tuple[float, int, int]:
        """Resident MiB, open descriptors and threads of this process."""
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        descriptors, threads = (len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task"))
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20, descriptors, threads

    def drive(self, order: Drive) -> Driven:
        """Run an engine's main loop beside a load, see `EngineLoop`."""
        if order.load not in self._loads:
            self._loads[order.load] = make_step(order.load, self._options.device)
        return EngineLoop(self._started(), order, self._loads[order.load]).run()

    def open_agent(self, num_threads: int) -> AgentOpened:
        """Register the pools with an agent of NIXL's."""
        self._agent = NixlAgent(self._pools, num_threads)
        return self._agent.opened()

    def join_agent(self, peer: AgentOpened) -> None:
        """Connect to the other engine's agent, and prepare what can be prepared."""
        self._joined().join(peer)

    def read_blocks(self, remote: list[int], local: list[int]) -> tuple[float, float]:
        """Read blocks by NIXL: seconds with and without making the request."""
        return self._joined().read(remote, local)

    def _await(self, worker: Worker, received: str, released: str) -> str:
        """Until the worker reports the request; the path of a load."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            output = worker.poll()
            if reason := output.failed_recving.get(received):
                raise KVConnectorError(f"the load failed: {reason}", request=received)
            if received in output.finished_recving:
                return "+".join(each.path for each in output.stats.transfers)
            if released in output.finished_sending:
                return ""
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TransferTimeoutError(
                    "the worker did not report a request", received=received, released=released
                )
            worker.wait(left_s)

    def _settle(self) -> None:
        """What this process wrote is complete before anybody else reads it."""
        if self._options.device != "cpu":
            import torch

            torch.cuda.synchronize(self._options.device)

    def _started(self) -> Worker:
        if self._worker is None:
            raise LocalProtocolError("there is no worker yet")
        return self._worker

    def _joined(self) -> NixlAgent:
        if self._agent is None:
            raise LocalProtocolError("there is no agent yet")
        return self._agent


class _Warnings(logging.Handler):
    """Keeps what is warned of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        self._texts.append(record.getMessage())

    def unique(self) -> list[str]:
        return list(dict.fromkeys(self._texts))


def serve(connection: Connection, rank: RankProcess) -> None:
    """Answer calls until the parent closes the connection or is gone."""
    while True:
        try:
            request = connection.recv_bytes()
        except (EOFError, OSError):
            return
        try:
            answer: Any = (_call(rank, request),)
        except KVConnectorError as error:
            answer = Failed(f"{type(error).__name__}: {error}")
        except Exception as error:
            # Whatever it was, the parent must hear of it rather than wait.
            answer = Failed("".join(traceback.format_exception(error)))
        connection.send_bytes(msgspec.msgpack.encode(answer))


def _call(rank: RankProcess, request: bytes) -> Any:
    name, arguments = msgspec.msgpack.decode(request, type=tuple[str, list[msgspec.Raw]])
    method = getattr(rank, name)
    hints = get_type_hints(method)
    parameters = inspect.signature(method).parameters
    return method(
        *(
            msgspec.msgpack.decode(argument, type=hints[parameter])
            for parameter, argument in zip(parameters, arguments, strict=True)
        )
    )


def _main(fd: str, options: str) -> None:
    rank = RankProcess(msgspec.json.decode(options, type=RankOptions))
    with Connection(int(fd)) as connection:
        try:
            serve(connection, rank)
        finally:
            rank.close()


if __name__ == "__main__":
    _main(*sys.argv[1:])
