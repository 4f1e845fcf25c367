"""`plan`: from a request to chunks, against the naive planner."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvconnector.bench import limits
from kvconnector.bench.contract import (
    Benchmark,
    BenchOptions,
    CaseResult,
    Measurement,
    Progress,
    ResultMismatchError,
)
from kvconnector.bench.shapes import EngineShape, engine_geometry
from kvconnector.config import CPU_CHUNK_BYTES, CUDA_CHUNK_BYTES
from kvconnector.planning import (
    GroupBlocks,
    TransferPlan,
    naive_plan,
    plan_items,
    plan_peer,
    plan_transfer,
)
from kvconnector.topology import EngineGeometry, RankGeometry

DEFAULT_BLOCKS = 80_000
DEFAULT_ITERATIONS = 100
MAX_NAIVE_ITEMS = 100_000


def run(options: BenchOptions, progress: Progress) -> Sequence[CaseResult]:
    """The first consumer rank's plan, for a request of `DEFAULT_BLOCKS` blocks unless tokens are given."""
    prefill = options.prefill or EngineShape()
    decode = options.decode or EngineShape()
    producer = engine_geometry(options.model, prefill, "prefill")
    consumer = engine_geometry(options.model, decode, "decode").ranks[0]
    cases: list[CaseResult] = []
    for tokens in options.tokens or (DEFAULT_BLOCKS * decode.block,):
        progress(f"plan: {tokens} tokens")
        naive = _check_against_naive(options, consumer, producer, tokens)
        cases.append(_measure(options, consumer, producer, decode.block, tokens, naive))
    return cases


def _chunk_bytes(options: BenchOptions) -> int:
    return options.chunk_bytes or (CPU_CHUNK_BYTES if options.device == "cpu" else CUDA_CHUNK_BYTES)


def _check_against_naive(
    options: BenchOptions, consumer: RankGeometry, producer: EngineGeometry, tokens: int
) -> Measurement:
    """The naive planner's time, for as many tokens as it can plan in reason, once both planners agree on them."""
    per_token = len(consumer.layers) * sum(part.num_heads for part in consumer.groups[0].parts)
    few = range(min(tokens, max(1, MAX_NAIVE_ITEMS // per_token)))
    expected = list(naive_plan(consumer, 0, producer, [few]))
    planned = plan_transfer(consumer, 0, producer, [few], chunk_bytes=_chunk_bytes(options))
    if sorted(plan_items(planned, consumer)) != sorted(expected):
        raise ResultMismatchError("the planner and the naive planner disagree", tokens=len(few))
    samples = limits.repeat(
        lambda: list(naive_plan(consumer, 0, producer, [few])), iterations=3, warmup=0
    )
    return Measurement(
        contender=f"naive planner, first {len(few)} tokens only", part="naive", samples_s=samples
    )


def _measure(
    options: BenchOptions,
    consumer: RankGeometry,
    producer: EngineGeometry,
    block: int,
    tokens: int,
    naive: Measurement,
) -> CaseResult:
    chunk_bytes = _chunk_bytes(options)
    counts = {"iterations": options.iterations or DEFAULT_ITERATIONS, "warmup": options.warmup}
    num_blocks = -(-tokens // block)
    ids = np.random.default_rng(options.seed).permutation(num_blocks).astype(np.int32)
    peer = plan_peer(consumer, 0, producer)
    ranges = [range(tokens)]

    def planned() -> TransferPlan:
        GroupBlocks.of(ids).covering(ranges[0], block, what="the blocks")
        return peer.plan(ranges, chunk_bytes=chunk_bytes)

    def cold() -> TransferPlan:
        return plan_transfer(consumer, 0, producer, ranges, chunk_bytes=chunk_bytes)

    for plan in (planned(), cold()):
        _check_coverage(plan, consumer, tokens)
    regions = len(consumer.layers) * len(consumer.groups[0].parts)
    return CaseResult(
        case=(
            f"{num_blocks} blocks of {block} tokens, {regions} regions:"
            f" {num_blocks * regions} block copies, {len(planned().reads)} producer ranks"
        ),
        measurements=(
            Measurement(
                contender="peer plan re-used, block ids checked",
                part="ours",
                samples_s=limits.repeat(planned, **counts),
            ),
            Measurement(
                contender="first request of a pair",
                part="variant",
                samples_s=limits.repeat(cold, **counts),
            ),
            naive,
        ),
        notes=("the naive planner's time grows with the tokens; it is compared as it is",),
    )


def _check_coverage(plan: TransferPlan, consumer: RankGeometry, tokens: int) -> None:
    """Every (layer, part, head) row gets every token exactly once."""
    family = consumer.groups[0].families[0]
    layers = consumer.groups[0].layers
    covered = np.zeros((len(layers), family.num_parts, len(family.head_range)), dtype=np.int64)
    edges: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
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
                edges.setdefault((first_row + row, heads.start, heads.stop), []).append(
                    (start, count)
                )
    for spans in edges.values():
        position = 0
        for start, count in sorted(spans):
            if start != position:
                raise ResultMismatchError("a plan has a gap or an overlap", token=position)
            position = start + count
    if not (covered == tokens).all():
        raise ResultMismatchError("a plan does not cover every head of every layer", tokens=tokens)


BENCHMARK = Benchmark(
    name="plan",
    description="a request's chunks from a cached peer plan, against planning from scratch and the naive planner",
    run=run,
)
