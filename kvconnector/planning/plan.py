"""`plan_reads`: the reads of one consumer rank from each producer rank, and their chunks.

A rank makes its `Route` to each producer rank once. `plan_reads` intersects a request's token ranges with these routes,
and `SourceRead.chunks` cuts a read into messages. The consumer sends the ranges only, and the producer cuts them in the
same way, so the cuts are part of the wire format's major version (`tests/golden/test_cuts.py`). A plan has no block
ids: the copy kernels translate tokens to addresses.

Invariant, tested against `naive.py`: every (group, layer, part, head, token) that the consumer rank holds and the
request needs is in exactly one chunk of exactly one read. In a context parallel group a rank holds some tokens only.
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
"""One message. `part_start` counts the segment's (layer, part) pairs, layer by layer; `token_start` counts the members
of its stripe."""

SHORT_CHUNK_BYTES = 16 << 20
"""Nothing travels while a read's first chunk is packed or its last one is unpacked, so both are halved until they have
about this size or a single row. Not further: while a GPU computes, each piece waits for its turn there."""

MAX_TOKENS = (1 << 31) - 1
"""The longest sequence that a chunk's fields, which are int32, can address."""

MAX_CHUNKS = 1 << 20
"""The most chunks of a read. Each costs time and memory on both sides, which refuse more before they cut any."""
LEAST_CHUNK_BYTES = 4 << 10
FREE_CHUNKS = 4 << 10
"""A read of more chunks than this needs `LEAST_CHUNK_BYTES` for each of the others, besides those that segments begin
and end with. So a peer that names a tiny chunk makes nobody cut more chunks than its lease is worth.
"""


class Cut(NamedTuple):
    """The edges of a segment's chunks: a chunk lies between two adjacent `rows` and two adjacent `tokens`."""

    segment: int
    rows: list[int]
    tokens: list[int]


