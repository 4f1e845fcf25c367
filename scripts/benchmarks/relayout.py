"""`relayout`: a copy of one engine's blocks into the other's block size and layout, on one device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from kvconnector.bench import ResultMismatchError
from kvconnector.bench.deployment import SPARE_FACTOR, Deployment, choose_blocks
from kvconnector.bench.limits import host_copy, repeat
from kvconnector.bench.options import SEED, WARMUP, BenchOptions
from kvconnector.bench.pools import RankPools
from kvconnector.bench.results import CaseResult, Measurement, ShowProgress
from kvconnector.bench.shapes import EngineShape, rank_geometry
from kvconnector.bench.sizes import format_bytes
from kvconnector.datapath import Pools
from kvconnector.ids import Rank
from kvconnector_kernels.relayout import PagedSide, relayout, upload_block_ids


def run(options: BenchOptions, progress: ShowProgress) -> Sequence[CaseResult]:
    """Return a case for every request size, as if each engine had one rank."""
    engines = options.prefill, options.decode
    unit = math.lcm(*(each.block for each in engines))
    sizes = [-(-tokens // unit) * unit for tokens in options.tokens]
    shapes = [EngineShape(block=each.block, layout=each.layout) for each in engines]
    return [_measure(options, shapes, tokens, progress) for tokens in sizes]


def _measure(
    options: BenchOptions, shapes: Sequence[EngineShape], tokens: int, progress: ShowProgress
) -> CaseResult:
    device, *_ = Deployment(options).devices("prefill")
    nbytes = options.model.token_bytes * tokens
    cuts = " to ".join(f"{shape.layout}{shape.block}" for shape in shapes)
    case = f"{tokens} tokens, {format_bytes(nbytes)}, {cuts}"
    progress(case)
    rng = np.random.default_rng(SEED)
    pools, block_ids, sides = [], [], []
    for shape in shapes:
        count = shape.num_blocks(tokens)
        size = SPARE_FACTOR * count
        geometry = rank_geometry(options.model, shape, Rank(0, 0)).groups[0]
        pool = RankPools(geometry, shape.layout, num_blocks=size, device=device)
        ids = choose_blocks(count, size, scattered=options.scattered, rng=rng)
        table = Pools([pool.cache_group()], device).tables[0, 0]
        uploaded = upload_block_ids(ids, num_blocks=size, device=device)
        sides.append(PagedSide(table=table, block_ids=uploaded))
        pools.append(pool)
        block_ids.append(ids)
    fused = partial(
        relayout,
        *sides,
        num_parts=len(pools[0].storage),
        num_heads=options.model.num_kv_heads,
        num_tokens=tokens,
    )
    pools[0].write(SEED, block_ids[0], tokens)
    fused()
    if wrong := pools[1].mismatch(SEED, block_ids[1], tokens):
        raise ResultMismatchError(f"relayout, one fused copy: {wrong}", case=case)
    times = repeat if device == "cpu" else partial(_gpu_times, device)
    limit = _plain_copy(nbytes, device)
    plain = "plain copy, one thread" if device == "cpu" else "plain device copy"
    return CaseResult(
        case,
        (
            Measurement("one fused copy", "ours", times(fused, options.iterations), nbytes),
            Measurement(plain, "limit", times(limit, options.iterations), nbytes),
        ),
    )


def _plain_copy(nbytes: int, device: str) -> Callable[[], object]:
    if device == "cpu":
        return partial(host_copy(nbytes), nbytes)
    import torch

    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    return partial(torch.zeros_like(source).copy_, source)


def _gpu_times(device: str, operation: Callable[[], object], iterations: int) -> tuple[float, ...]:
    """Return the GPU seconds of each call, by events on the current stream.

    The calls are queued without waiting in between, so the host's part shows only if it takes longer.
    """
    import torch

    with torch.cuda.device(device):
        for _ in range(WARMUP):
            operation()
        torch.cuda.synchronize()
        pairs = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in range(iterations)
        ]
        for begin, end in pairs:
            begin.record()
            operation()
            end.record()
        torch.cuda.synchronize()
        return tuple(begin.elapsed_time(end) / 1e3 for begin, end in pairs)
