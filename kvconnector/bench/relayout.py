"""`relayout`: blocks of one engine into the other's block size and layout, on one device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from kvconnector.bench import ResultMismatchError
from kvconnector.bench.contract import (
    SEED,
    Benchmark,
    BenchOptions,
    CaseResult,
    ContenderKind,
    Measurement,
    Progress,
)
from kvconnector.bench.limits import HostCopy, gpu_times, repeat
from kvconnector.bench.pools import RankPools, choose_blocks
from kvconnector.bench.shapes import EngineShape
from kvconnector.bench.units import format_bytes
from kvconnector.datapath import Pools
from kvconnector.ids import Rank
from kvconnector_kernels.relayout import PagedSide, relayout, upload_block_ids

DEFAULT_TOKENS = (2048,)
DEFAULT_ITERATIONS = 20
SPARE_FACTOR = 2
"""Blocks of a pool for each block of the request."""


def run(options: BenchOptions, progress: Progress) -> Sequence[CaseResult]:
    """Every request size in turn, as if each engine had one rank."""
    prefill = options.prefill or EngineShape(block=16, layout="HND")
    decode = options.decode or EngineShape(block=64, layout="NHD")
    unit = math.lcm(prefill.block, decode.block)
    cases = []
    for tokens in options.tokens or DEFAULT_TOKENS:
        case = _Case(options, (prefill.on_one_rank, decode.on_one_rank), -(-tokens // unit) * unit)
        progress(f"relayout: {case.name}")
        cases.append(case.run())
    return cases


class _Case:
    """One request size."""

    def __init__(
        self, options: BenchOptions, shapes: tuple[EngineShape, EngineShape], tokens: int
    ) -> None:
        self.options = options
        self.tokens = tokens
        self.device = options.one_device
        self.nbytes = options.model.token_bytes * tokens
        self.iterations = options.iterations or DEFAULT_ITERATIONS
        self.name = f"{tokens} tokens, {format_bytes(self.nbytes)}, " + " to ".join(
            f"{shape.layout}{shape.block}" for shape in shapes
        )
        rng = np.random.default_rng(SEED)
        self.pools: list[RankPools] = []
        self.block_ids: list[list[int]] = []
        for shape in shapes:
            count = shape.num_blocks(tokens)
            size = SPARE_FACTOR * count
            self.pools.append(
                RankPools(options.model, shape, Rank(0, 0), num_blocks=size, device=self.device)
            )
            self.block_ids.append(choose_blocks(count, size, scattered=options.scattered, rng=rng))

    def run(self) -> CaseResult:
        self.pools[0].write(SEED, self.block_ids[0], self.tokens)
        measurements = (
            self._measure("one fused copy", "ours", self._fused()),
            self._measure("torch, layer by layer", "naive", self._layer_by_layer()),
            self._limit(),
        )
        return CaseResult(case=self.name, measurements=measurements)

    def _measure(
        self, contender: str, kind: ContenderKind, operation: Callable[[], object]
    ) -> Measurement:
        self.pools[1].poison()
        operation()
        if wrong := self.pools[1].mismatch(SEED, self.block_ids[1], self.tokens):
            raise ResultMismatchError(f"relayout, {contender}: {wrong}", case=self.name)
        samples = self._times(operation)
        return Measurement(contender=contender, kind=kind, samples_s=samples, nbytes=self.nbytes)

    def _times(self, operation: Callable[[], object]) -> tuple[float, ...]:
        if self.device == "cpu":
            return repeat(operation, self.iterations)
        return gpu_times(operation, self.device, self.iterations)

    def _fused(self) -> Callable[[], None]:
        tables = [Pools([pool.cache_group()], self.device) for pool in self.pools]
        sides = [
            PagedSide(
                table=table.tables[0, 0],
                block_ids=upload_block_ids(ids, num_blocks=table.num_blocks[0], device=self.device),
            )
            for table, ids in zip(tables, self.block_ids, strict=True)
        ]
        counts = {
            "num_parts": len(self.pools[0].storage),
            "num_heads": self.options.model.num_kv_heads,
            "num_tokens": self.tokens,
            "num_threads": 1,
        }
        return lambda: relayout(sides[0], sides[1], **counts)

    def _layer_by_layer(self) -> Callable[[], None]:
        """Gather, permute and scatter for each part of each layer, as engines do without a kernel for it."""
        import torch

        source, target = (
            [_as_tensor(storage) for storage in pool.storage.values()] for pool in self.pools
        )
        ids = [torch.tensor(ids, dtype=torch.int64, device=self.device) for ids in self.block_ids]
        shapes = [pool.shape for pool in self.pools]

        def copy() -> None:
            for received, pool in zip(source, target, strict=True):
                blocks = received.index_select(0, ids[0])
                if shapes[0].layout == "HND":
                    blocks = blocks.permute(0, 2, 1, 3)
                blocks = blocks.reshape(-1, shapes[1].block, *blocks.shape[2:])
                if shapes[1].layout == "HND":
                    blocks = blocks.permute(0, 2, 1, 3)
                pool.index_copy_(0, ids[1], blocks)

        return copy

    def _limit(self) -> Measurement:
        if self.device == "cpu":
            name = "memcpy, one thread"
            samples = self._times(partial(HostCopy(self.nbytes).move, self.nbytes))
        else:
            import torch

            name = "device copy"
            source = torch.ones(self.nbytes, dtype=torch.uint8, device=self.device)
            samples = self._times(partial(torch.zeros_like(source).copy_, source))
        return Measurement(contender=name, kind="limit", samples_s=samples, nbytes=self.nbytes)


def _as_tensor(storage: Any) -> Any:
    """The same memory as a tensor; torch copies signed integers of every size."""
    if not isinstance(storage, np.ndarray):
        return storage
    import torch

    return torch.from_numpy(storage.view(f"i{storage.itemsize}"))


BENCHMARK = Benchmark(
    name="relayout",
    description="one fused copy against torch layer by layer; limit: a plain copy of the bytes",
    run=run,
)
