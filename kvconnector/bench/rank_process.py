"""One rank of one engine in a process of its own: `python -m kvconnector.bench.rank_process FD OPTIONS`.

The parent plays the engine's scheduler, and calls the public methods of `RankProcess` through a pipe: msgpack both
ways, and the method's annotations say what the bytes are. Nothing is unpickled.
"""

from __future__ import annotations

import ctypes
import inspect
import logging
import os
import re
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias, get_type_hints

import msgspec

from kvconnector.bench.loads import LoadName, make_model, make_step
from kvconnector.bench.options import SEED, TIMEOUT_S
from kvconnector.bench.peers import PEERS, AgentOpened, PeerAgent
from kvconnector.bench.pools import RankPools
from kvconnector.bench.shapes import EngineShape
from kvconnector.config import ConnectorConfig, ControlConfig
from kvconnector.errors import ConfigError, KVConnectorError, TransferTimeoutError
from kvconnector.ids import Rank
from kvconnector.runtime import StepMetadata, Worker, WorkerMetadata, WorkerOutput
from kvconnector.topology import EngineGeometry

_PR_SET_PDEATHSIG = 1


class CallFailedError(KVConnectorError):
    """A call raised in the other process, or that process is gone; the text is its own or the end of its log."""


Usage: TypeAlias = tuple[float, float, int, int]
"""Resident MiB of a process's own and shared with others (pools that a peer reads are), open descriptors, threads."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """What happened instead of a return."""

    text: str


def encode_call(method: Callable[..., Any], arguments: Sequence[Any]) -> bytes:
    """The call as bytes for `answer`."""
    return msgspec.msgpack.encode((method.__name__, arguments))


def answer(target: object, request: bytes, methods: Sequence[str]) -> bytes:
    """Call one of these methods; what it returned or raised, as bytes for `decode_answer`."""
    try:
        name, arguments = msgspec.msgpack.decode(request, type=tuple[str, list[msgspec.Raw]])
        if name not in methods:
            raise CallFailedError("there is no such method", method=name)
        method = getattr(target, name)
        hints = get_type_hints(method)
        parameters = inspect.signature(method).parameters
        pairs = zip(parameters, arguments, strict=True)
        result = (
            method(*(msgspec.msgpack.decode(each, type=hints[name]) for name, each in pairs)),
        )
    except KVConnectorError as error:
        return failure(f"failed: {type(error).__name__}: {error}")
    except Exception as error:
        # Whatever it was, the caller must hear of it rather than wait.
        return failure("failed: " + "".join(traceback.format_exception(error)))
    return msgspec.msgpack.encode(result)


def failure(text: str) -> bytes:
    """The answer that what was called did this instead of returning."""
    return msgspec.msgpack.encode(Failed(text.strip()))


def decode_answer(name: str, method: Callable[..., Any], answered: bytes) -> Any:
    """What the method returned. Raises CallFailedError: it raised; `name` says where."""
    result: Any = get_type_hints(method)["return"]
    decoded = msgspec.msgpack.decode(answered, type=Failed | tuple[result])
    if isinstance(decoded, Failed):
        raise CallFailedError(f"{name} {decoded.text}")
    return decoded[0]


def process_usage() -> Usage:
    """Return what this process uses."""
    status = dict(
        re.findall(r"(Rss\w+):\s+(\d+) kB", Path("/proc/self/status").read_text("ascii", "replace"))
    )
    own_mib, shared_mib = (int(status[name]) / 1024 for name in ("RssAnon", "RssShmem"))
    descriptors, threads = (len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task"))
    return own_mib, shared_mib, descriptors, threads


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One engine's cut and pools, with `num_blocks` in each cache group.

    Its ranks take turns on `gpus`; without these on all of its host from `first_gpu` on, in a circle. `control`, where
    their host has control settings of its own, is used in the place of any other.
    """

    engine_id: str
    geometry: EngineGeometry
    shape: EngineShape
    num_blocks: tuple[int, ...]
    device: str
    gpus: tuple[int, ...] = ()
    first_gpu: int = 0
    control: ControlConfig | None = None

    def devices(self) -> list[str]:
        """A device for every rank. Raises ConfigError: a GPU is named that is not there."""
        num_ranks = len(self.shape.ranks)
        if self.device == "cpu":
            return ["cpu"] * num_ranks
        import torch

        count = torch.cuda.device_count()
        if not count:
            raise ConfigError("torch can use no GPU here", engine=self.engine_id)
        gpus = self.gpus or [(self.first_gpu + index) % count for index in range(count)]
        if max(gpus) >= count:
            raise ConfigError("no such GPU", engine=self.engine_id, gpus=gpus, num_gpus=count)
        return [f"cuda:{gpus[index % len(gpus)]}" for index in range(num_ranks)]


class Started(msgspec.Struct, frozen=True):
    """A worker's metadata, and what it warned of when it started."""

    metadata: WorkerMetadata
    warnings: list[str]


class Driven(msgspec.Struct, kw_only=True):
    """What an engine's loop did: of each request when it was asked for and when the engine's thread saw its end, in
    seconds of the host's monotonic clock, and the paths that they came by; the steps of its load, and seconds of all.
    """

    spans_s: list[tuple[float, float]] = []
    paths: set[str] = set()
    num_steps: int = 0
    loop_s: float = 0.0


