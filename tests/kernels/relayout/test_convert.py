"""Elements that change type on the way: all implementations against torch's casts, with saturation."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvconnector_kernels.relayout import (
    Conversion,
    GeometryMismatchError,
    PackedSide,
    PagedSide,
    RelayoutError,
    relayout_cpu,
    relayout_naive,
)
from kvconnector_kernels.relayout.convert import element_bytes, is_scaled
from tests.kernels.relayout.pools import (
    ORDERS,
    TILED_BLOCK_SIZES,
    Chunk,
    Pool,
    Window,
    expected_buffer,
    part_table,
    windows,
)
from tests.kernels.relayout.test_copies import implementations
from tests.support.examples import examples

# numpy, in which Triton's interpreter computes, warns of NaN and of values that the other branch takes
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")

WIDE, NARROW = ("float16", "bfloat16"), ("float8_e4m3fn", "float8_e5m2")
PAIRS = [*product(WIDE, NARROW), *product(NARROW, WIDE), *product(NARROW, NARROW)]
SCALES = [1.0, 0.5, 0.0371, 3.7, 1e-6, 250.0, 1e30, 1e-30]
RULES = [
    *((*pair, "nearest") for pair in PAIRS),
    *(
        (src, dst, rule)
        for src in (*WIDE, *NARROW)
        for dst in NARROW
        for rule in ("truncated", "cast")
    ),
]
rules = pytest.mark.parametrize("src_element, dst_element, rounding", RULES)


def every_number(element):
    """All bit patterns of a type, as integers of its size."""
    if element_bytes(element) == 1:
        return torch.arange(256, dtype=torch.uint8)
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)


@implementations
@rules
@pytest.mark.parametrize("scale", SCALES)
def test_every_number_is_stored_as_the_oracle_does(
    *, copy, device, src_element, dst_element, rounding, scale
):
    """Saturation, NaN, infinities, denormals and -0 are among them."""
    numbers = every_number(src_element).to(device)
    count, src_item = numbers.numel(), element_bytes(src_element)
    stored = torch.uint8 if element_bytes(dst_element) == 1 else torch.int16
    found, want = (torch.zeros(1, 1, 1, count, dtype=stored, device=device) for _ in range(2))
    pair = np.array([[[scale, 1.7 * scale]]], np.float32)
    conversion = Conversion(src_element, dst_element, pair, device, rounding=rounding)
    src = numbers.view(1, 1, 1, count)
    ids = torch.zeros(1, dtype=torch.int32, device=device)
    sides = [
        PagedSide(
            part_table(
                [(tensor.data_ptr(), *[count * item] * 3, item)], (1, 1, 1, count, item), device
            ),
            ids.numpy() if device == "cpu" else ids,
        )
        for tensor, item in ((src, src_item), (found, element_bytes(dst_element)))
    ]
    copy(*sides, conversion=conversion, num_parts=1, num_heads=1, num_tokens=1)
    relayout_naive([src], [want], [0], [0], num_heads=1, num_tokens=1, conversion=conversion)
    if device != "cpu" and rounding == "cast":
        for each in (found, want):
            each[each == 0xFF] = 0x7F  # a GPU's arithmetic drops the sign
    assert torch.equal(found, want)


def test_the_oracle_knows_what_each_rule_does():
    """Numbers that were written down by hand, for bf16 to both kinds of fp8: saturation, signs, ties, denormals."""
    values = torch.tensor(
        [0.0, -0.0, 448.0, 449.0, -1e30, float("inf"), float("-inf"), float("nan"), 2.0**-9, 2e-3],
        dtype=torch.bfloat16,
    )
    src = values.view(torch.int16).view(1, 1, 1, -1)
    found = torch.zeros(src.shape, dtype=torch.uint8)
    for element, rounding, want in (
        ("float8_e4m3fn", "nearest", [0, 0x80, 0x7E, 0x7E, 0xFE, 0x7E, 0xFE, 0x7F, 1, 1]),
        ("float8_e5m2", "nearest", [0, 0x80, 0x5F, 0x5F, 0xFB, 0x7B, 0xFB, 0x7F, 0x18, 0x18]),
        ("float8_e4m3fn", "cast", [0, 0x80, 0x7E, 0x7E, 0xFE, 0x7E, 0xFE, 0x7F, 1, 1]),
        ("float8_e5m2", "cast", [0, 0x80, 0x5F, 0x5F, 0xFC, 0x7C, 0xFC, 0x7F, 0x18, 0x18]),
        ("float8_e4m3fn", "truncated", [0, 0, 0x7E, 0x7E, 0xFE, 0x7E, 0xFE, 0x7E, 1, 1]),
        ("float8_e5m2", "truncated", [0, 0, 0x5F, 0x5F, 0xFB, 0x7B, 0xFB, 0x7B, 0x18, 0x18]),
    ):
        ones = np.ones((1, 1, 2), np.float32)
        one = Conversion("bfloat16", element, ones, "cpu", rounding=rounding)
        relayout_naive([src], [found], [0], [0], num_heads=1, num_tokens=1, conversion=one)
        assert found.flatten().tolist() == want


@implementations
@examples(60)
@given(
    data=st.data(),
    kind=st.sampled_from(["relayout", "tiled", "pack", "unpack"]),
    rule=st.sampled_from(RULES),
    num_heads=st.integers(1, 5),
    num_tokens=st.integers(1, 70) | st.sampled_from([16, 32, 64]),
    head_dim=st.integers(1, 40) | st.sampled_from([72, 300]),
    seed=st.integers(0, 1 << 16),
)
def test_any_geometry_is_converted_like_the_naive_one(
    *, copy, device, data, kind, rule, num_heads, num_tokens, head_dim, seed
):
    counts = {"num_parts": 2, "num_heads": num_heads, "num_tokens": num_tokens}
    src_item, dst_item = map(element_bytes, rule[:2])

    def end(item, is_chunk, fill):
        sizes = {"head_dim": head_dim, "item": item, "device": device}
        if is_chunk:
            order = data.draw(st.sampled_from(ORDERS))
            return Chunk.filled(order, **counts, **sizes, seed=seed if fill else None)
        extra = {"block_size": data.draw(TILED_BLOCK_SIZES)} if kind == "tiled" else {}
        window = data.draw(windows(**counts, **sizes, **extra))
        if fill:
            window.pool.fill_random(seed)
        return window

    src, dst = end(src_item, kind == "unpack", True), end(dst_item, kind == "pack", False)
    paged = src if kind == "pack" else dst
    random = np.random.default_rng(seed)
    shape = (paged.part_start + 2, num_heads, 2)
    if data.draw(st.booleans()):  # one scale for all heads
        shape = (shape[0], 1, 2)
    scales = random.choice(np.array(SCALES, np.float32), shape)
    scales = np.broadcast_to(scales, (shape[0], num_heads, 2)).copy()
    conversion = Conversion(*rule[:2], scales, device, rounding=rule[2])
    want = expected_buffer(
        src,
        dst,
        num_heads=num_heads,
        num_tokens=num_tokens,
        conversion=conversion,
        part_start=paged.part_start,
    )
    before = src.buffer.clone()
    copy(src.side(), dst.side(), conversion=conversion, **counts)
    if dst.buffer.is_cuda:
        torch.cuda.synchronize()
    assert torch.equal(dst.buffer, want)
    assert torch.equal(src.buffer, before)


def test_what_cannot_be_converted_is_refused():
    ones = np.ones((2, 4, 2), np.float32)
    for elements in (("float32", "float8_e4m3fn"), ("bfloat16", "float16"), ("uint8", "bfloat16")):
        with pytest.raises(RelayoutError, match=r"is not converted|no numbers"):
            Conversion(*elements, ones, "cpu")
    for scale in (0.0, -1.0, np.inf, np.nan):
        with pytest.raises(RelayoutError, match="above 0"):
            Conversion("bfloat16", "float8_e4m3fn", ones * np.float32(scale), "cpu")
    with pytest.raises(RelayoutError, match="no rule 'down' is known"):
        Conversion("bfloat16", "float8_e4m3fn", ones, "cpu", rounding="down")
    with pytest.raises(RelayoutError, match="bfloat16 are rounded to nearest"):
        Conversion("float8_e4m3fn", "bfloat16", ones, "cpu", rounding="truncated")
    with pytest.raises(RelayoutError, match="float32"):
        Conversion("bfloat16", "float8_e4m3fn", np.ones((2, 4)), "cpu")
    pools = Pool("HND", 4, item=2), Pool("NHD", 8, item=1)
    sides = [Window(pool).side() for pool in pools]
    counts = {"num_parts": 2, "num_heads": 4, "num_tokens": 5}
    good = Conversion("bfloat16", "float8_e4m3fn", ones, "cpu")
    few = Conversion("bfloat16", "float8_e4m3fn", ones[:1], "cpu")
    other = Conversion("float8_e5m2", "float8_e4m3fn", ones, "cpu")
    relayout_cpu(*sides, conversion=good, **counts)
    with pytest.raises(GeometryMismatchError, match="item_size_bytes"):
        relayout_cpu(*sides, **counts)
    with pytest.raises(GeometryMismatchError, match="items of 2 bytes"):
        relayout_cpu(*sides, conversion=other, **counts)
    with pytest.raises(GeometryMismatchError, match="scales for 1 rows"):
        relayout_cpu(*sides, conversion=few, **counts)
    small = PackedSide(4096, 2 * 4 * 5 * 6 - 1, "HND", "cpu")
    with pytest.raises(RelayoutError, match="room for 239 bytes, the copy has 240"):
        relayout_cpu(sides[0], small, conversion=good, **counts)


def test_only_fp8_has_scales():
    assert [is_scaled(each) for each in (*WIDE, *NARROW)] == [False, False, True, True]
