"""`relayout`: a copy of one engine's blocks into the other's block size, layout and type of elements, on one device.

Beside it, if elements change type, the same copy between engines that both have the prefill engine's; on a GPU, each
also with as many programs as a long read has beside an engine's own kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from kvconnector.bench import ResultMismatchError
from kvconnector.bench.deployment import SPARE_FACTOR, Deployment, choose_blocks
from kvconnector.bench.limits import host_copy, repeat
from kvconnector.bench.options import SEED, WARMUP, BenchOptions
from kvconnector.bench.pools import RankPools
from kvconnector.bench.results import CaseResult, ContenderKind, Measurement, ShowProgress
from kvconnector.bench.shapes import CONVERTIBLE, EngineShape, rank_geometry, with_types
from kvconnector.bench.sizes import format_move
from kvconnector.datapath import Pools
from kvconnector.datapath.pump.copies import program_cap
from kvconnector.ids import Rank
from kvconnector.topology import GroupGeometry
from kvconnector_kernels.relayout import Conversion, PagedSide, relayout, upload_block_ids

HALF = ", beside other kernels"
"""Ends the names of copies with a cap on their programs."""


def run(options: BenchOptions, progress: ShowProgress) -> Sequence[CaseResult]:
    """Return a case for every request size, as if each engine had one rank."""
    engines = with_types(options.model, options.prefill, options.decode)
    unit = math.lcm(*(each.block for each in engines))
    sizes = [-(-tokens // unit) * unit for tokens in options.tokens]
    writer, reader = (
        EngineShape(block=each.block, layout=each.layout).with_elements_of(each) for each in engines
    )
    return [_measure(options, writer, reader, tokens, progress) for tokens in sizes]


def _measure(
    options: BenchOptions,
    writer: EngineShape,
    reader: EngineShape,
    tokens: int,
    progress: ShowProgress,
) -> CaseResult:
    device, *_ = Deployment(options).devices("prefill")
    cuts = " to ".join(f"{each.layout}{each.block}{each.elements}" for each in (writer, reader))
    read, written = (
        _bytes_of(rank_geometry(options.model, each, Rank(0, 0)).groups[0], tokens)
        for each in (writer, reader)
    )
    nbytes = min(read, written)
    case = f"{tokens} tokens, {format_move(read, written)}, {cuts}"
    progress(case)
    measured = [*_fused(options, (writer, reader), tokens, device=device, kind="ours", case=case)]
    is_plain = (writer.dtype, writer.scale) == (reader.dtype, reader.scale)
    if not is_plain:
        plain = (writer, reader.with_elements_of(writer))
        measured += _fused(options, plain, tokens, device=device, kind="variant", case=case)
    limit = "plain copy, one thread" if device == "cpu" else "plain device copy"
    times = _times(_plain_copy(nbytes, device), device, options.iterations)
    notes = () if is_plain else tuple(_costs(measured, writer, reader))
    return CaseResult(case, (*measured, Measurement(limit, "limit", times, nbytes)), notes)


def _bytes_of(group: GroupGeometry, tokens: int) -> int:
    return tokens * len(group.layers) * sum(part.token_bytes for part in group.parts)


def _costs(
    measured: Sequence[Measurement], writer: EngineShape, reader: EngineShape
) -> Iterator[str]:
    """Yield how long converting copies take beside plain ones with as many programs, which follow in `measured`."""
    theirs, ours = (CONVERTIBLE[each.dtype] for each in (writer, reader))
    count = len(measured) // 2
    for converting, plain in zip(measured[:count], measured[count:], strict=True):
        ratio = converting.percentile_s(50) / plain.percentile_s(50)
        yield (
            f"{converting.contender}: {ratio:.2f} of the time without conversion,"
            f" {ratio * 2 * theirs / (theirs + ours):.2f} of it for each byte read and written"
        )


def _fused(
    options: BenchOptions,
    shapes: tuple[EngineShape, EngineShape],
    tokens: int,
    *,
    device: str,
    kind: ContenderKind,
    case: str,
) -> Iterator[Measurement]:
    """Yield the times of a copy between two engines' blocks, after it was compared with what it should write."""
    rng = np.random.default_rng(SEED)
    groups = [rank_geometry(options.model, shape, Rank(0, 0)).groups[0] for shape in shapes]
    pools, block_ids, sides = [], [], []
    for shape, group in zip(shapes, groups, strict=True):
        count = shape.num_blocks(tokens)
        size = SPARE_FACTOR * count
        pool = RankPools(group, shape.layout, num_blocks=size, device=device, written=groups[0])
        ids = choose_blocks(count, size, scattered=options.scattered, rng=rng)
        table = Pools([pool.cache_group()], device).tables[0, 0]
        uploaded = upload_block_ids(ids, num_blocks=size, device=device)
        sides.append(PagedSide(table=table, block_ids=uploaded))
        pools.append(pool)
        block_ids.append(ids)
    num_heads = options.model.num_kv_heads
    conversion = _conversion(groups, num_heads, device)
    what: dict[str, Any] = {
        "conversion": conversion,
        "num_parts": len(pools[0].storage),
        "num_heads": num_heads,
        "num_tokens": tokens,
    }
    copies: dict[str, Callable[[], object]] = {"": partial(relayout, *sides, **what)}
    if device != "cpu":
        from kvconnector_kernels.relayout import relayout_triton

        cap = program_cap(-1, device)
        copies[HALF] = partial(relayout_triton, *sides, max_programs=cap, **what)
    name = "one fused copy" if kind == "ours" else "without conversion"
    nbytes = _bytes_of(groups[1], tokens)
    for end, copy in copies.items():
        pools[0].write(SEED, block_ids[0], tokens)
        pools[1].poison()
        copy()
        if wrong := pools[1].mismatch(SEED, block_ids[1], tokens):
            raise ResultMismatchError(f"relayout, {name}{end}: {wrong}", case=case)
        times = _times(copy, device, options.iterations)
        yield Measurement(name + end, "variant" if end else kind, times, nbytes)


def _conversion(groups: Sequence[GroupGeometry], num_heads: int, device: str) -> Conversion | None:
    """Return how elements change from one engine to the other; None if they stay as they are."""
    theirs, ours = (group.parts[0] for group in groups)
    scales = [group.scales[0][0][0] if group.scales else 1.0 for group in groups]
    if (theirs.element, scales[0]) == (ours.element, scales[1]):
        return None
    rows = len(groups[0].layers) * len(groups[0].parts)
    pairs = np.full((rows, num_heads, 2), scales, np.float32)
    rounding = ours.rounding if ours.element.startswith("float8") else "nearest"
    return Conversion(theirs.element, ours.element, pairs, device, rounding=rounding)


def _plain_copy(nbytes: int, device: str) -> Callable[[], object]:
    if device == "cpu":
        return partial(host_copy(nbytes), nbytes)
    import torch

    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    return partial(torch.zeros_like(source).copy_, source)


def _times(copy: Callable[[], object], device: str, iterations: int) -> tuple[float, ...]:
    """Return the seconds of each call, by a GPU's own clock if it has run there."""
    return repeat(copy, iterations) if device == "cpu" else _gpu_times(device, copy, iterations)


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
