"""`plan`: from a request to chunks, against the naive planner."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from kvconnector.bench import ResultMismatchError
from kvconnector.bench.limits import repeat
from kvconnector.bench.options import SEED, BenchOptions
from kvconnector.bench.results import (
    CaseResult,
    ContenderKind,
    Measurement,
    Progress,
)
from kvconnector.bench.shapes import EngineShape, engine_geometry
from kvconnector.ids import Rank
from kvconnector.planning import (
    GroupBlocks,
    PeerPlan,
    TransferPlan,
    naive_plan,
    plan_items,
    plan_peer,
    plan_transfer,
)
from kvconnector.topology import EngineGeometry, TpKVTopology

DEFAULT_BLOCKS = 80_000
DEFAULT_ITERATIONS = 100
MAX_NAIVE_ITEMS = 100_000
NAIVE_ITERATIONS = 3


def run(options: BenchOptions, progress: Progress) -> Sequence[CaseResult]:
    """The first consumer rank's plan. First of all for as many tokens as the naive planner can plan in reason; without
    `--tokens` then for `DEFAULT_BLOCKS` block copies over all regions, and for that many blocks.
    """
    producer = engine_geometry(options.model, options.prefill or EngineShape(), "prefill")
    decode = engine_geometry(options.model, options.decode or EngineShape(), "decode")
    topology = TpKVTopology(decode, Rank(0, 0))
    consumer, chunk_bytes = topology.geometry, options.config("d", "consumer").chunk_bytes("cpu")
    regions = len(consumer.groups[0].layers) * len(consumer.groups[0].parts)
    block = consumer.groups[0].virtual_block_tokens
    sizes = options.tokens or (-(-DEFAULT_BLOCKS // regions) * block, DEFAULT_BLOCKS * block)
    few = min(*sizes, max(1, MAX_NAIVE_ITEMS // (regions * consumer.groups[0].parts[0].num_heads)))
    iterations = options.iterations or DEFAULT_ITERATIONS
    cases: list[CaseResult] = []
    for tokens in (few, *sizes):
        progress(f"{tokens} tokens")
        num_blocks = -(-tokens // block)
        ids = GroupBlocks.of(np.random.default_rng(SEED).permutation(num_blocks).tolist())
        peer = plan_peer(topology, producer)
        ranges = [range(tokens)]
        planned = partial(_plan, peer, ids, block, ranges, chunk_bytes=chunk_bytes)
        scratch = partial(plan_transfer, topology, producer, ranges, chunk_bytes=chunk_bytes)
        measured = [
            _measured("cached peer plan", "ours", repeat(planned, iterations)),
            _measured("first request of a pair", "variant", repeat(scratch, iterations)),
        ]
        if not cases:
            measured.append(_naive((planned(), scratch()), topology, producer, tokens))
        cases.append(
            CaseResult(
                case=(
                    f"{num_blocks} blocks of {block} tokens, {regions} regions:"
                    f" {num_blocks * regions} block copies, {len(planned().reads)} producer ranks"
                ),
                measurements=tuple(measured),
            )
        )
    return cases


def _plan(
    peer: PeerPlan, ids: GroupBlocks, block: int, ranges: list[range], *, chunk_bytes: int
) -> TransferPlan:
    ids.covering(ranges[0], block, what="the blocks")
    return peer.plan(ranges, chunk_bytes=chunk_bytes)


def _naive(
    plans: Sequence[TransferPlan], topology: TpKVTopology, producer: EngineGeometry, tokens: int
) -> Measurement:
    """The naive planner's time, once all agree."""
    naive = partial(naive_plan, topology, producer, [range(tokens)])
    expected = sorted(naive())
    if any(sorted(plan_items(plan, topology.geometry)) != expected for plan in plans):
        raise ResultMismatchError("the planner and the naive planner disagree", tokens=tokens)
    times = repeat(lambda: list(naive()), NAIVE_ITERATIONS, warmup=0)
    return _measured("naive planner", "naive", times)


def _measured(name: str, kind: ContenderKind, samples_s: tuple[float, ...]) -> Measurement:
    return Measurement(contender=name, kind=kind, samples_s=samples_s)
