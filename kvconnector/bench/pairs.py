"""`pairs`: every ordered pair of a torchrun job's ranks in turn, as a matrix of bandwidths.

The ranks agree through torchrun's store. Each has one engine of one rank, which holds requests and loads them.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from itertools import permutations
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from kvconnector.bench import ResultMismatchError
from kvconnector.bench.deployment import Deployment, Transfer
from kvconnector.bench.engine_process import TURN_S, Engine, EngineProcess
from kvconnector.bench.environment import Environment
from kvconnector.bench.options import WARMUP, BenchOptions, control_settings
from kvconnector.bench.processes import ANSWER_TIMEOUT_S
from kvconnector.bench.rank_process import RankProcess
from kvconnector.bench.results import ShowProgress
from kvconnector.bench.tables import Fitted
from kvconnector.errors import ConfigError, KVConnectorError

PEER = {"timeout_s": 20.0, "transfer_timeout_s": 20.0}
ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one producer and one consumer: the seconds of each request, or the error."""

    producer: int
    consumer: int
    samples_s: list[float] = []
    path: str = ""
    error: str = ""


class Matrix(msgspec.Struct, frozen=True, kw_only=True):
    """All pairs of the job. `hosts` are by rank, `gigabytes_per_s` by producer and consumer, with None on the diagonal
    and for a pair that failed.
    """

    nbytes: int
    hosts: list[str]
    pairs: list[Pair]
    gigabytes_per_s: list[list[float | None]]
    environment: Environment = msgspec.field(default_factory=Environment)

    def print_to(self, console: Console) -> None:
        """Print a row for each producer and a column for each consumer."""
        table = Table("GB/s from")
        for rank in range(len(self.hosts)):
            table.add_column(f"to {rank}", justify="right")
        rows = zip(self.hosts, self.gigabytes_per_s, strict=True)
        for rank, (host, row) in enumerate(rows):
            cells = ["failed" if each is None else f"{each:.2f}" for each in row]
            cells[rank] = "-"
            table.add_row(f"{rank} {host}", *cells)
        console.print(Fitted(table))
        console.print(str(self.environment), soft_wrap=True)


def run(options: BenchOptions, progress: ShowProgress) -> Matrix:
    """Return the matrix, in each rank. Raises ConfigError: no torchrun or torch. ResultMismatchError: wrong bytes."""
    store, rank, size = _join()
    gpu = int(os.environ.get("LOCAL_RANK", "0"))
    options = msgspec.structs.replace(options, gpus=((), (gpu,)))
    num_tokens = options.tokens[0]
    deployment = Deployment(options)
    # ranks of one host share its environment, but not its ports
    control = {**msgspec.to_builtins(control_settings()), "port": 0}
    requests = [deployment.transfer(num_tokens)] * (WARMUP + options.iterations)
    with EngineProcess(deployment, "decode") as engine:
        engine.call(Engine.start, f"rank{rank}", "both", {"control": control, "peer": PEER})
        store.set(f"host/{rank}", socket.gethostname())
        pairs = []
        for producer, consumer in permutations(range(size), 2):
            key = f"{producer}-{consumer}"
            if rank == producer:
                progress(f"from rank {producer} to rank {consumer}")
                _offer(store, key, engine, requests)
            elif rank == consumer:
                found = Pair(producer=producer, consumer=consumer)
                found = _load(store, key, engine, requests, found)
                store.set(f"{key}/found", msgspec.json.encode(found))
            pairs.append(msgspec.json.decode(store.get(f"{key}/found"), type=Pair))
        hosts = [store.get(f"host/{each}").decode() for each in range(size)]
        # the store may be in a rank, which must leave last
        store.set(f"read/{rank}", "")
        store.wait([f"read/{each}" for each in range(size)])
    if wrong := [pair.error for pair in pairs if ResultMismatchError.__name__ in pair.error]:
        raise ResultMismatchError(wrong[0])
    _, nbytes = deployment.request_bytes(num_tokens)
    speeds: list[list[float | None]] = [[None] * size for _ in range(size)]
    for pair in pairs:
        if pair.samples_s:
            speeds[pair.producer][pair.consumer] = nbytes / float(np.median(pair.samples_s)) / 1e9
    return Matrix(nbytes=nbytes, hosts=hosts, pairs=pairs, gigabytes_per_s=speeds)


def _offer(store: Any, key: str, engine: EngineProcess, requests: list[Transfer]) -> None:
    """Be the producer: offer each request, and withdraw it if the consumer failed."""
    engine.call_ranks(RankProcess.poison)
    engine.call_ranks(RankProcess.write, requests[0].prefill_blocks, requests[0].num_tokens)
    for index, request in enumerate(requests):
        name = f"{key}/{index}"
        offer = (name, request.prefill_blocks, request.num_tokens)
        (params,) = engine.call(Engine.offer, [offer])
        engine.call(Engine.turn, TURN_S)
        store.set(name, msgspec.json.encode(params))
        has_failed = store.get(f"{name}/ended") != b"well"
        if has_failed:
            engine.call(Engine.abort, name)
        engine.call(Engine.await_sent, [name])
        if has_failed:
            return


def _load(
    store: Any, key: str, engine: EngineProcess, requests: list[Transfer], pair: Pair
) -> Pair:
    """Be the consumer: load requests, of which the first warm up, and compare the bytes of the last."""
    samples, paths = [], set[str]()
    engine.call_ranks(RankProcess.poison)
    for index, request in enumerate(requests):
        name, blocks = f"{key}/{index}", request.decode_blocks
        params = msgspec.json.decode(store.get(name))
        engine.call(Engine.want, [(name, params, blocks, request.num_tokens)])
        try:
            seconds, found = engine.call(Engine.load, [name])
        except KVConnectorError as error:
            store.set(f"{name}/ended", "failed")
            return msgspec.structs.replace(pair, error=" ".join(str(error).split()))
        store.set(f"{name}/ended", "well")
        samples.append(seconds)
        paths |= found
    (wrong,) = engine.call_ranks(RankProcess.mismatch, blocks, request.num_tokens)
    if wrong:
        return msgspec.structs.replace(pair, error=f"{ResultMismatchError.__name__}: {wrong}")
    return msgspec.structs.replace(pair, samples_s=samples[WARMUP:], path="+".join(sorted(paths)))


def _join() -> tuple[Any, int, int]:
    """Return the job's store, this process's rank, and the number of ranks."""
    missing = [name for name in ENVIRONMENT if name not in os.environ]
    if missing:
        raise ConfigError(
            "pairs runs in a torchrun job: torchrun --nproc-per-node 8 -m kvconnector bench pairs",
            missing=missing,
        )
    try:
        from torch.distributed.rendezvous import rendezvous
    except ImportError as error:
        raise ConfigError(f"pairs needs torch.distributed: {error}") from error
    timeout = timedelta(seconds=ANSWER_TIMEOUT_S)
    store, rank, size = next(iter(rendezvous("env://", timeout=timeout)))
    store.set_timeout(timeout)
    return store, rank, size
