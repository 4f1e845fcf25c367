"""Which physical segments of CUDA memory hold a pool, and where another process maps them. Pure.

CUDA maps memory in two steps: physical segments are created, then mapped into a range of addresses. PyTorch's
expandable segments, vLLM's sleep mode and pools that grow do it this way. A pool may lie in the middle of a segment or
in hundreds of them, of different sizes, and the end of its range may have no memory yet. A segment is mapped whole or
not at all, so a consumer maps all of each, in the same order as the producer, and every part of a pool has one
contiguous range there, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from msgspec import structs

from kvconnector.errors import TransportError
from kvconnector.wire.export import SegmentRun

MAX_MAPPED_SEGMENTS = 20_000
"""The most segments that a consumer maps. A greeting maps all of them, at 0.24 ms each, and the driver does nothing
else in that time. With more, every consumer would give up after `peer_memory.MAP_LIMIT_S`.
"""


def check_num_segments(num_segments: int) -> None:
    """Raise TransportError: memory is in more segments than consumers map."""
    if num_segments > MAX_MAPPED_SEGMENTS:
        raise TransportError(
            "the GPU memory is in too many segments to be mapped while others wait, so it is read packed: allocate it"
            " in larger pieces",
            segments=num_segments,
            most=MAX_MAPPED_SEGMENTS,
        )


@dataclass(frozen=True, slots=True)
class Mapping:
    """A physical segment that is mapped: `nbytes` from `address` in this process."""

    address: int
    nbytes: int

    @property
    def stop(self) -> int:
        """The address after the last byte."""
        return self.address + self.nbytes


@dataclass(frozen=True, slots=True)
class SegmentPlace:
    """Where segment number `index` is: `offset` bytes after the beginning of its area."""

    index: int
    offset: int
    nbytes: int


@dataclass(slots=True)
class Area:
    """Contiguous memory of the producer, `nbytes` from `address` there, and its segments in ascending order."""

    address: int
    nbytes: int = 0
    places: list[SegmentPlace] = field(default_factory=list)


def segments_of(
    ranges: Iterable[tuple[int, int]], segment_at: Callable[[int], Mapping | None]
) -> list[Mapping]:
    """Return the segments that hold some addresses, in ascending order, each once.

    Args:
        ranges: Addresses `(start, stop)`, which may overlap.
        segment_at: Returns the segment around an address, None if no memory is mapped there.

    Returns:
        The segments of each range up to the first address without memory.
    """
    found: list[Mapping] = []
    for start, stop in sorted(ranges):
        address = start
        while address < stop:
            # a range that begins in a known segment begins after all earlier gaps
            segment = found[-1] if found and address < found[-1].stop else segment_at(address)
            if segment is None:
                break
            if not found or segment != found[-1]:
                found.append(segment)
            address = segment.stop
    return found


def runs_of(segments: Iterable[Mapping]) -> tuple[SegmentRun, ...]:
    """Return ascending segments as runs of equal ones that follow each other, which keeps a greeting short."""
    runs: list[SegmentRun] = []
    for each in segments:
        last = runs[-1] if runs else None
        if (
            last is not None
            and last.nbytes == each.nbytes
            and last.address + last.nbytes * last.count == each.address
        ):
            runs[-1] = structs.replace(last, count=last.count + 1)
        else:
            runs.append(SegmentRun(address=each.address, nbytes=each.nbytes, count=1))
    return tuple(runs)


def areas_of(runs: Sequence[SegmentRun]) -> list[Area]:
    """Return where a consumer maps the segments of an export: one area for all that follow each other."""
    areas: list[Area] = []
    index = 0
    for run in runs:
        if not areas or areas[-1].address + areas[-1].nbytes != run.address:
            areas.append(Area(run.address))
        area = areas[-1]
        for _ in range(run.count):
            area.places.append(SegmentPlace(index, area.nbytes, run.nbytes))
            area.nbytes += run.nbytes
            index += 1
    return areas


def num_blocks_inside(
    row: Sequence[int], counts: Sequence[int], memory: Iterable[tuple[int, int]]
) -> int:
    """Return how many of a part's blocks, from block 0 on, are in one piece of memory.

    Args:
        row: The part's row of a part table: its address, and the strides in bytes of blocks, heads, tokens, elements.
        counts: The numbers of blocks, heads, tokens of a block, elements, and the bytes of an element.
        memory: The `(start, stop)` of each piece, joined.
    """
    address, block_stride, *strides = row
    num_blocks, *others, item_bytes = counts
    last = sum(s * (n - 1) for s, n in zip(strides, others, strict=True)) + item_bytes
    for start, stop in memory:
        if start <= address < stop:
            room = stop - address - last
            if room < 0:
                return 0
            return num_blocks if not block_stride else min(num_blocks, room // block_stride + 1)
    return 0
