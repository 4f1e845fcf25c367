"""Hypothesis strategies for what engines hold, what they ask of each other, and what they say.

Two engines of one drawn `ModelShape` can exchange blocks, however differently they are cut. Sizes are small: what
matters is every relation between two sizes (divides, does not divide, equal, one is one), not large numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from hypothesis import strategies as st

from kvconnector.ids import Rank
from kvconnector.topology import (
    EngineGeometry,
    GroupGeometry,
    ModelDescription,
    PartGeometry,
    RankGeometry,
    owned_heads,
)
from kvconnector.wire import messages as m
from kvconnector.wire.export import (
    IPC_HANDLE_BYTES,
    NONCE_BYTES,
    ExportedTable,
    IpcAllocation,
    PoolExport,
)

T = TypeVar("T")

MAX_TP = 8
MAX_PP = 4
MAX_LAYERS = 7
MAX_HEADS = 9
MAX_BLOCK_TOKENS = 24
MAX_TOKENS = 60


@dataclass(frozen=True, slots=True)
class PartShape:
    """One part of a layer, before it is cut: `total_heads` heads of `head_dim` elements."""

    name: str
    total_heads: int
    head_dim: int
    item_size_bytes: int


@dataclass(frozen=True, slots=True)
class GroupShape:
    """One cache group of a model: its layers and parts."""

    layers: tuple[int, ...]
    parts: tuple[PartShape, ...]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What all engines of one model agree on."""

    num_layers: int
    groups: tuple[GroupShape, ...]


@dataclass(frozen=True, slots=True)
class Transfer:
    """One consumer rank's load: token `token_ranges[group]` of everything it holds, in chunks of `chunk_bytes`."""

    consumer_engine: EngineGeometry
    consumer: RankGeometry
    producer: EngineGeometry
    token_ranges: tuple[range, ...]
    chunk_bytes: int

    @property
    def spread(self) -> int:
        """The consumer's number for the choice among replicas."""
        return self.consumer.rank.global_rank(self.consumer_engine.tp_size)


def cut_engine(
    shape: ModelShape,
    *,
    engine_id: str,
    stages: Sequence[Sequence[int]],
    block_sizes: Sequence[int],
    tp_size: int,
    splits: Sequence[Sequence[range]] | None = None,
) -> EngineGeometry:
    """An engine of `shape`: `stages[pp_rank]` are layers, `splits[head_count_index][tp_rank]` heads.

    `splits` follows the distinct head counts of the model in ascending order; left out, heads are split as
    `owned_heads` does. No part of a rank's holding is ever empty, except that a stage may lack a group's layers.
    """
    counts = head_counts(shape)
    if splits is None:
        splits = [[owned_heads(n, tp, tp_size) for tp in range(tp_size)] for n in counts]
    ranks = tuple(
        RankGeometry(
            pp_rank=pp_rank,
            tp_rank=tp_rank,
            groups=tuple(
                GroupGeometry(
                    block_size=block_size,
                    layers=tuple(layer for layer in group.layers if layer in layers),
                    parts=tuple(
                        _part(part, splits[counts.index(part.total_heads)][tp_rank])
                        for part in group.parts
                    ),
                )
                for group, block_size in zip(shape.groups, block_sizes, strict=True)
            ),
        )
        for pp_rank, layers in enumerate(stages)
        for tp_rank in range(tp_size)
    )
    return EngineGeometry(
        engine_id=engine_id,
        tp_size=tp_size,
        pp_size=len(stages),
        model=ModelDescription(model="m", dtype="bfloat16", num_layers=shape.num_layers),
        ranks=ranks,
    )


def head_counts(shape: ModelShape) -> list[int]:
    """The distinct head counts of a model's parts, ascending."""
    return sorted({part.total_heads for group in shape.groups for part in group.parts})


def _part(part: PartShape, heads: range) -> PartGeometry:
    return PartGeometry(
        name=part.name,
        total_heads=part.total_heads,
        head_start=heads.start,
        head_stop=heads.stop,
        head_dim=part.head_dim,
        item_size_bytes=part.item_size_bytes,
    )


@st.composite
def part_shapes(draw: st.DrawFn) -> tuple[PartShape, ...]:
    """Parts of one group: K and V alike, K and V of different head sizes, an MLA latent, or a recurrent state."""
    kind = draw(st.sampled_from(["kv", "unequal kv", "latent", "state"]))
    heads = draw(st.integers(1, MAX_HEADS))
    dim = draw(st.integers(1, 4))
    item_size = draw(st.sampled_from([1, 2, 4]))
    if kind == "latent":
        return (PartShape("latent", 1, dim, item_size),)
    if kind == "state":
        channels = draw(st.integers(1, MAX_HEADS))
        return (PartShape("conv", channels, 1, 2), PartShape("ssm", heads, dim, 4))
    dim_of_v = dim if kind == "kv" else dim + 1
    return (PartShape("k", heads, dim, item_size), PartShape("v", heads, dim_of_v, item_size))


