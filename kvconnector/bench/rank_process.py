"""One rank of one engine in a process of its own: `python -m kvconnector.bench.rank_process FD OPTIONS`.

The engine's process calls the public methods of `RankProcess`, for itself or for its own parent.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from contextlib import ExitStack

import msgspec

from kvconnector.bench.deployment import Deployment
from kvconnector.bench.loads import LoadName, make_model, make_step
from kvconnector.bench.options import SEED, TIMEOUT_S
from kvconnector.bench.peers import PEERS, AgentOpened, PeerAgent
from kvconnector.bench.pools import RankPools
from kvconnector.bench.processes import Usage, process_usage, serve_calls
from kvconnector.bench.shapes import described, rank_geometry
from kvconnector.config import ConnectorConfig
from kvconnector.errors import KVConnectorError, TransferTimeoutError
from kvconnector.runtime import StepMetadata, Worker, WorkerMetadata, WorkerOutput


class Driven(msgspec.Struct, kw_only=True):
    """Result of `drive`: when each request was asked for and when the engine's thread saw its end, in seconds of the
    host's monotonic clock, and the paths that requests took; the steps of the load, and the seconds of the loop.
    """

    spans_s: list[tuple[float, float]] = []
    paths: set[str] = set()
    num_steps: int = 0
    loop_s: float = 0.0


class RankProcess:
    """A rank's pools, and a worker or a peer's agent over them. One call at a time, as from an engine's thread."""

    def __init__(self, deployment: Deployment, side: str, index: int) -> None:
        shape, self._model = deployment.shapes[side], deployment.options.model
        self._rank, self._index = shape.ranks[index], index
        self._device = deployment.devices(side)[index]
        groups = rank_geometry(self._model, shape, self._rank).groups
        writer = deployment.shapes["prefill"]
        written = rank_geometry(self._model, writer, writer.ranks[0]).groups
        self._description = described(self._model, shape)
        self._pools = [
            RankPools(group, shape.layout, num_blocks=count, device=self._device, written=like)
            for group, like, count in zip(
                groups, written, deployment.num_blocks(shape), strict=True
            )
        ]
        self._worker: Worker
        self._agent: PeerAgent
        self._exits = ExitStack()
        self._log = _Log()

    def ready(self) -> None:
        """Return once the pools exist, and all writes of this process to them are complete."""
        if self._device != "cpu":
            import torch

            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        self._exits.close()

    def start_worker(self, config: ConnectorConfig) -> tuple[WorkerMetadata, list[str]]:
        """Register the pools with a worker of this configuration. Returns its metadata and its warnings."""
        logger = logging.getLogger("kvconnector")
        logger.setLevel(logging.INFO)
        logger.addHandler(self._log)
        self._worker = Worker(config, rank=self._rank, model=self._description)
        self._exits.callback(self._worker.close)
        self._worker.register([pools.cache_group() for pools in self._pools])
        warnings = [text for text, level in self._log.texts.items() if level >= logging.WARNING]
        return self._worker.handshake(), warnings

    def write(self, blocks: list[list[int]], num_tokens: int) -> None:
        for pools, block_ids in zip(self._pools, blocks, strict=True):
            pools.write(SEED, block_ids, num_tokens)
        self.ready()

    def poison(self) -> None:
        for pools in self._pools:
            pools.poison()
        self.ready()

    def mismatch(self, blocks: list[list[int]], num_tokens: int) -> str:
        """Compare these blocks with the sequence, and all others with poison. Returns the difference, if any."""
        self.ready()
        groups = zip(self._pools, self._model.layer_groups, blocks, strict=True)
        found = (
            pools.mismatch(
                SEED, block_ids, num_tokens, first_token=group.missing(range(num_tokens)).start
            )
            for pools, group, block_ids in groups
        )
        return next(filter(None, found), "")

    def turn(self, step: StepMetadata, wait_s: float) -> WorkerOutput:
        """Take one turn of an idle engine's loop, and wait for at most `wait_s`."""
        self._worker.start_step(step)
        self._worker.wait(wait_s)
        return self._worker.poll()

    def compute(self, steps: list[tuple[StepMetadata, float]]) -> float:
        """Run steps of a model, each for the given seconds, layer after layer. Returns the seconds that all took."""
        model = make_model(self._device)
        layers = self._pools[0].geometry.layers
        began_s = time.perf_counter()
        for step, seconds in steps:
            self._worker.start_step(step)
            # the model is first in `zip`, so that after the last layer it waits for its kernels
            for _, layer in zip(model(seconds, len(layers)), layers, strict=True):
                self._worker.layer_written(layer)
            self._worker.poll()
        return time.perf_counter() - began_s

    def pace(self, constants: dict[str, float]) -> None:
        """Change constants of `pacing` in this process, by name, so that it shows what each of them does."""
        # here: earlier releases, which have none of this, run all other calls
        from kvconnector.datapath.pump import pacing

        for name, value in constants.items():
            setattr(pacing, name, type(getattr(pacing, name))(value))

    def usage(self) -> Usage:
        return process_usage()

    def drive(
        self,
        load: LoadName,
        steps: list[tuple[list[str], StepMetadata]],
        one_by_one: bool,
        min_s: float,
    ) -> Driven:
        """Run an engine's main loop until all requests have ended and `min_s` has passed.

        Args:
            load: The work of each turn.
            steps: The scheduler's steps, each with the requests whose ends are awaited.
            one_by_one: True if a step waits until all requests before it have ended; else each turn takes one step.
            min_s: The least time to run for, in seconds.

        Raises:
            KVConnectorError: A load failed.
            TransferTimeoutError: No request ended within the timeout.
        """
        worker, run = self._worker, make_step(load, self._device)
        pending, open_since_s, driven = deque(steps), dict[str, float](), Driven()
        began_s = progressed_s = time.perf_counter()
        while pending or open_since_s or time.perf_counter() - began_s < min_s:
            if pending and not (one_by_one and open_since_s):
                request_ids, step = pending.popleft()
                open_since_s |= dict.fromkeys(request_ids, time.perf_counter())
                worker.start_step(step)
            if load != "idle":
                run()
                driven.num_steps += 1
            elif not pending or one_by_one:
                left_s = began_s + min_s - time.perf_counter()
                worker.wait(TIMEOUT_S if open_since_s else max(0.0, left_s))
            output, now_s = worker.poll(), time.perf_counter()
            if output.failed_recving:
                raise KVConnectorError("loads failed", reasons=output.failed_recving)
            if not output.is_empty:
                progressed_s = now_s
            elif open_since_s and now_s - progressed_s > TIMEOUT_S:
                raise TransferTimeoutError("no request ended", open=list(open_since_s))
            for request_id in (
                output.finished_recving | output.finished_sending
            ) & open_since_s.keys():
                driven.spans_s.append((open_since_s.pop(request_id), now_s))
            driven.paths |= {each.path for each in output.stats.transfers}
        driven.loop_s = time.perf_counter() - began_s
        return driven

    def lanes(self) -> list[str]:
        """Return the worker's log lines about the lanes of its packed reads."""
        return [text for text in self._log.texts if "packed reads are sent over" in text]

    def open_agent(self, peer: int) -> AgentOpened:
        """Register the pools with an agent of `PEERS[peer]`."""
        self._agent = self._exits.enter_context(PEERS[peer].agent(self._pools))
        return self._agent.opened()

    def join_agent(self, peers: list[AgentOpened]) -> None:
        """Connect to the agent of the other engine's rank with the same number, and prepare transfers."""
        self._agent.join(peers[self._index])

    def read_blocks(self, remote: list[list[list[int]]], local: list[list[list[int]]]) -> float:
        """Read requests at once, each in blocks by cache group. Returns the seconds until the last has arrived."""
        return self._agent.read(remote, local)


class _Log(logging.Handler):
    """Keeps each text that the worker logs once, with its level."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.texts: dict[str, int] = {}

    def emit(self, record: logging.LogRecord) -> None:
        self.texts[record.getMessage()] = record.levelno


def _main(descriptor: str, options: str) -> None:
    arguments = msgspec.json.decode(options, type=tuple[Deployment, str, int])
    serve_calls(int(descriptor), lambda: RankProcess(*arguments))


if __name__ == "__main__":
    _main(*sys.argv[1:])
