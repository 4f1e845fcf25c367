"""`plan_reads`: what one consumer rank reads from which producer rank, in which chunks.

A rank's `Route` to each producer rank is made once. `plan_reads` puts a request's token ranges on these routes, and
`SourceRead.chunks` cuts one read into messages. A consumer rank sends the ranges, and its producer rank cuts them in
the same way: how chunks are cut is part of the wire's major version (`tests/golden/test_cuts.py`). Block ids are not
needed for that: the copy kernels translate tokens to addresses.

Invariant, tested against `naive.py`: every (group, layer, part, head, token) that the consumer rank owns and the
request asks for is in exactly one chunk of exactly one read. In a context parallel group a rank owns some tokens only.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from kvconnector.errors import GeometryError
from kvconnector.ids import Rank
from kvconnector.layout import ALL_LAYERS
from kvconnector.planning.route import Route, plan_routes
from kvconnector.topology import EngineGeometry, Segment, TpKVTopology

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

MAX_CHUNKS = 1 << 20
"""Of a read. Both sides refuse more before they cut: a chunk costs time and memory on both."""


class Cut(NamedTuple):
    """Edges of a segment's chunks: a chunk lies between two neighbours of `rows` and two neighbours of `tokens`."""

    segment: int
    rows: list[int]
    tokens: list[int]


class SourceRead(msgspec.Struct, frozen=True, eq=False, dict=True):
    """One read on a route: of segment `i` the `rows[i]` of `members[i]` of its stripe. These follow from the route,
    `token_ranges[group]` and `layers` (global indices), so only the latter two travel.

    Where there are no rows, there are no members. Every message has at most `chunk_bytes`. `token_stop` is after the
    last token that is read, in the request's sequence, and `layer_stop` after the last layer, a global index.
    """

    route: Route
    token_ranges: tuple[range, ...]
    layers: range
    chunk_bytes: int
    members: tuple[range, ...]
    rows: tuple[range, ...]
    total_bytes: int
    token_stop: int
    layer_stop: int

    @property
    def source(self) -> Rank:
        """The producer rank, on a consumer rank's route."""
        return self.route.peer

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Those of all reads on the route."""
        return self.route.segments

    @cached_property
    def cuts(self) -> list[Cut]:
        """How the segments that bring something are cut. Chunks are sent cut by cut, and of each row by row."""
        cuts = [self._cut(index) for index, members in enumerate(self.members) if members]
        if self.chunk_bytes > SHORT_CHUNK_BYTES:
            for end in (0, -1):
                self._shorten(cuts[end], end)
        return cuts

    @cached_property
    def num_chunks(self) -> int:
        """How many messages there are."""
        return sum([(len(rows) - 1) * (len(tokens) - 1) for _, rows, tokens in self.cuts])

    @cached_property
    def chunks(self) -> npt.NDArray[np.void]:
        """The messages, of dtype `CHUNK_DTYPE`, in sending order."""
        # few numbers mostly: numpy would take longer to begin than Python takes for all of them
        fields: list[int] = []
        for index, rows, tokens in self.cuts:
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
        tokens_fit = self.chunk_bytes // self.route.here[index].part_token_bytes
        if len(tokens) <= tokens_fit:
            rows_fit, token_edges = tokens_fit // len(tokens), [tokens.start, tokens.stop]
        else:
            align_tokens = self.route.align_tokens[index]
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
        row_bytes = (second - first) * self.route.here[cut.segment].part_token_bytes
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
        """Bytes of every message."""
        chunks = self.chunks
        per_token = np.array([window.part_token_bytes for window in self.route.here])
        nbytes: npt.NDArray[np.int64] = per_token[chunks["segment"]] * chunks["num_parts"]
        nbytes *= chunks["num_tokens"]
        return nbytes


def plan_read(
    route: Route, token_ranges: Sequence[range], *, chunk_bytes: int, layers: range = ALL_LAYERS
) -> SourceRead | None:
    """The read that brings what a route has of `token_ranges[group]` in these layers; None if it has nothing.

    Args:
        route: either side's end of it.
        token_ranges: for each cache group the tokens, in the request's sequence.
        chunk_bytes: the most bytes of a message.
        layers: global indices, a range without steps.

    Raises:
        GeometryError: the number of ranges is not the number of groups, a range has a step, starts below 0 or ends
            above `MAX_TOKENS`, one token of one part exceeds `chunk_bytes`, or there may be more than `MAX_CHUNKS`
            messages.
    """
    _check_ranges(token_ranges, route.num_groups)
    all_members, all_rows = [], []
    nbytes = token_stop = layer_stop = max_chunks = 0
    for segment, window in zip(route.segments, route.here, strict=True):
        rows = segment.rows_of(layers)
        members = segment.stripe.members(token_ranges[segment.group]) if rows else range(0)
        if members:
            tokens_fit = chunk_bytes // window.part_token_bytes
            if not tokens_fit:
                raise GeometryError(
                    "chunk_bytes is smaller than one token of one part",
                    chunk_bytes=chunk_bytes,
                    part_token_bytes=window.part_token_bytes,
                )
            max_chunks += len(rows) * (2 * len(members) // tokens_fit + 2)
            nbytes += len(rows) * len(members) * window.part_token_bytes
            token_stop = max(token_stop, 1 + segment.stripe.token(members[-1]))
            last_layer = segment.layers[rows.stop // segment.num_parts - 1]
            layer_stop = max(layer_stop, 1 + last_layer)
        all_members.append(members)
        all_rows.append(rows)
    if max_chunks > MAX_CHUNKS:
        raise GeometryError(
            "chunk_bytes is too small for a read of this many bytes",
            chunk_bytes=chunk_bytes,
            nbytes=nbytes,
            max_chunks=MAX_CHUNKS,
        )
    if not nbytes:
        return None
    asked = (route, tuple(token_ranges), layers, chunk_bytes)
    return SourceRead(*asked, tuple(all_members), tuple(all_rows), nbytes, token_stop, layer_stop)


def _check_ranges(token_ranges: Sequence[range], num_groups: int) -> None:
    if len(token_ranges) != num_groups:
        raise GeometryError(
            "a request names one token range per cache group",
            ranges=len(token_ranges),
            groups=num_groups,
        )
    for tokens in token_ranges:
        if tokens.step != 1 or tokens.start < 0 or tokens.stop > MAX_TOKENS:
            raise GeometryError(
                "token ranges are contiguous and lie between 0 and max_tokens",
                tokens=tokens,
                max_tokens=MAX_TOKENS,
            )


def plan_reads(
    routes: Iterable[Route],
    token_ranges: Sequence[range],
    *,
    chunk_bytes: int,
    layers: range = ALL_LAYERS,
) -> tuple[SourceRead, ...]:
    """One read for each of a consumer rank's routes that has something of `token_ranges[group]` in these layers:
    together they bring every head of it. Raises GeometryError: as `plan_read`.
    """
    reads = [
        plan_read(route, token_ranges, chunk_bytes=chunk_bytes, layers=layers) for route in routes
    ]
    return tuple(read for read in reads if read is not None)


def plan_transfer(
    consumer: TpKVTopology,
    producer: EngineGeometry,
    token_ranges: Sequence[range],
    *,
    chunk_bytes: int,
) -> tuple[SourceRead, ...]:
    """`plan_routes` and `plan_reads` in one call, for callers that plan once."""
    return plan_reads(plan_routes(consumer, producer), token_ranges, chunk_bytes=chunk_bytes)