@st.composite
def model_shapes(draw: st.DrawFn) -> ModelShape:
    """Models of one to three cache groups. A layer is in at least one group; every group has a layer."""
    num_layers = draw(st.integers(1, MAX_LAYERS))
    num_groups = draw(st.integers(1, 3))
    some_layers = st.sets(st.integers(0, num_layers - 1), min_size=1)
    members = [draw(some_layers) for _ in range(num_groups)]
    members[0] |= set(range(num_layers)) - set().union(*members)
    return ModelShape(
        num_layers=num_layers,
        groups=tuple(GroupShape(tuple(sorted(layers)), draw(part_shapes())) for layers in members),
    )


@st.composite
def pipeline_stages(draw: st.DrawFn, num_layers: int) -> list[list[int]]:
    """Layers of each stage: contiguous and uneven, or dealt out in any way. No stage is without a layer."""
    pp_size = draw(st.integers(1, min(MAX_PP, num_layers)))
    inner = st.lists(
        st.integers(1, max(num_layers - 1, 1)),
        min_size=pp_size - 1,
        max_size=pp_size - 1,
        unique=True,
    )
    cuts = [0, *sorted(draw(inner)), num_layers]
    order = list(range(num_layers))
    if draw(st.booleans()):
        order = draw(st.permutations(order))
    return [sorted(order[a:b]) for a, b in pairwise(cuts)]


@st.composite
def head_splits(draw: st.DrawFn, total_heads: int, tp_size: int) -> list[range]:
    """Heads of each rank: as `owned_heads` says, or any intervals that cover all heads, overlapping or not."""
    if draw(st.booleans()):
        return [owned_heads(total_heads, tp_rank, tp_size) for tp_rank in range(tp_size)]
    size = tp_size - 1
    inner = draw(st.lists(st.integers(0, total_heads), min_size=size, max_size=size))
    cuts = [0, *sorted(inner), total_heads]
    split = []
    for start, stop in pairwise(cuts):
        more = draw(st.integers(0, 2))
        first = max(min(start, total_heads - 1) - more, 0)
        split.append(range(first, min(max(stop, first + 1) + more, total_heads)))
    return split


@st.composite
def engines(
    draw: st.DrawFn, shape: ModelShape, *, engine_id: str = "engine", even_heads: bool = False
) -> EngineGeometry:
    """Engines of `shape`: TP 1 to 8, PP 1 to 4, a block size for every group.

    `even_heads` splits heads as `owned_heads` does; without it, other covers are drawn too.
    """
    tp_size = draw(st.integers(1, MAX_TP))
    splits = None
    if not even_heads:
        splits = [draw(head_splits(count, tp_size)) for count in head_counts(shape)]
    return cut_engine(
        shape,
        engine_id=engine_id,
        stages=draw(pipeline_stages(shape.num_layers)),
        block_sizes=[draw(st.integers(1, MAX_BLOCK_TOKENS)) for _ in shape.groups],
        tp_size=tp_size,
        splits=splits,
    )


@st.composite
def engine_pairs(
    draw: st.DrawFn, *, even_heads: bool = False
) -> tuple[EngineGeometry, EngineGeometry]:
    """A consumer engine and a producer engine of one model, cut independently."""
    shape = draw(model_shapes())
    return (
        draw(engines(shape, engine_id="consumer", even_heads=even_heads)),
        draw(engines(shape, engine_id="producer", even_heads=even_heads)),
    )


def ranks(engine: EngineGeometry) -> st.SearchStrategy[Rank]:
    """Ranks of an engine."""
    return st.sampled_from([rank.rank for rank in engine.ranks])


@st.composite
def token_ranges(draw: st.DrawFn) -> range:
    """What is missing of one group: empty, or tokens that start and end anywhere in blocks."""
    start = draw(st.integers(0, MAX_TOKENS))
    return range(start, start + draw(st.integers(0, MAX_TOKENS)))


@st.composite
def transfers(draw: st.DrawFn) -> Transfer:
    """Loads that can be planned: `chunk_bytes` holds at least one token of the consumer's widest part."""
    consumer_engine, producer = draw(engine_pairs())
    consumer = consumer_engine.rank_geometry(draw(ranks(consumer_engine)))
    widest = max(part.token_bytes for group in consumer.groups for part in group.parts)
    return Transfer(
        consumer_engine=consumer_engine,
        consumer=consumer,
        producer=producer,
        token_ranges=tuple(draw(token_ranges()) for _ in consumer.groups),
        chunk_bytes=draw(st.integers(widest, widest * draw(st.sampled_from([2, 30, 2000])))),
    )


