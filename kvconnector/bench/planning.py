"""`plan`: from a request to chunks, against the naive planner; and what it takes of the engine's thread to start it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvconnector.bench import limits, starting
from kvconnector.bench.contract import (
    Benchmark,
    BenchOptions,
    CaseResult,
    Measurement,
    Progress,
    ResultMismatchError,
)
from kvconnector.bench.report import format_seconds
from kvconnector.bench.shapes import EngineShape, engine_geometry
from kvconnector.config import CPU_CHUNK_BYTES, CUDA_CHUNK_BYTES
from kvconnector.ids import Rank
from kvconnector.planning import (
    GroupBlocks,
    TransferPlan,
    naive_plan,
    plan_items,
    plan_peer,
    plan_transfer,
)
from kvconnector.topology import EngineGeometry, RankGeometry, Stripe, TpKVTopology, own_stripe

DEFAULT_BLOCKS = 80_000
DEFAULT_ITERATIONS = 100
MAX_NAIVE_ITEMS = 100_000


def run(options: BenchOptions, progress: Progress) -> Sequence[CaseResult]:
    """The first consumer rank's plan, and last what starting a request takes of the engines' threads.

    Without tokens: a request of `DEFAULT_BLOCKS` block copies over all regions, and one of that many blocks. First of
    all, as many tokens as the naive planner can plan in reason.
    """
    prefill = options.prefill or EngineShape()
    decode = options.decode or EngineShape()
    producer = engine_geometry(options.model, prefill, "prefill")
    topology = TpKVTopology(engine_geometry(options.model, decode, "decode"), Rank(0, 0))
    consumer = topology.geometry
    regions = len(consumer.layers) * len(consumer.groups[0].parts)
    block = consumer.groups[0].virtual_block_tokens
    defaults = (-(-DEFAULT_BLOCKS // regions) * block, DEFAULT_BLOCKS * block)
    sizes = options.tokens or defaults
    progress("plan: with the naive planner")
    few = min(*sizes, max(1, MAX_NAIVE_ITEMS // (regions * consumer.groups[0].parts[0].num_heads)))
    naive = _check_against_naive(options, topology, producer, few)
    cases = [_measure(options, (topology, producer), block=block, tokens=few, others=(naive,))]
    for tokens in sizes:
        progress(f"plan: {tokens} tokens")
        cases.append(_measure(options, (topology, producer), block=block, tokens=tokens))
    progress("plan: starting a request on the engine's thread")
    cases.append(starting.measure(options))
    return cases


def _chunk_bytes(options: BenchOptions) -> int:
    return options.staging.chunk_bytes or (
        CPU_CHUNK_BYTES if options.device == "cpu" else CUDA_CHUNK_BYTES
    )


def _check_against_naive(
    options: BenchOptions, consumer: TpKVTopology, producer: EngineGeometry, tokens: int
) -> Measurement:
    """The naive planner's time, once both planners agree."""
    ranges = [range(tokens)]
    planned = plan_transfer(consumer, producer, ranges, chunk_bytes=_chunk_bytes(options))
    if sorted(plan_items(planned, consumer.geometry)) != sorted(
        naive_plan(consumer, producer, ranges)
    ):
        raise ResultMismatchError("the planner and the naive planner disagree", tokens=tokens)
    samples = limits.repeat(
        lambda: list(naive_plan(consumer, producer, ranges)), iterations=3, warmup=0
    )
    return Measurement(contender="naive planner", part="naive", samples_s=samples)


def _measure(
    options: BenchOptions,
    engines: tuple[TpKVTopology, EngineGeometry],
    *,
    block: int,
    tokens: int,
    others: tuple[Measurement, ...] = (),
) -> CaseResult:
    consumer, producer = engines
    chunk_bytes = _chunk_bytes(options)
    counts = {"iterations": options.iterations or DEFAULT_ITERATIONS, "warmup": options.warmup}
    num_blocks = -(-tokens // block)
    ids = GroupBlocks.of(np.random.default_rng(options.seed).permutation(num_blocks).tolist())
    peer = plan_peer(consumer, producer)
    ranges = [range(tokens)]

    def planned() -> TransferPlan:
        ids.covering(ranges[0], block, what="the blocks")
        return peer.plan(ranges, chunk_bytes=chunk_bytes)

    def cold() -> TransferPlan:
        return plan_transfer(consumer, producer, ranges, chunk_bytes=chunk_bytes)

    for plan in (planned(), cold()):
        _check_coverage(plan, consumer.geometry, tokens)
    regions = len(consumer.geometry.layers) * len(consumer.geometry.groups[0].parts)
    return CaseResult(
        case=(
            f"{num_blocks} blocks of {block} tokens, {regions} regions:"
            f" {num_blocks * regions} block copies, {len(planned().reads)} producer ranks"
        ),
        measurements=(
            Measurement(
                contender="cached peer plan",
                part="ours",
                samples_s=limits.repeat(planned, **counts),
            ),
            Measurement(
                contender="first request of a pair",
                part="variant",
                samples_s=limits.repeat(cold, **counts),
            ),
            *others,
        ),
    )


def _check_coverage(plan: TransferPlan, consumer: RankGeometry, tokens: int) -> None:
    """Every (layer, part, head) row gets every token that the rank holds exactly once."""
    held = own_stripe(consumer.groups[0].context_parallel).count_below(tokens)
    family = consumer.groups[0].families[0]
    layers = consumer.groups[0].layers
    covered = np.zeros((len(layers), family.num_parts, len(family.head_range)), dtype=np.int64)
    edges: dict[tuple[Stripe, int, int, int], list[tuple[int, int]]] = {}
    for read in plan.reads:
        for chunk in read.chunks:
            segment = read.segments[int(chunk["segment"])]
            first_row = layers.index(segment.layers[0]) * family.num_parts
            heads = slice(
                segment.head_start - family.head_start, segment.head_stop - family.head_start
            )
            start, count = int(chunk["token_start"]), int(chunk["num_tokens"])
            for row in range(
                int(chunk["part_start"]), int(chunk["part_start"] + chunk["num_parts"])
            ):
                layer, part = divmod(first_row + row, family.num_parts)
                covered[layer, part, heads] += count
                where = (segment.stripe, first_row + row, heads.start, heads.stop)
                edges.setdefault(where, []).append((start, count))
    for spans in edges.values():
        position = 0
        for start, count in sorted(spans):
            if start != position:
                raise ResultMismatchError("a plan has a gap or an overlap", token=position)
            position = start + count
    if not (covered == held).all():
        raise ResultMismatchError("a plan does not cover every head of every layer", tokens=held)


def headline(cases: Sequence[CaseResult]) -> str:
    """Our median of every case."""
    told = [f"{case.case.partition(',')[0]} {format_seconds(case.ours.p50_s)}" for case in cases]
    return f"{cases[0].ratios()['naive']:.0f} x the naive speed; {'; '.join(told)}"


BENCHMARK = Benchmark(
    name="plan",
    description="a request's chunks, against planning from scratch and the naive planner; starting it in an engine",
    run=run,
    headline=headline,
)
