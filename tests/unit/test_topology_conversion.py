"""Which numbers are converted between two engines, and which scales and which rule a segment's elements then have."""

import re
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from kvconnector.topology import (
    EngineGeometry,
    GroupGeometry,
    ModelDescription,
    PartGeometry,
    RankGeometry,
)
from kvconnector.topology.conversion import (
    explains,
    is_converted,
    numbers_differ,
    obstacle,
    segment_conversion,
)
from kvconnector.topology.segments import Segment

E4M3, E5M2, WIDE = "float8_e4m3fn", "float8_e5m2", "bfloat16"
NAMES = ("z", "k", "v")
"""The first has elements of another shape, so that K and V are a family of their own, and not the first parts."""
HEADS, LAYERS = 4, 5


def scale_of(factor, layer, name, head):
    """Return a scale that no other place has. Scales of a wide cache are never looked at."""
    return factor * (1 + 100 * layer + 10 * NAMES.index(name) + head)


def group(element, *, factor=0, layers=range(LAYERS), heads=range(HEADS), rounding="nearest"):
    """Make a rank's group of numbers; without a factor it states no scales."""
    parts = tuple(
        PartGeometry(
            name=name,
            total_heads=HEADS,
            head_start=heads.start,
            head_stop=heads.stop,
            head_dim=8 if name == "z" else 16,
            item_size_bytes=2 if element in (WIDE, "float16") else 1,
            element=element,
            rounding=rounding,
        )
        for name in NAMES
    )
    scales = tuple(
        tuple(tuple(scale_of(factor, layer, name, head) for head in heads) for name in NAMES)
        for layer in layers
    )
    return GroupGeometry(
        block_size=16, layers=tuple(layers), parts=parts, scales=scales if factor else ()
    )


def k_and_v(layers=range(LAYERS), heads=range(HEADS)):
    return Segment(
        group=0,
        family=1,
        layers=tuple(layers),
        num_parts=2,
        head_start=heads.start,
        head_stop=heads.stop,
        head_token_bytes=16,
    )


RANGES = st.integers(0, LAYERS - 1).flatmap(
    lambda start: st.integers(start + 1, LAYERS).map(lambda stop: range(start, stop))
)
SHARES = st.integers(0, HEADS - 1).flatmap(
    lambda start: st.integers(start + 1, HEADS).map(lambda stop: range(start, stop))
)


def common(first, second):
    return range(max(first.start, second.start), min(first.stop, second.stop))


@given(layers=st.tuples(RANGES, RANGES), heads=st.tuples(SHARES, SHARES))
def test_each_element_has_the_scales_of_its_layer_part_and_head(layers, heads):
    shared, both = common(*layers), common(*heads)
    if not shared or not both:
        return
    theirs, ours = (
        group(element, factor=factor, layers=own, heads=share)
        for element, factor, own, share in zip((E4M3, E5M2), (1, 7), layers, heads, strict=True)
    )
    found = segment_conversion(k_and_v(shared, both), theirs, ours)
    expected = [
        [[scale_of(factor, layer, name, head) for factor in (1, 7)] for head in both]
        for layer in shared
        for name in ("k", "v")
    ]
    np.testing.assert_array_equal(found.scales, expected)


@pytest.mark.parametrize("factors", [(3, 0), (0, 3), (0, 0), (3, 3)])
def test_numbers_of_one_type_are_copied_unless_both_state_other_scales(factors):
    """A scale that one engine does not state may be the other's."""
    theirs, ours = (group(E4M3, factor=factor) for factor in factors)
    assert segment_conversion(k_and_v(), theirs, ours) is None


def test_numbers_of_one_type_with_other_scales_are_converted():
    found = segment_conversion(k_and_v(), group(E4M3, factor=1), group(E4M3, factor=2))
    assert (found.src_element, found.dst_element) == (E4M3, E4M3)
    assert (found.scales[..., 1] == 2 * found.scales[..., 0]).all()


def test_numbers_of_a_wide_type_have_no_scale():
    found = segment_conversion(k_and_v(), group(WIDE), group(E4M3, factor=3))
    assert (found.scales[..., 0] == 1).all()
    assert found.scales[0, 0, 1] == scale_of(3, 0, "k", 0)


@pytest.mark.parametrize(
    "theirs, ours, rule",
    [
        ((WIDE, "truncated"), (E4M3, "cast"), "cast"),
        ((E5M2, "truncated"), (E4M3, "cast"), "cast"),
        # the rule for fp8 says nothing of other types
        ((E4M3, "truncated"), (WIDE, "cast"), "nearest"),
    ],
)
def test_a_consumers_numbers_are_rounded_by_its_own_rule(theirs, ours, rule):
    theirs, ours = (group(element, factor=1, rounding=each) for element, each in (theirs, ours))
    assert segment_conversion(k_and_v(), theirs, ours).rounding == rule


