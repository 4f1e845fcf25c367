"""Elements that change type on the way: all implementations against torch's casts, with saturation."""

from fractions import Fraction
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
    convert,
    relayout_cpu,
    relayout_naive,
)
from kvconnector_kernels.relayout.convert import (
    BY_DIVISION,
    BY_FACTOR,
    BY_PAIR,
    BY_RECIPROCAL,
    element_bytes,
    is_scaled,
    single_factors,
)
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
PAIRS_OF_SCALES = [(each, each if each in (1.0, 0.5) else 1.7 * each) for each in SCALES]
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


def converted(copy, device, numbers, conversion):
    """Return what one implementation stores for `[head, number]`, and what the oracle does."""
    heads, count = numbers.shape
    items = conversion.src_item_bytes, conversion.dst_item_bytes
    stored = torch.uint8 if items[1] == 1 else torch.int16
    src = numbers.view(1, heads, 1, count)
    found, want = (torch.zeros(src.shape, dtype=stored, device=device) for _ in range(2))
    ids = torch.zeros(1, dtype=torch.int32, device=device)
    sides = [
        PagedSide(
            part_table(
                [(tensor.data_ptr(), heads * count * item, *[count * item] * 2, item)],
                (1, 1, heads, count, item),
                device,
            ),
            ids.numpy() if device == "cpu" else ids,
        )
        for tensor, item in zip((src, found), items, strict=True)
    ]
    copy(*sides, conversion=conversion, num_parts=1, num_heads=heads, num_tokens=1)
    relayout_naive([src], [want], [0], [0], num_heads=heads, num_tokens=1, conversion=conversion)
    return found, want


@implementations
@rules
@pytest.mark.parametrize("scales", PAIRS_OF_SCALES)
def test_every_number_is_stored_as_the_oracle_does(
    *, copy, device, src_element, dst_element, rounding, scales
):
    """Saturation, NaN, infinities, denormals and -0 are among them."""
    numbers = every_number(src_element).to(device).view(1, -1)
    scales = np.array([[scales]], np.float32)
    conversion = Conversion(src_element, dst_element, scales, device, rounding=rounding)
    found, want = converted(copy, device, numbers, conversion)
    assert torch.equal(found, want)


def scales_beside_ties(element, dst_element):
    """Scales by which some number's quotient is the middle between two of fp8, or the float below or above that."""
    random = np.random.default_rng(3)
    fp8 = torch.arange(0x7B, dtype=torch.uint8).view(getattr(torch, dst_element)).float().numpy()
    middles = (fp8[:-1] + fp8[1:]) / 2
    numbers = every_number(element).view(getattr(torch, element)).float()
    ordinary = numbers[(numbers > 1e-2) & (numbers < 1e2)].numpy()
    chosen = random.choice(ordinary, 4) / random.choice(middles, 4)
    # whose reciprocal is half a unit of 2^-24 above a number: the quotient of 2^-10, a tie with zero, is closest
    chosen[0] = 1 - np.float32(2.0**-24)
    return np.concatenate([chosen, *(np.nextafter(chosen, to) for to in np.float32([0, 9e9]))])


@implementations
@pytest.mark.parametrize("src_element, dst_element", [*product((*WIDE, *NARROW), NARROW)])
def test_quotients_beside_a_tie_go_where_the_oracle_sends_them(
    copy, device, src_element, dst_element
):
    theirs = scales_beside_ties(src_element, dst_element)
    ours = np.float32([1.0] * 6 + [0.3] * 6)
    conversion = Conversion(src_element, dst_element, np.stack([ours, theirs], -1)[None], device)
    numbers = every_number(src_element).to(device).repeat(len(theirs), 1)
    found, want = converted(copy, device, numbers, conversion)
    assert torch.equal(found, want)


def nearest_float(exact):
    """The float32 nearest to a fraction, ties to even."""
    near = np.float32(float(exact))
    around = (np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.float32(np.inf)))
    return min(
        around, key=lambda each: (abs(Fraction(float(each)) - exact), int(each.view(np.uint32)) & 1)
    )