# lone surrogates are no text that could be sent
_characters = st.characters(exclude_categories=["Cs"])
_ids = st.text(_characters, min_size=1, max_size=12)
_texts = st.text(_characters, max_size=12)
_secrets = st.text("0123456789abcdef", min_size=32, max_size=32)
_indices = st.integers(0, (1 << 31) - 1)
_tags = st.integers(0, (1 << 62) - 1)
_refusals = st.sampled_from(m.Refusal)
_bytes = st.binary(max_size=40)


def _tuples_of(elements: st.SearchStrategy[T]) -> st.SearchStrategy[tuple[T, ...]]:
    return st.lists(elements, max_size=4).map(tuple)


def _geometries() -> st.SearchStrategy[EngineGeometry]:
    return model_shapes().flatmap(engines)


_entries = st.builds(
    m.WorkerEntry,
    pp_rank=_indices,
    tp_rank=_indices,
    control_address=_ids,
    public_key=st.text(_characters, max_size=40),
    incarnation=_ids,
)
_segments = st.builds(
    m.ReadSegment,
    group=_indices,
    family=_indices,
    first_layer=_indices,
    num_layers=_indices,
    head_start=_indices,
    head_stop=_indices,
    order=st.sampled_from(["HND", "NHD", "HDN"]),
)
_blocks = st.builds(m.ReadBlocks, first_block=_indices, block_ids=_bytes)
_keys = st.builds(m.TransferKey, transfer_id=_ids, secret=_secrets)
_addresses = st.integers(0, (1 << 63) - 1)
_counts = st.integers(1, (1 << 31) - 1)
_exports = st.builds(
    PoolExport,
    pid=_counts,
    nonce_address=_addresses,
    nonce=st.binary(min_size=NONCE_BYTES, max_size=NONCE_BYTES),
    board_address=_addresses,
    num_buckets=st.integers(1, 1 << 20),
    device=st.sampled_from(["cpu", "cuda"]),
    tables=_tuples_of(
        st.builds(
            ExportedTable,
            group=_indices,
            family=_indices,
            rows=_bytes,
            num_blocks=_counts,
            block_size=_counts,
            num_heads=_counts,
            head_dim=_counts,
            item_size_bytes=_counts,
        )
    ),
    gpu_uuid=_texts,
    allocations=_tuples_of(
        st.builds(
            IpcAllocation,
            handle=st.binary(min_size=IPC_HANDLE_BYTES, max_size=IPC_HANDLE_BYTES),
            address=_addresses,
            nbytes=_counts,
        )
    ),
)

MESSAGES: dict[type[m.Message], st.SearchStrategy[m.Message]] = {
    m.DirectoryRequest: st.builds(m.DirectoryRequest, engine_id=_ids),
    m.Directory: st.builds(m.Directory, geometry=_geometries(), workers=_tuples_of(_entries)),
    m.DirectoryRefused: st.builds(m.DirectoryRefused, refusal=_refusals, text=_texts),
    m.Hello: st.builds(
        m.Hello,
        geometry=_geometries(),
        pp_rank=_indices,
        tp_rank=_indices,
        incarnation=_ids,
        transport_address=_bytes,
        warm_up_tag=_tags,
        warm_up_bytes=_indices,
        library_version=_texts,
    ),
    m.HelloReply: st.builds(
        m.HelloReply,
        incarnation=_ids,
        refusal=st.none() | _refusals,
        text=_texts,
        transport_address=_bytes,
        max_chunk_bytes=_indices,
        export=st.none() | _exports,
    ),
    m.Read: st.builds(
        m.Read,
        transfer_id=_ids,
        secret=_secrets,
        read_id=_tags,
        incarnation=_ids,
        segments=_tuples_of(_segments),
        chunks=_bytes,
        blocks=_tuples_of(_blocks),
        window=st.integers(1, 1024),
        first_tag=_tags,
    ),
    m.ReadRefused: st.builds(m.ReadRefused, read_id=_tags, refusal=_refusals, text=_texts),
    m.ReadEnded: st.builds(
        m.ReadEnded, read_id=_tags, sent_chunks=_indices, refusal=_refusals, text=_texts
    ),
    m.CancelRead: st.builds(m.CancelRead, read_id=_tags),
    m.Done: st.builds(m.Done, transfer_id=_ids, secret=_secrets),
    m.Abort: st.builds(m.Abort, transfer_id=_ids, secret=_secrets),
    m.Heartbeat: st.builds(m.Heartbeat, transfers=_tuples_of(_keys)),
    m.HeartbeatReply: st.just(m.HeartbeatReply()),
    m.Bye: st.builds(m.Bye, text=_texts),
}
"""Valid messages, by type: any values, of which only an engine's geometry makes sense as a whole."""


def messages() -> st.SearchStrategy[m.Message]:
    """Valid messages of all types."""
    return st.one_of(*MESSAGES.values())