class SourceRead(msgspec.Struct, frozen=True, eq=False, dict=True):
    """One read on a route: `rows[i]` (layer, part pairs) and `members[i]` (of the stripe) of each segment `i`. Both
    follow from the route, `token_ranges[group]` and `layers` (global indices), so only the latter two travel.

    A segment without rows has no members either. Every message has at most `chunk_bytes`. `token_stop` and `layer_stop`
    are one more than the last token, in the request's sequence, and the last layer, a global index, that are read. A
    compressed group's ranges and members count its rows, `token_stop` the tokens that these stand for.
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
        """The producer rank to read from."""
        return self.route.peer

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The route's segments, which all of its reads share."""
        return self.route.segments

    @cached_property
    def cuts(self) -> list[Cut]:
        """The cuts of all segments that are read. Chunks are sent cut by cut, within a cut row by row."""
        cuts = [self._cut(index) for index, members in enumerate(self.members) if members]
        if self.chunk_bytes > SHORT_CHUNK_BYTES:
            for end in (0, -1):
                self._shorten(cuts[end], end)
        return cuts

    @cached_property
    def num_chunks(self) -> int:
        """The number of messages."""
        return sum([(len(rows) - 1) * (len(tokens) - 1) for _, rows, tokens in self.cuts])

    @cached_property
    def chunks(self) -> npt.NDArray[np.void]:
        """The messages, of dtype `CHUNK_DTYPE`, in sending order."""
        # usually there are few numbers, for which Python is faster than numpy
        fields: list[int] = []
        for index, rows, tokens in self.cuts:
            pieces = [(token, stop - token) for token, stop in pairwise(tokens)]
            for row, stop in pairwise(rows):
                for piece in pieces:
                    fields += (index, row, stop - row, *piece)
        return np.frombuffer(array("i", fields), CHUNK_DTYPE)

    def _cut(self, index: int) -> Cut:
        """Cut one segment, first layers first. A chunk takes as many (layer, part) rows with all tokens as fit. If a
        single row does not fit, rows are cut along tokens, at multiples of the first of `align_tokens` that fits, so
        that both sides keep whole blocks if possible.
        """
        tokens, rows = self.members[index], self.rows[index]
        tokens_fit = self.chunk_bytes // self.route.here[index].part_token_bytes
        if len(tokens) <= tokens_fit:
            rows_fit, token_edges = tokens_fit // len(tokens), [tokens.start, tokens.stop]
        else:
            step = _step(self.route.align_tokens[index], tokens_fit)
            first_edge = tokens.start // step * step + step
            rows_fit = 1
            token_edges = [tokens.start, *range(first_edge, tokens.stop, step), tokens.stop]
        return Cut(index, [*range(rows.start, rows.stop, rows_fit), rows.stop], token_edges)

    def _shorten(self, cut: Cut, end: int) -> None:
        """Split the first or the last chunk: each piece has half the rows of the next one inwards, down to
        `SHORT_CHUNK_BYTES` or one row. Only chunks with all tokens have several rows.
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
        """The size of every message in bytes, int64 `[num_chunks]`."""
        chunks = self.chunks
        per_token = np.array([window.part_token_bytes for window in self.route.here])
        nbytes: npt.NDArray[np.int64] = per_token[chunks["segment"]] * chunks["num_parts"]
        nbytes *= chunks["num_tokens"]
        return nbytes


def plan_read(
    route: Route, token_ranges: Sequence[range], *, chunk_bytes: int, layers: range = ALL_LAYERS
) -> SourceRead | None:
    """Return the read of everything that a route has of `token_ranges[group]` in these layers; None if it has nothing.

    Args:
        route: Either side's end of the route.
        token_ranges: The tokens of each cache group that both ranks have, in the request's sequence.
        chunk_bytes: The largest size of a message.
        layers: Global layer indices, a range without steps.

    Raises:
        GeometryError: there is not one range per group; a range has a step, starts below 0 or ends above `MAX_TOKENS`;
            one token of one part exceeds `chunk_bytes`; or there may be more messages than `FREE_CHUNKS` and
            `MAX_CHUNKS` allow.
    """
    _check_ranges(token_ranges, route.num_groups)
    return _planned(route, token_ranges, chunk_bytes=chunk_bytes, layers=layers)


def _planned(
    route: Route, token_ranges: Sequence[range], *, chunk_bytes: int, layers: range
) -> SourceRead | None:
    all_members, all_rows = [], []
    nbytes = token_stop = layer_stop = max_chunks = 0
    segments = zip(route.segments, route.here, route.align_tokens, strict=True)
    for segment, window, align_tokens in segments:
        rows = segment.rows_of(layers)
        members = segment.stripe.members(token_ranges[segment.group]) if rows else range(0)
        if members:
            tokens_fit = chunk_bytes // window.part_token_bytes
            if not tokens_fit:
                raise GeometryError(
                    "chunk_bytes is smaller than one token, or one state, of one part: raise staging.chunk_bytes,"
                    " for `kvconnector plan` its option --chunk",
                    chunk_bytes=chunk_bytes,
                    part_token_bytes=window.part_token_bytes,
                )
            max_chunks += _most_chunks(len(rows), len(members), tokens_fit, align_tokens)
            nbytes += len(rows) * len(members) * window.part_token_bytes
            row_stop = 1 + segment.stripe.token(members[-1])
            token_stop = max(token_stop, row_stop * route.row_tokens[segment.group])
            last_layer = segment.layers[rows.stop // segment.num_parts - 1]
            layer_stop = max(layer_stop, 1 + last_layer)
        all_members.append(members)
        all_rows.append(rows)
    allowed = min(MAX_CHUNKS, FREE_CHUNKS + 4 * len(all_rows) + nbytes // LEAST_CHUNK_BYTES)
    if max_chunks > allowed:
        raise GeometryError(
            "chunk_bytes is too small for a read of this many bytes",
            chunk_bytes=chunk_bytes,
            nbytes=nbytes,
            max_chunks=allowed,
        )
    if not nbytes:
        return None
    asked = (route, tuple(token_ranges), layers, chunk_bytes)
    return SourceRead(*asked, tuple(all_members), tuple(all_rows), nbytes, token_stop, layer_stop)


def _step(align_tokens: Sequence[int], tokens_fit: int) -> int:
    """Return the number of tokens of a chunk that has a part of a row: as many as fit, in whole blocks if possible."""
    return next((tokens_fit // a * a for a in align_tokens if a <= tokens_fit), tokens_fit)


def _most_chunks(
    num_rows: int, num_tokens: int, tokens_fit: int, align_tokens: Sequence[int]
) -> int:
    """Return an upper bound on the number of a segment's chunks, before the first and the last of a read are split."""
    if num_tokens <= tokens_fit:
        return -(-num_rows // (tokens_fit // num_tokens))
    return num_rows * (num_tokens // _step(align_tokens, tokens_fit) + 2)


def _check_ranges(token_ranges: Sequence[range], num_groups: int) -> None:
    if len(token_ranges) != num_groups:
        raise GeometryError(
            "a request needs one token range per cache group",
            ranges=len(token_ranges),
            groups=num_groups,
        )
    for tokens in token_ranges:
        if tokens.step != 1 or tokens.start < 0 or tokens.stop > MAX_TOKENS:
            raise GeometryError(
                "token ranges must be contiguous and lie between 0 and max_tokens",
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
    """Return a read for each of a consumer rank's routes that has some of `token_ranges[group]` in these layers.
    Together they bring all heads. Optional cache groups that the producer lacks are not read. The ranges, one for each
    of the consumer's cache groups, were checked with the load's blocks. Raises GeometryError: `chunk_bytes` is too
    small, see `plan_read`.
    """
    reads = [
        _planned(route, token_ranges[: route.num_groups], chunk_bytes=chunk_bytes, layers=layers)
        for route in routes
    ]
    return tuple(read for read in reads if read is not None)


def plan_transfer(
    consumer: TpKVTopology,
    producer: EngineGeometry,
    token_ranges: Sequence[range],
    *,
    chunk_bytes: int,
) -> tuple[SourceRead, ...]:
    """Call `plan_routes` and `plan_reads`, for callers that plan only once.

    Raises:
        IncompatiblePeerError: see `plan_routes`.
        GeometryError: see `plan_read`.
    """
    _check_ranges(token_ranges, len(consumer.geometry.groups))
    return plan_reads(plan_routes(consumer, producer), token_ranges, chunk_bytes=chunk_bytes)
