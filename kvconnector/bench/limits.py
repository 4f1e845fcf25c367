"""The limits of the machine, measured beside each benchmark: memcpy, a raw socket, copies between GPUs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from kvconnector.bench.between_hosts import open_stream
from kvconnector.bench.deployment import Deployment, Transfer
from kvconnector.bench.engines import EnginePair, Runner
from kvconnector.bench.options import WARMUP
from kvconnector.bench.results import ContenderKind
from kvconnector.bench.shapes import ModelShape, engine_geometry
from kvconnector.planning import plan_transfer
from kvconnector.topology import TpKVTopology


def repeat(
    operation: Callable[[], object], iterations: int, warmup: int = WARMUP
) -> tuple[float, ...]:
    """Return the seconds of each of `iterations` calls, after `warmup` untimed ones."""
    samples = []
    for _ in range(warmup + iterations):
        started = time.perf_counter()
        operation()
        samples.append(time.perf_counter() - started)
    return tuple(samples[warmup:])


def host_copy(nbytes: int) -> Callable[[int], None]:
    """Return a function that copies up to `nbytes` bytes in host memory, in one thread."""
    source, target = np.full(nbytes, 1, dtype=np.uint8), np.full(nbytes, 2, dtype=np.uint8)
    return lambda count: np.copyto(target[:count], source[:count])


def device_copies(nbytes: Mapping[tuple[str, str], int]) -> Callable[[int], None]:
    """Return a function that makes plain copies between GPUs at once, and waits until all GPUs are idle. `nbytes` are
    by (source, target); the function takes the bytes of all copies together, which may be fewer.
    """
    import torch

    copies = [
        (
            torch.ones(count, dtype=torch.uint8, device=source),
            torch.zeros(count, dtype=torch.uint8, device=target),
            # A copy between GPUs waits for the current streams of both: each gets its own.
            (torch.cuda.Stream(source), torch.cuda.Stream(target)),
        )
        for (source, target), count in nbytes.items()
    ]
    total = sum(nbytes.values())
    devices = sorted({device for pair in nbytes for device in pair})

    def move(wanted: int) -> None:
        for source, target, streams in copies:
            count = len(source) * wanted // total
            with torch.cuda.stream(streams[0]), torch.cuda.stream(streams[1]):
                target[:count].copy_(source[:count], non_blocking=True)
        for device in devices:
            torch.cuda.synchronize(device)

    return move


@dataclass(slots=True)
class Limit(Runner):
    """One limit, which takes its turn among the contenders: `move` moves a given number of bytes."""

    name: str
    kind: ContenderKind
    model: ModelShape
    move: Callable[[int], None]

    def run(self, *transfers: Transfer) -> float:
        nbytes = sum(self.model.request_bytes(each.num_tokens) for each in transfers)
        return repeat(lambda: self.move(nbytes), 1, warmup=0)[0]


@contextmanager
def limits_of(pair: EnginePair, num_tokens: int) -> Iterator[list[Limit]]:
    """Yield the limits of the pair's devices and transports, for the deployment's number of requests in flight, each of
    at most `num_tokens` tokens.
    """
    deployment = pair.deployment
    options, model = deployment.options, deployment.options.model
    nbytes = model.request_bytes(num_tokens) * deployment.in_flight
    if options.device != "cpu" and not options.connect:
        copies = copies_of(deployment, num_tokens)
        name = f"plain copy, {len(copies)} at once" if len(copies) > 1 else "plain copy"
        yield [Limit(name, "limit", model, device_copies(copies))]
        return
    engine = pair.prefill
    with open_stream((engine.host, engine.serve_stream(nbytes)), nbytes) as move:
        limits = [Limit("raw TCP socket", "limit", model, move)]
        if not options.connect:
            kind: ContenderKind = "limit" if options.share_memory else "variant"
            limits.insert(0, Limit("memcpy, one thread", kind, model, host_copy(nbytes)))
        yield limits


def copies_of(deployment: Deployment, num_tokens: int) -> Counter[tuple[str, str]]:
    """Return the bytes that a transfer moves, by source and target device."""
    model, shapes = deployment.options.model, deployment.shapes
    producer, consumer = (engine_geometry(model, each, side) for side, each in shapes.items())
    device_of = dict(zip(shapes["prefill"].ranks, deployment.devices("prefill"), strict=True))
    copies: Counter[tuple[str, str]] = Counter()
    ranges = model.ranges(range(num_tokens))
    for rank, target in zip(shapes["decode"].ranks, deployment.devices("decode"), strict=True):
        topology = TpKVTopology(consumer, rank)
        for read in plan_transfer(topology, producer, ranges, chunk_bytes=1 << 30):
            copies[device_of[read.source], target] += read.total_bytes * deployment.in_flight
    return copies
