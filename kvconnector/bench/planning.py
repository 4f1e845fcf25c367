"""`plan`: from a request to chunks, against the naive planner."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from kvconnector.bench import ResultMismatchError
from kvconnector.bench.limits import repeat
from kvconnector.bench.options import SEED, BenchOptions
from kvconnector.bench.results import CaseResult, Measurement, Progress
from kvconnector.bench.shapes import EngineShape, engine_geometry
from kvconnector.ids import Rank
from kvconnector.planning import (
    GroupBlocks,
    TransferPlan,
    naive_plan,
    plan_items,
    plan_peer,
    plan_transfer,
)
from kvconnector.topology import EngineGeometry, TpKVTopology

DEFAULT_TOKENS = (512, 20_000, 1_280_000)
DEFAULT_ITERATIONS = 100
NAIVE_ITERATIONS = 3


def run(options: BenchOptions, progress: Progress) -> Sequence[CaseResult]:
    """The first consumer rank's plan; the naive planner's for the first size alone, which takes its time."""
    producer = engine_geometry(options.model, options.prefill or EngineShape(), "prefill")
    decode = engine_geometry(options.model, options.decode or EngineShape(), "decode")
    topology = TpKVTopology(decode, Rank(0, 0))
    group, chunk_bytes = (
        topology.geometry.groups[0],
        options.config("d", "consumer").chunk_bytes("cpu"),
    )
    block, iterations = group.virtual_block_tokens, options.iterations or DEFAULT_ITERATIONS
    peer = plan_peer(topology, producer)
    cases: list[CaseResult] = []
    for tokens in options.tokens or DEFAULT_TOKENS:
        progress(f"{tokens} tokens")
        num_blocks, ranges = -(-tokens // block), [range(tokens)]
        ids = GroupBlocks.of(np.random.default_rng(SEED).permutation(num_blocks).tolist())

        def planned(ids: GroupBlocks = ids, ranges: list[range] = ranges) -> TransferPlan:
            ids.covering(ranges[0], block, what="the blocks")
            return peer.plan(ranges, chunk_bytes=chunk_bytes)

        scratch = partial(plan_transfer, topology, producer, ranges, chunk_bytes=chunk_bytes)
        measured = [
            Measurement("cached peer plan", "ours", repeat(planned, iterations)),
            Measurement("first request of a pair", "variant", repeat(scratch, iterations)),
        ]
        if not cases:
            measured.append(_naive((planned(), scratch()), topology, producer, tokens))
        name = f"{num_blocks} blocks of {block} tokens, {len(planned().reads)} producer ranks"
        cases.append(CaseResult(name, tuple(measured)))
    return cases


def _naive(
    plans: Sequence[TransferPlan], topology: TpKVTopology, producer: EngineGeometry, tokens: int
) -> Measurement:
    """The naive planner's time, once all agree."""
    naive = partial(naive_plan, topology, producer, [range(tokens)])
    expected = sorted(naive())
    if any(sorted(plan_items(plan, topology.geometry)) != expected for plan in plans):
        raise ResultMismatchError("the planner and the naive planner disagree", tokens=tokens)
    times = repeat(lambda: list(naive()), NAIVE_ITERATIONS, warmup=0)
    return Measurement("naive planner", "naive", times)