class RankProcess:
    """A rank's pools, and a worker or a peer's agent over them. One call at a time, as from an engine's thread."""

    def __init__(self, spec: EngineSpec, rank: Rank) -> None:
        self._model, self._rank = spec.geometry.model, rank
        self._index = spec.shape.ranks.index(rank)
        self._device = spec.devices()[self._index]
        groups = spec.geometry.ranks[self._index].groups
        self._pools = [
            RankPools(group, spec.shape.layout, num_blocks=count, device=self._device)
            for group, count in zip(groups, spec.num_blocks, strict=True)
        ]
        self._control = spec.control
        self._worker: Worker
        self._agent: PeerAgent
        self._exits = ExitStack()
        self._log = _Log()

    def ready(self) -> None:
        """Answers once the pools are there, and what this process wrote there is complete."""
        if self._device != "cpu":
            import torch

            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        self._exits.close()

    def start_worker(self, config: ConnectorConfig) -> Started:
        """Register the pools with a worker of this configuration."""
        logger = logging.getLogger("kvconnector")
        logger.setLevel(logging.INFO)
        logger.addHandler(self._log)
        if self._control is not None:
            config = msgspec.structs.replace(config, control=self._control)
        self._worker = Worker(config, rank=self._rank, model=self._model)
        self._exits.callback(self._worker.close)
        self._worker.register([pools.cache_group() for pools in self._pools])
        warnings = [text for text, level in self._log.texts.items() if level >= logging.WARNING]
        return Started(self._worker.handshake(), warnings)

    def write(self, blocks: list[list[int]], num_tokens: int) -> None:
        for pools, block_ids in zip(self._pools, blocks, strict=True):
            pools.write(SEED, block_ids, num_tokens)
        self.ready()

    def poison(self) -> None:
        for pools in self._pools:
            pools.poison()
        self.ready()

    def mismatch(self, blocks: list[list[int]], num_tokens: int) -> str:
        """Compare these blocks with the sequence and all others with poison; empty if all is well."""
        self.ready()
        found = (
            pools.mismatch(SEED, block_ids, num_tokens)
            for pools, block_ids in zip(self._pools, blocks, strict=True)
        )
        return next(filter(None, found), "")

    def turn(self, step: StepMetadata, wait_s: float) -> WorkerOutput:
        """One turn of an idle engine's loop, which waits for at most so long."""
        self._worker.start_step(step)
        self._worker.wait(wait_s)
        return self._worker.poll()

    def compute(self, steps: list[tuple[StepMetadata, float]]) -> float:
        """Return what the steps of a model took that runs for this many seconds, layer after layer."""
        model = make_model(self._device)
        layers = self._pools[0].geometry.layers
        began_s = time.perf_counter()
        for step, seconds in steps:
            self._worker.start_step(step)
            # the model comes first: it waits for its kernels once the layers are through
            for _, layer in zip(model(seconds, len(layers)), layers, strict=True):
                self._worker.layer_written(layer)
            self._worker.poll()
        return time.perf_counter() - began_s

    def usage(self) -> Usage:
        return process_usage()

    def drive(
        self,
        load: LoadName,
        steps: list[tuple[list[str], StepMetadata]],
        one_by_one: bool,
        min_s: float,
    ) -> Driven:
        """Run an engine's main loop beside steps and the requests that it waits for, until all are over and `min_s` has
        passed: each step when those before are over if `one_by_one`, else one in each turn. Raises
        KVConnectorError: a load failed. TransferTimeoutError: no request ended within the timeout.
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
        """What the worker has said of the lanes of its packed reads."""
        return [text for text in self._log.texts if "travel over" in text]

    def open_agent(self, peer: int) -> AgentOpened:
        """Register the pools with an agent of `PEERS[peer]`."""
        self._agent = self._exits.enter_context(PEERS[peer].agent(self._pools))
        return self._agent.opened()

    def join_agent(self, peers: list[AgentOpened]) -> None:
        """Connect to the agent of the other engine's rank of equal number, and prepare what can be prepared."""
        self._agent.join(peers[self._index])

    def read_blocks(self, remote: list[list[list[int]]], local: list[list[list[int]]]) -> float:
        """Read requests at once, each in blocks by cache group: seconds until the last is here."""
        return self._agent.read(remote, local)


class _Log(logging.Handler):
    """Keeps what the worker says, once, with its level."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.texts: dict[str, int] = {}

    def emit(self, record: logging.LogRecord) -> None:
        self.texts[record.getMessage()] = record.levelno


def serve_calls(descriptor: int, make: Callable[[], Any]) -> None:
    """Answer calls of the public methods of what `make` returns, through a pipe, until the parent closes that or is
    gone; then close it. The process ends with the error's text where it cannot be made.
    """
    # while it is stopped, as between its turns, it cannot see that the connection is closed
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    try:
        target = make()
    except KVConnectorError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    methods = [name for name in vars(type(target)) if not name.startswith("_")]
    with Connection(descriptor) as connection:
        try:
            while True:
                connection.send_bytes(answer(target, connection.recv_bytes(), methods))
        except (EOFError, OSError):
            return
        finally:
            target.close()


def _main(descriptor: str, options: str) -> None:
    spec, rank_index = msgspec.json.decode(options, type=tuple[EngineSpec, int])
    serve_calls(int(descriptor), lambda: RankProcess(spec, spec.shape.ranks[rank_index]))


if __name__ == "__main__":
    _main(*sys.argv[1:])