@pytest.mark.parametrize("theirs, ours, packs", [(WIDE, E4M3, 1), (E4M3, E5M2, 1), (E4M3, WIDE, 0)])
def test_the_narrower_of_two_types_travels(theirs, ours, packs):
    found = segment_conversion(k_and_v(), group(theirs, factor=1), group(ours, factor=2))
    assert found.when_packing == packs


def engine(name, *ranks, **changes):
    """Make an engine of these ranks' groups, each with its share of the heads."""
    return EngineGeometry(
        engine_id=name,
        tp_size=len(ranks),
        pp_size=1,
        model=ModelDescription(model="m", dtype="any", num_layers=LAYERS),
        ranks=tuple(
            RankGeometry(pp_rank=0, tp_rank=number, groups=(each,))
            for number, each in enumerate(ranks)
        ),
        **changes,
    )


HALVES = range(HEADS // 2), range(HEADS // 2, HEADS)


def changed(index, /, **changes):
    """Return a group of fp8 numbers of which one part is another one."""
    whole = group(E4M3, factor=1)
    parts = [*whole.parts]
    parts[index] = structs.replace(parts[index], **changes)
    return structs.replace(whole, parts=tuple(parts))


def halves(**second):
    """Return two ranks' groups, of which the second one differs."""
    return tuple(
        group(**{"element": E4M3, "factor": 1, "heads": heads} | (second if number else {}))
        for number, heads in enumerate(HALVES)
    )


def with_a_scale_of_zero():
    whole = group(E4M3, factor=1)
    *others, last = whole.scales
    return structs.replace(whole, scales=(*others, (*last[:-1], (0.0,))))


NOT_CONVERTED = [
    (engine("odd", with_a_scale_of_zero()), "odd does not state a scale above 0"),
    (engine("odd", group(E4M3, factor=1), converts=False), "convert=never in odd"),
    (engine("odd", group(E4M3)), "odd does not state a scale above 0"),
    (engine("odd", *halves(factor=-1)), "odd does not state a scale above 0"),
    (engine("odd", *halves(factor=inf)), "odd does not state a scale above 0"),
    (engine("odd", *halves(rounding="other")), "odd stores fp8 by a rule .* \\(other\\)"),
    (engine("odd", changed(1, element="")), "the elements of k in odd have no type"),
    (engine("odd", changed(2, element=E5M2)), "several types, or are rounded by several .* in odd"),
    (engine("odd", changed(2, rounding="cast")), "several types, or are rounded by .* in odd"),
    (engine("odd", changed(2, head_dim=8)), "parts of one size in one engine have several sizes"),
    (engine("odd", group("float16")), "bfloat16 and float16|float16 and bfloat16"),
]


@pytest.mark.parametrize("odd, reason", NOT_CONVERTED)
def test_whichever_engine_keeps_numbers_from_being_converted_is_named(odd, reason):
    plain = engine("plain", group(WIDE))
    for pair in ((odd, plain), (plain, odd)):
        assert re.search(reason, obstacle(*pair, 0))
        assert not is_converted(*pair, 0)


def test_numbers_of_other_types_and_scales_are_converted():
    plain = engine("plain", group(WIDE))
    for other in (
        engine("e4m3", group(E4M3, factor=1)),
        engine("two ranks", *halves()),
        engine("e5m2", group(E5M2, factor=1, rounding="cast")),
    ):
        assert obstacle(plain, other, 0) == ""
        assert is_converted(plain, other, 0)
        assert is_converted(other, plain, 0)


@pytest.mark.parametrize(
    "theirs, ours, do_differ",
    [
        (group(WIDE), group(E4M3, factor=1), True),
        (group(E5M2, factor=1), group(E4M3, factor=1), True),
        (group(E4M3, factor=1), group(E4M3, factor=2), True),
        (group(E4M3, factor=1), group(E4M3, factor=1), False),
        # what one of them does not state may be the other's
        (group(E4M3), group(E4M3, factor=1), False),
        (group(""), group(E4M3, factor=1), False),
    ],
)
def test_numbers_differ_in_size_type_or_scale(theirs, ours, do_differ):
    pair = engine("theirs", theirs), engine("ours", ours)
    assert numbers_differ(*pair, 0) == do_differ
    assert numbers_differ(*reversed(pair), 0) == do_differ


@pytest.mark.parametrize(
    "dtype, element, does",
    [
        ("bf16", WIDE, True),
        ("bfloat16", WIDE, True),
        ("fp8", E4M3, True),
        ("fp8_e4m3", E4M3, True),
        ("fp8_e5m2", E5M2, True),
        ("fp8_e5m2", E4M3, False),
        ("fp8_e4m3/NHD", E4M3, False),
    ],
)
def test_an_engines_word_for_the_type_of_its_cache_is_no_difference_of_its_own(
    dtype, element, does
):
    """Engines whose caches have other types are not refused for the words in which they say so."""
    assert explains(dtype, engine("any", group(element, factor=1)), [0]) == does
