"""`plan_transfer`: what one consumer rank reads from which producer rank, in which chunks.

`plan_peer` asks the consumer rank's `TpKVTopology` once for a pair of engines; `PeerPlan.plan` then cuts a request's
token ranges into chunks. Block ids are not needed for that: the copy kernels translate tokens to addresses.

Invariant, tested against `naive.py`: every (group, layer, part, head, token) that the consumer rank owns and the
request asks for is in exactly one chunk of exactly one read. In a context parallel group a rank owns some tokens only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import lcm

import msgspec
import numpy as np
import numpy.typing as npt

from kvconnector.errors import GeometryError
from kvconnector.ids import Rank
from kvconnector.topology import EngineGeometry, GroupGeometry, Segment, Stripe, TpKVTopology
from kvconnector.topology.geometry import MAX_LAYERS

CHUNK_DTYPE = np.dtype(
    [
        ("segment", "<i4"),
        ("part_start", "<i4"),
        ("num_parts", "<i4"),
        ("token_start", "<i4"),
        ("num_tokens", "<i4"),
    ]
)
"""One message. `part_start` counts (layer, part) pairs, layer first, from the segment's first one; `token_start` counts
the members of the segment's stripe."""

_NUM_FIELDS = CHUNK_DTYPE.itemsize // 4
SHORT_CHUNK_BYTES = 16 << 20
"""Nothing travels while a read's first chunk is packed, and while its last one is unpacked: both are halved down to
about this, as far as they have rows. Not further: while a GPU computes, each piece waits for its turn there."""

ALL_LAYERS = range(MAX_LAYERS)
"""By their global indices."""

MAX_TOKENS = int(np.iinfo(np.int32).max)
"""Longest sequence, by the width of a chunk's fields."""


@dataclass(frozen=True, slots=True)
class SourcePlan:
    """The part of a plan that does not depend on the request, for one producer rank.

    `align_tokens[i]` are the member counts at whose multiples chunks of `segments[i]` are best cut, best first: common
    multiples of both sides' block sizes, then those of the larger one, then of the smaller.
    """

    source: Rank
    segments: tuple[Segment, ...]
    align_tokens: tuple[tuple[int, ...], ...]