def divided_by_pairs(values, conversion):
    """Divide as the kernel does on a GPU that has no instruction for it, by the first head's scale."""
    _, scale, nearest, below, rest = map(float, conversion.kernel_scales()[0, 0])
    found = []
    for value in values:
        if value == 0 or abs(value) >= 2.0**96:
            found.append(value)
            continue
        exact = Fraction(float(value))
        small = nearest_float(exact * Fraction(rest))
        quotient = nearest_float(exact * Fraction(below) + Fraction(float(small)))
        if is_scaled(conversion.src_element):
            there = Fraction(float(quotient))
            excess = nearest_float(there * Fraction(scale) - exact)
            quotient = nearest_float(there - Fraction(float(excess)) * Fraction(nearest))
        found.append(quotient)
    return np.float32(found)


@examples(40)
@given(
    src_element=st.sampled_from((*WIDE, *NARROW)),
    dst_element=st.sampled_from(NARROW),
    seed=st.integers(0, 1 << 16),
    data=st.data(),
)
def test_a_pair_of_factors_stands_for_a_division(src_element, dst_element, seed, data):
    """The arithmetic of GPUs, exact but for its roundings: fp8 cannot tell its quotients from those of a division."""
    random = np.random.default_rng(seed)
    every = every_number(src_element).view(getattr(torch, src_element)).float().numpy()
    every = every[np.isfinite(every)]
    ordinary = every[(abs(every) > 1e-3) & (abs(every) < 1e3)]
    values = np.concatenate([random.choice(ordinary, 25), random.choice(every, 25)])
    if is_scaled(src_element):
        values = values * np.float32(data.draw(st.floats(0.0009765625, 1024, width=32)))
    quotients = np.float32([15, 17, 31, 200.0001, 3e-3, 0.7, 1.0625, 1.1875, 463.99997, 1e-5, 500])
    scale = np.float32(abs(values[0]) / random.choice(quotients))
    scale = np.nextafter(scale, np.float32(data.draw(st.sampled_from([0, scale, np.inf]))))
    conversion = Conversion(src_element, dst_element, np.float32([[[1, scale]]]), "cpu")
    _, _, nearest, below, rest = map(float, conversion.kernel_scales()[0, 0])
    assert nearest == nearest_float(1 / Fraction(float(scale)))
    assert 0 < below < 1 / Fraction(float(scale))
    assert rest > 0
    found = divided_by_pairs(values, conversion)
    divided = values / scale
    if is_scaled(src_element):
        assert np.array_equal(found, divided)  # the nearest number, not only for fp8
    most = torch.finfo(getattr(torch, dst_element)).max
    stored = [
        torch.tensor(each).clamp(-most, most).to(getattr(torch, dst_element)).view(torch.uint8)
        for each in (found, divided)
    ]
    assert torch.equal(*stored)


def test_the_quotient_that_is_closest_to_a_tie_is_beyond_it():
    """Half of e4m3's smallest number, 2^-9, over 1 - 2^-24: it exceeds the middle of two floats by 2^-48 of it."""
    scale = 1 - np.float32(2.0**-24)
    conversion = Conversion("bfloat16", "float8_e4m3fn", np.float32([[[1, scale]]]), "cpu")
    (found,) = divided_by_pairs(np.float32([2.0**-10]), conversion)
    assert found == np.float32(2.0**-10) / scale > 2.0**-10


