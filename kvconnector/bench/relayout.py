"""`relayout`: blocks of one engine into the other's block size and layout, on one device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvconnector.bench import limits
from kvconnector.bench.contract import (
    Benchmark,
    BenchOptions,
    CaseResult,
    Measurement,
    Part,
    Progress,
    ResultMismatchError,
)
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
    shapes = [shape.on_one_rank for shape in (prefill, decode)]
    device = "cpu" if options.device == "cpu" else "cuda:0"
    unit = math.lcm(prefill.block, decode.block)
    return [
        _Case(options, shapes[0], shapes[1], -(-tokens // unit) * unit, device).run(progress)
        for tokens in options.tokens or DEFAULT_TOKENS
    ]


class _Case:
    """One request size."""

    def __init__(
        self,
        options: BenchOptions,
        source: EngineShape,
        target: EngineShape,
        tokens: int,
        device: str,
    ) -> None:
        self.options = options
        self.tokens = tokens
        self.device = device
        rng = np.random.default_rng(options.seed)
        shapes = (source, target)
        counts = [shape.num_blocks(tokens) for shape in shapes]
        self.pools = [
            RankPools(
                options.model, shape, Rank(0, 0), num_blocks=SPARE_FACTOR * count, device=device
            )
            for shape, count in zip(shapes, counts, strict=True)
        ]
        self.block_ids = [
            choose_blocks(count, SPARE_FACTOR * count, scattered=options.scattered, rng=rng)
            for count in counts
        ]
        self.nbytes = options.model.token_bytes * tokens
        self.iterations = options.iterations or DEFAULT_ITERATIONS
        self.name = (
            f"{tokens} tokens, {format_bytes(self.nbytes)}, {source.layout}{source.block}"
            f" to {target.layout}{target.block}"
        )

    def run(self, progress: Progress) -> CaseResult:
        progress(f"relayout: {self.name}")
        self.pools[0].write(self.options.seed, self.block_ids[0], self.tokens)
        measurements = [
            self._measure("one fused copy", "ours", self._fused()),
            self._measure("torch, layer by layer", "naive", self._layer_by_layer()),
            self._limit(),
        ]
        return CaseResult(case=self.name, measurements=tuple(measurements))

    def _measure(self, contender: str, part: Part, operation: Callable[[], object]) -> Measurement:
        self.pools[1].poison()
        operation()
        if wrong := self.pools[1].mismatch(self.options.seed, self.block_ids[1], self.tokens):
            raise ResultMismatchError(f"relayout, {contender}: {wrong}", case=self.name)
        counts = {"iterations": self.iterations, "warmup": self.options.warmup}
        if self.device == "cpu":
            samples = limits.repeat(operation, **counts)
        else:
            samples = limits.gpu_times(operation, device=self.device, **counts)
        return Measurement(contender=contender, part=part, samples_s=samples, nbytes=self.nbytes)

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
        layouts = [pool.shape.layout for pool in self.pools]
        block = self.pools[1].shape.block

        def copy() -> None:
            for received, pool in zip(source, target, strict=True):
                blocks = received.index_select(0, ids[0])
                if layouts[0] == "HND":
                    blocks = blocks.permute(0, 2, 1, 3)
                blocks = blocks.reshape(-1, block, *blocks.shape[2:])
                if layouts[1] == "HND":
                    blocks = blocks.permute(0, 2, 1, 3)
                pool.index_copy_(0, ids[1], blocks)

        return copy

    def _limit(self) -> Measurement:
        counts = {"iterations": self.iterations, "warmup": self.options.warmup}
        if self.device == "cpu":
            return limits.memcpy(self.nbytes, **counts)
        import torch

        source = torch.ones(self.nbytes, dtype=torch.uint8, device=self.device)
        target = torch.zeros_like(source)
        samples = limits.gpu_times(lambda: target.copy_(source), device=self.device, **counts)
        return Measurement(
            contender="device copy", part="limit", samples_s=samples, nbytes=self.nbytes
        )


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
