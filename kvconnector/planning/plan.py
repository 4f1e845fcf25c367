"""`plan_transfer`: what one consumer rank reads from which producer rank, in which chunks.

`plan_peer` asks the consumer rank's `TpKVTopology` once for a pair of engines; `PeerPlan.plan` then cuts a request's
token ranges into chunks. Block ids are not needed for that: the copy kernels translate tokens to addresses.

Invariant, tested against `naive.py`: every (group, layer, part, head, token) that the consumer rank owns and the
request asks for is in exactly one chunk of exactly one read. In a context parallel group a rank owns some tokens only.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import lcm
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from kvconnector.errors import GeometryError
from kvconnector.ids import Rank
from kvconnector.layout import ALL_LAYERS, Stripe
from kvconnector.topology import EngineGeometry, GroupGeometry, Segment, TpKVTopology

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

SHORT_CHUNK_BYTES = 16 << 20
"""Nothing travels while a read's first chunk is packed, and while its last one is unpacked: both are halved down to
about this, as far as they have rows. Not further: while a GPU computes, each piece waits for its turn there."""

MAX_TOKENS = int(np.iinfo(np.int32).max)
"""Longest sequence, by the width of a chunk's fields."""


@dataclass(frozen=True, slots=True)
class SourcePlan:
    """The part of a plan that does not depend on the request, for one producer rank.

    `align_tokens[i]` are the member counts at whose multiples chunks of `segments[i]` are best cut, best first: common
    multiples of both sides' block sizes, then those of the larger one, then of the smaller. `token_bytes[i]` are those
    of a token of one row.
    """

    source: Rank
    segments: tuple[Segment, ...]
    align_tokens: tuple[tuple[int, ...], ...]
    token_bytes: tuple[int, ...]


class Cut(NamedTuple):
    """Where chunks of a segment begin and end: all pairs of neighbours among its rows and among its members."""

    segment: int
    rows: list[int]
    tokens: list[int]


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
        cuts = [self._cut(index) for index, members in enumerate(self.members) if members]
        if self.chunk_bytes > SHORT_CHUNK_BYTES:
            for end in (0, -1):
                self._shorten(cuts[end], end)
        # few numbers mostly: numpy would take longer to begin than Python takes for all of them
        fields: list[int] = []
        for index, rows, tokens in cuts:
            pieces = [(token, stop - token) for token, stop in pairwise(tokens)]
            for row, stop in pairwise(rows):
                for piece in pieces:
                    fields += (index, row, stop - row, *piece)
        return np.frombuffer(array("i", fields), CHUNK_DTYPE)

    def _cut(self, index: int) -> Cut:
        """One segment. The first layers come first. A chunk takes as many (layer, part) rows with all tokens as fit;
        where a single row does not fit, rows are cut along tokens, at multiples of the first of `align_tokens` that
        fits: both sides keep whole blocks where that is possible.
        """
        tokens, rows = self.members[index], self.rows[index]
        tokens_fit = self.chunk_bytes // self.plan.token_bytes[index]
        if len(tokens) <= tokens_fit:
            rows_fit, token_edges = tokens_fit // len(tokens), [tokens.start, tokens.stop]
        else:
            align_tokens = self.plan.align_tokens[index]
            step = next((tokens_fit // a * a for a in align_tokens if a <= tokens_fit), tokens_fit)
            first_edge = tokens.start // step * step + step
            rows_fit = 1
            token_edges = [tokens.start, *range(first_edge, tokens.stop, step), tokens.stop]
        return Cut(index, [*range(rows.start, rows.stop, rows_fit), rows.stop], token_edges)

    def _shorten(self, cut: Cut, end: int) -> None:
        """Make the first or the last chunk several, each half as long as its neighbour, down to `SHORT_CHUNK_BYTES` or
        a row. Only chunks with all tokens have several rows.
        """
        edges, (first, second, *_) = cut.rows, cut.tokens
        row_bytes = (second - first) * self.plan.token_bytes[cut.segment]
        at = 1 if end == 0 else len(edges) - 1
        rows = edges[at] - edges[at - 1]
        while rows > 1 and rows * row_bytes > SHORT_CHUNK_BYTES:
            rows //= 2
            if end == 0:
                edges.insert(1, edges[0] + rows)
            else:
                edges.insert(-1, edges[-1] - rows)

    @property
    def chunk_nbytes(self) -> npt.NDArray[np.int64]:
        per_token, chunks = np.array(self.plan.token_bytes), self.chunks
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
            for segment, token_bytes in zip(source.segments, source.token_bytes, strict=True):
                rows = segment.rows_of(layers)
                members = segment.stripe.members(token_ranges[segment.group]) if rows else range(0)
                if members:
                    if token_bytes > chunk_bytes:
                        raise GeometryError(
                            "chunk_bytes is smaller than one token of one part",
                            chunk_bytes=chunk_bytes,
                            part_token_bytes=token_bytes,
                        )
                    nbytes += len(rows) * len(members) * token_bytes
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
            token_bytes=tuple(s.part_token_bytes for s in target.segments),
        )
        for target in consumer.get_target_remote_ranks(producer)
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
