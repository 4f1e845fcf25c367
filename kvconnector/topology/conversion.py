"""Elements whose type or scales differ between two engines: which of them are converted on the way, and why others are
not.

Elements are converted if their type is one of `geometry.ELEMENTS`. All others are opaque bytes: planes of values and
scales, packed formats, states. If such a part states a type, the other engine's must be the same. An fp8 number times
its scale is its value; the group states the scales. The conversion is part of a copy: that of a direct read, or the one
at either end of a packed read, so that chunks are sent in the narrower type.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
import numpy.typing as npt

from kvconnector.topology.geometry import (
    ELEMENTS,
    FP8_ELEMENTS,
    ROUNDINGS,
    EngineGeometry,
    GroupGeometry,
    PartGeometry,
    lone_layers,
    scales_of,
)
from kvconnector.topology.segments import Segment

_CACHE_DTYPES = {
    "bf16": "bfloat16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
"""Names that engines use for cache types, where these are not the names of element types."""


@dataclass(frozen=True, slots=True, eq=False)
class SegmentConversion:
    """How a segment's elements change type. `scales` is float32 `[row, head, 2]` over its (layer, part) rows and heads:
    the producer's scale, then the consumer's. `rounding` is the consumer's rule. `when_packing`: the producer converts
    packed reads.
    """

    src_element: str
    dst_element: str
    scales: npt.NDArray[np.float32]
    when_packing: bool
    rounding: str = "nearest"


def segment_conversion(
    segment: Segment, src: GroupGeometry, dst: GroupGeometry
) -> SegmentConversion | None:
    """Return how a segment is converted between a producer rank's group and a consumer rank's, for which `obstacle`
    found none; None if its elements are copied unchanged.
    """
    families = src.families[segment.family], dst.families[segment.family]
    theirs, ours = (family.element for family in families)
    if not theirs or not ours:
        return None
    scales = [_segment_scales(segment, group) for group in (src, dst)]
    if theirs == ours:
        stated = [each for each in scales if each is not None]
        if len(stated) < 2 or np.array_equal(stated[0], stated[1]):
            return None
    shape = len(segment.layers) * segment.num_parts, segment.head_stop - segment.head_start
    found = [np.ones(shape, np.float32) if each is None else each for each in scales]
    when_packing = families[1].item_size_bytes <= families[0].item_size_bytes
    # numbers of other types are rounded to nearest, whatever their part states
    rounding = families[1].rounding if ours in FP8_ELEMENTS else "nearest"
    return SegmentConversion(theirs, ours, np.stack(found, axis=2), when_packing, rounding)


def _segment_scales(segment: Segment, group: GroupGeometry) -> npt.NDArray[np.float32] | None:
    """Return the scales `[row, head]` of a group's fp8 numbers in a segment; None if it has none."""
    family = group.families[segment.family]
    if family.element not in FP8_ELEMENTS or not group.scales:
        return None
    heads = slice(segment.head_start - family.head_start, segment.head_stop - family.head_start)
    first = group.layers.index(segment.layers[0])
    rows = [
        np.broadcast_to(np.array(layer[part], np.float32), family.num_heads)[heads]
        for layer in group.scales[first : first + len(segment.layers)]
        for part in family.part_indices
    ]
    return np.stack(rows)


def is_converted(ours: EngineGeometry, theirs: EngineGeometry, index: int) -> bool:
    """Return True if a cache group's numbers differ between two engines, and are converted on the way."""
    return numbers_differ(ours, theirs, index) and not obstacle(ours, theirs, index)


def numbers_differ(ours: EngineGeometry, theirs: EngineGeometry, index: int) -> bool:
    """Return True if a cache group's elements differ in size, type or scale between two engines. A value that one
    engine does not state counts as equal.
    """
    lone = lone_layers(ours, theirs, index)
    stated = [scales_of(engine, index, lone) for engine in (ours, theirs)]
    return (all(stated) and stated[0] != stated[1]) or any(
        mine.item_size_bytes != other.item_size_bytes
        or (mine.element and other.element and mine.element != other.element)
        for mine, other in _pairs(ours, theirs, index)
    )


def obstacle(ours: EngineGeometry, theirs: EngineGeometry, index: int) -> str:
    """Return why a cache group's numbers cannot be converted between two engines, as a clause; "" if they can."""
    for engine in (ours, theirs):
        if reason := _own_obstacle(engine, index):
            return reason
    for mine, other in _pairs(ours, theirs, index):
        if mine.element != other.element and {mine.element, other.element}.isdisjoint(FP8_ELEMENTS):
            return f"{mine.element} and {other.element} are not converted, since neither is fp8"
    families = [
        [family.part_indices for family in engine.ranks[0].groups[index].families]
        for engine in (ours, theirs)
    ]
    if families[0] != families[1]:
        return "parts of one size in one engine have several sizes in the other"
    for engine in (ours, theirs):
        if not engine.converts:
            return f"convert=never in {engine.engine_id}"
    return ""


def _own_obstacle(engine: EngineGeometry, index: int) -> str:
    """Return why numbers of a cache group of one engine cannot be converted, no matter what the other engine has."""
    name, group = engine.engine_id, engine.ranks[0].groups[index]
    if unknown := [part.name for part in group.parts if part.element not in ELEMENTS]:
        return f"the elements of {', '.join(unknown)} in {name} have no type that can be converted"
    kinds = [
        {(group.parts[i].element, group.parts[i].rounding) for i in family.part_indices}
        for family in group.families
    ]
    if any(len(family) > 1 for family in kinds):
        return f"parts of one size have several types, or are rounded by several rules, in {name}"
    if {*FP8_ELEMENTS}.isdisjoint(part.element for part in group.parts):
        return ""
    if not _are_scales_known(engine, index):
        return f"{name} does not state a scale above 0 for each part of its fp8 numbers"
    if rules := _unknown_rules(engine, index):
        return f"{name} stores fp8 by a rule that is not known here ({', '.join(rules)})"
    return ""


def elements_text(engine: EngineGeometry, index: int) -> str:
    """Return a cache group's types as text for people, such as "bfloat16"."""
    parts = engine.ranks[0].groups[index].parts
    return " and ".join(
        dict.fromkeys(part.element or f"{part.item_size_bytes} bytes" for part in parts)
    )


def explains(dtype: str, engine: EngineGeometry, indices: Sequence[int]) -> bool:
    """Return True if an engine's `ModelDescription.dtype` states only the type of these groups' elements."""
    element = _CACHE_DTYPES.get(dtype, dtype)
    return any(
        part.element == element for index in indices for part in engine.ranks[0].groups[index].parts
    )


def _pairs(
    ours: EngineGeometry, theirs: EngineGeometry, index: int
) -> list[tuple[PartGeometry, PartGeometry]]:
    return list(
        zip(ours.ranks[0].groups[index].parts, theirs.ranks[0].groups[index].parts, strict=False)
    )


def _unknown_rules(engine: EngineGeometry, index: int) -> list[str]:
    """Return the rules of a group's fp8 parts, of any rank, that are not known here."""
    held = [part for stage in engine.holdings for groups in stage for part in groups[index].parts]
    return sorted({p.rounding for p in held if p.element in FP8_ELEMENTS} - {*ROUNDINGS})


def _are_scales_known(engine: EngineGeometry, index: int) -> bool:
    held = [groups[index] for stage in engine.holdings for groups in stage]
    return all(
        bool(group.scales) and all(0 < s < inf for layer in group.scales for p in layer for s in p)
        for group in held
        if group.layers
    )