class SourceRead(msgspec.Struct, frozen=True, eq=False, dict=True):
    """What is read from one producer rank at a time: of `segments[i]` the `rows[i]` of `members[i]` of its stripe.

    Where there are no rows, there are no members. Every message has at most `chunk_bytes`. `token_stop` is behind the
    last token that is read, in the request's sequence, and `layer_stop` behind the last layer, a global index.
    """

    plan: SourcePlan
    members: tuple[range, ...]
    rows: tuple[range, ...]
    chunk_bytes: int
    total_bytes: int
    token_stop: int
    layer_stop: int

    @property
    def source(self) -> Rank:
        """The producer rank."""
        return self.plan.source

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Those of all requests between the two ranks."""
        return self.plan.segments

    @cached_property
    def chunks(self) -> npt.NDArray[np.void]:
        """The messages, of dtype `CHUNK_DTYPE`, in sending order."""
        pieces = [
            cut_segment(
                index,
                segment,
                self.members[index],
                self.rows[index],
                chunk_bytes=self.chunk_bytes,
                align_tokens=self.plan.align_tokens[index],
            )
            for index, segment in enumerate(self.segments)
        ]
        chunks = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        if self.chunk_bytes > SHORT_CHUNK_BYTES:
            chunks = np.concatenate((self._cut_down(chunks[0], shortest_first=True), chunks[1:]))
            last = self._cut_down(chunks[-1], shortest_first=False)
            chunks = np.concatenate((chunks[:-1], last))
        return chunks.view(CHUNK_DTYPE).reshape(-1)

    def _cut_down(
        self, chunk: npt.NDArray[np.int32], *, shortest_first: bool
    ) -> npt.NDArray[np.int32]:
        """One chunk as several, each half as long as the next, down to `SHORT_CHUNK_BYTES` or a row."""
        segment, part_start, rows, token_start, num_tokens = chunk.tolist()
        row_bytes = num_tokens * self.segments[segment].part_token_bytes
        counts: list[int] = []
        while rows > 1 and rows * row_bytes > SHORT_CHUNK_BYTES:
            counts.append(rows - rows // 2)
            rows //= 2
        counts.append(rows)
        if shortest_first:
            counts.reverse()
        pieces = []
        for count in counts:
            pieces.append((segment, part_start, count, token_start, num_tokens))
            part_start += count
        return np.array(pieces, np.int32)

    @property
    def chunk_nbytes(self) -> npt.NDArray[np.int64]:
        per_token, chunks = np.array([s.part_token_bytes for s in self.segments]), self.chunks
        nbytes: npt.NDArray[np.int64] = per_token[chunks["segment"]] * chunks["num_parts"]
        nbytes *= chunks["num_tokens"]
        return nbytes


@dataclass(frozen=True, slots=True)
class PeerPlan:
    """What one consumer rank reads from the ranks of one producer engine, whatever the request. Made once a pair."""

    num_groups: int
    sources: tuple[SourcePlan, ...]

    def plan(
        self, token_ranges: Sequence[range], *, chunk_bytes: int, layers: range = ALL_LAYERS
    ) -> tuple[SourceRead, ...]:
        """The reads that bring `token_ranges[group]` of every head here, in these layers (global indices): one for each
        producer rank that has something for us.

        `chunk_bytes` bounds every message. Raises GeometryError: the number of ranges is not the number of groups, a
        range has a step, starts below 0 or ends above `MAX_TOKENS`, or one token of one part exceeds `chunk_bytes`.
        """
        self._check_ranges(token_ranges)
        reads = []
        for source in self.sources:
            all_members, all_rows = [], []
            nbytes = token_stop = layer_stop = 0
            for segment in source.segments:
                rows = segment.rows_of(layers)
                members = segment.stripe.members(token_ranges[segment.group]) if rows else range(0)
                if members:
                    _tokens_that_fit(segment, chunk_bytes)
                    nbytes += len(rows) * len(members) * segment.part_token_bytes
                    token_stop = max(token_stop, 1 + segment.stripe.token(members[-1]))
                    last_layer = segment.layers[rows.stop // segment.num_parts - 1]
                    layer_stop = max(layer_stop, 1 + last_layer)
                all_members.append(members)
                all_rows.append(rows)
            if nbytes:
                what = (source, tuple(all_members), tuple(all_rows), chunk_bytes)
                reads.append(SourceRead(*what, nbytes, token_stop, layer_stop))
        return tuple(reads)

    def _check_ranges(self, token_ranges: Sequence[range]) -> None:
        if len(token_ranges) != self.num_groups:
            raise GeometryError(
                "a request names one token range per cache group",
                ranges=len(token_ranges),
                groups=self.num_groups,
            )
        for tokens in token_ranges:
            if tokens.step != 1 or tokens.start < 0 or tokens.stop > MAX_TOKENS:
                raise GeometryError(
                    "token ranges are contiguous and lie between 0 and max_tokens",
                    tokens=tokens,
                    max_tokens=MAX_TOKENS,
                )


def plan_peer(consumer: TpKVTopology, producer: EngineGeometry) -> PeerPlan:
    """What a rank reads from each producer rank. Raises IncompatiblePeerError: the producer does not hold all of it."""
    groups, theirs = consumer.geometry.groups, producer.ranks[0].groups
    sources = [
        SourcePlan(
            source=target.rank,
            segments=target.segments,
            align_tokens=tuple(
                _alignments(groups[s.group], theirs[s.group], s.stripe) for s in target.segments
            ),
        )
        for target in consumer.targets(producer)
    ]
    return PeerPlan(num_groups=len(groups), sources=tuple(sources))


def _alignments(ours: GroupGeometry, theirs: GroupGeometry, stripe: Stripe) -> tuple[int, ...]:
    """Members of the stripe in whole (virtual) blocks and whole periods."""
    blocks = (ours.virtual_block_tokens, theirs.virtual_block_tokens)
    tokens = (lcm(size, stripe.period) for size in (lcm(*blocks), *blocks))
    return tuple(sorted({stripe.count_below(count) for count in tokens}, reverse=True))


def plan_transfer(
    consumer: TpKVTopology,
    producer: EngineGeometry,
    token_ranges: Sequence[range],
    *,
    chunk_bytes: int,
) -> tuple[SourceRead, ...]:
    """`plan_peer` and `PeerPlan.plan` in one call, for callers that plan once."""
    return plan_peer(consumer, producer).plan(token_ranges, chunk_bytes=chunk_bytes)


def cut_segment(
    index: int,
    segment: Segment,
    tokens: range,
    rows: range,
    *,
    chunk_bytes: int,
    align_tokens: Sequence[int],
) -> npt.NDArray[np.int32]:
    """Chunks of rows of one segment as int32 rows of `CHUNK_DTYPE`'s fields, which numpy copies faster than records.

    The first layers come first; `tokens` are members of the stripe. A chunk takes as many (layer, part) rows with all
    tokens as fit; where a single row does not fit, rows are cut along tokens, at multiples of the first of
    `align_tokens` that fits: both sides keep whole blocks where that is possible. Raises GeometryError: one token of
    one row exceeds `chunk_bytes`.
    """
    if not tokens:
        return np.empty((0, _NUM_FIELDS), np.int32)
    tokens_fit = _tokens_that_fit(segment, chunk_bytes)
    if len(tokens) <= tokens_fit:
        token_edges = np.array([tokens.start, tokens.stop])
        rows_fit = tokens_fit // len(tokens)
    else:
        step = next((tokens_fit // a * a for a in align_tokens if a <= tokens_fit), tokens_fit)
        first_edge = tokens.start // step * step + step
        token_edges = np.concatenate(
            ([tokens.start], np.arange(first_edge, tokens.stop, step), [tokens.stop])
        )
        rows_fit = 1
    row_starts = np.arange(rows.start, rows.stop, rows_fit)
    # written once, in place: a long request of many layers has tens of thousands of chunks
    chunks = np.empty((len(row_starts), len(token_edges) - 1, _NUM_FIELDS), np.int32)
    chunks[..., 0] = index
    chunks[..., 1] = row_starts[:, None]
    chunks[..., 2] = np.minimum(rows.stop - row_starts, rows_fit)[:, None]
    chunks[..., 3] = token_edges[:-1]
    chunks[..., 4] = token_edges[1:] - token_edges[:-1]
    return chunks.reshape(-1, _NUM_FIELDS)


def _tokens_that_fit(segment: Segment, chunk_bytes: int) -> int:
    tokens_fit = chunk_bytes // segment.part_token_bytes
    if tokens_fit < 1:
        raise GeometryError(
            "chunk_bytes is smaller than one token of one part",
            chunk_bytes=chunk_bytes,
            part_token_bytes=segment.part_token_bytes,
        )
    return tokens_fit