@pytest.mark.parametrize(
    "scales, division, on_a_gpu",
    [
        ([1.0, 0.5], BY_RECIPROCAL, BY_RECIPROCAL),
        ([2.0**-126, 2.0**126], BY_RECIPROCAL, BY_RECIPROCAL),
        ([2.0**-127, 1.0], BY_DIVISION, BY_DIVISION),  # its reciprocal may be infinite
        ([1.0, 0.3], BY_DIVISION, BY_PAIR),
        ([1e30, 0.3], BY_DIVISION, BY_DIVISION),
    ],
)
def test_a_division_becomes_a_multiplication_only_where_that_is_the_same(
    scales, division, on_a_gpu, monkeypatch
):
    """On the CPU, Triton's interpreter rounds products before it adds them. A GPU has the factors in its memory."""
    monkeypatch.setattr(convert, "_has_casts", lambda device: True)
    sent = []
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device: sent.append(device) or self)
    pairs = np.stack([np.ones(2), scales], -1).astype(np.float32)[None]
    made = [Conversion("bfloat16", "float8_e4m3fn", pairs, each) for each in ("cpu", "cuda:0")]
    assert [each.division for each in made] == [division, on_a_gpu]
    assert [each.has_casts for each in made] == [False, True]
    assert sent == ["cuda:0"]
    assert torch.equal(made[0].kernel_scales(), made[1].kernel_scales())
    assert made[1].scales_address == made[1].kernel_scales().data_ptr()


@examples(60)
@given(
    src_element=st.sampled_from(NARROW),
    dst_element=st.sampled_from(NARROW),
    rounding=st.sampled_from(["nearest", "cast"]),
    quotients=st.sampled_from([1.0, 1.5, 2.0, 0.3, 1e-3, 17.0, 2.0**-30, 1e30, 1e-39]),
    seed=st.integers(0, 1 << 16),
)
def test_one_factor_stands_for_two_scales_if_it_gives_the_same_numbers(
    src_element, dst_element, rounding, quotients, seed
):
    """Factors are found for most scales, and are right for every number; scales without one are left to others."""
    random = np.random.default_rng(seed)
    theirs = random.uniform(0.01, 3, 8).astype(np.float32)
    ours = (theirs * np.float32(quotients) * random.choice([1, 1, 1.01], 8)).astype(np.float32)
    scales = np.stack([ours, theirs], -1).reshape(2, 4, 2)
    found = single_factors(src_element, dst_element, scales, rounding)
    conversion = Conversion(src_element, dst_element, scales, "cpu", rounding=rounding)
    assert (conversion.division == BY_FACTOR) == (found is not None)
    if found is None:
        return
    assert found.shape == (2, 4)
    assert np.array_equal(conversion.kernel_scales()[..., 2].numpy(), found)
    numbers = every_number(src_element).view(1, 1, 1, 256)
    alone = np.stack([found, np.ones_like(found)], -1)
    for row in range(2):
        for head in range(4):
            stored = []
            for pair in (scales, alone):
                one = pair[row : row + 1, head : head + 1].copy()
                single = Conversion(src_element, dst_element, one, "cpu", rounding=rounding)
                stored.append(torch.zeros(1, 1, 1, 256, dtype=torch.uint8))
                relayout_naive(
                    [numbers], [stored[-1]], [0], [0], num_heads=1, num_tokens=1, conversion=single
                )
            assert torch.equal(*stored)


def test_scales_have_a_single_factor_unless_two_roundings_tell_ties_apart():
    scales = np.random.default_rng(0).uniform(0.01, 3, (500, 1, 2)).astype(np.float32)
    for src, dst in product(NARROW, NARROW):
        found = [single_factors(src, dst, each[None], "nearest") is not None for each in scales]
        assert np.mean(found) > 0.99
    # 0.66 / 0.44 is 1.5, by which every second number is in the middle between two others
    tied = np.float32([[[0.66, 0.44]]])
    assert single_factors("float8_e4m3fn", "float8_e4m3fn", tied, "nearest") is None
    assert single_factors("float8_e4m3fn", "float8_e4m3fn", scales, "truncated") is None
    assert single_factors("bfloat16", "float8_e4m3fn", scales, "nearest") is None
    far = np.float32([[[1e-30, 1e30]]])
    assert single_factors("float8_e5m2", "float8_e5m2", far, "cast") is None


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
