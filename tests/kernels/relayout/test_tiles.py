"""Tiles on GPUs: large enough to hide latency, with 16-byte accesses where alignment allows them."""

import json

import pytest

from kvconnector_kernels.relayout import PackedSide
from kvconnector_kernels.relayout.sides import CopyGeometry
from kvconnector_kernels.relayout.tiles import plan_tiles
from tests.kernels.relayout.pools import Pool, Window
from tests.support.forked import run_python

PAIRS = [
    (("HND", 16), ("NHD", 64)),
    (("HND", 16), ("NHD", 0)),
    (("NHD", 0), ("NHD", 24)),
    (("HND", 16), ("HND", 3)),
    (("HDN", 32), ("NHD", 16)),
    (("HND", 32), ("HDN", 0)),
]
CONVERTING = {
    ("bfloat16", "float8_e4m3fn"): (16, 8),
    ("float8_e5m2", "float16"): (8, 16),
    ("float8_e4m3fn", "float8_e5m2"): (16, 16),
}
"""Bytes of a load and of a store: of as many elements, and of 16 bytes where an element is larger."""


@pytest.mark.parametrize("num_heads,head_dim", [(1, 576), (1, 128), (8, 128), (8, 80), (32, 64)])
def test_a_tile_moves_enough_bytes_to_hide_latency(num_heads, head_dim):
    pool = Pool("HND", 64, 2, num_heads, head_dim, num_parts=1)
    geometry = CopyGeometry(1, num_heads, 512, head_dim, 2)
    tile = plan_tiles(Window(pool).side(), Window(pool).side(), geometry).tile
    tile_bytes = tile.heads * tile.tokens * tile.words * tile.word_bytes
    assert 8192 <= tile_bytes <= 16384


def test_accesses_are_no_wider_than_the_alignment():
    pool = Pool("HND", 16, num_heads=2, head_dim=8, num_parts=1)
    side = Window(pool).side()
    geometry = CopyGeometry(1, 2, 16, 8, 2)
    for address, word_bytes, align_bytes in ((4096, 8, 16), (4104, 8, 8), (4098, 2, 2)):
        plan = plan_tiles(side, PackedSide(address, 1 << 20, "HND", "cpu"), geometry)
        assert plan.tile.word_bytes == word_bytes
        assert plan.dst.align_bytes == align_bytes


@pytest.fixture(scope="module")
def hopper_code(tmp_path_factory):
    """What is found in the code for Hopper, by one process."""
    asked = json.dumps([PAIRS, list(CONVERTING)])
    command = ("-m", "tests.kernels.relayout.hopper_accesses", asked)
    folder = tmp_path_factory.mktemp("triton")
    found = run_python(*command, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(folder))
    return json.loads(found)


def test_hopper_code_moves_16_bytes_per_access(hopper_code):
    wanted = [["ld.global 16 bytes", "st.global 16 bytes"]] * len(PAIRS)
    assert hopper_code["accesses"] == wanted


def test_lanes_convert_what_they_load(hopper_code):
    """Elements do not change lanes, which takes shared memory and waits for all warps of a program."""
    wanted = [
        [f"ld.global {loaded} bytes", f"st.global {stored} bytes"]
        for loaded, stored in CONVERTING.values()
    ]
    assert hopper_code["converting_accesses"] == wanted


def test_all_of_a_tile_is_under_way_before_any_of_it_is_converted(hopper_code):
    """One look at the tables and at block ids, then all elements, then their conversion: a tile waits twice."""
    assert len(hopper_code["orders"]) == 2
    for order in hopper_code["orders"]:
        assert order.startswith("TLS")
        assert order.count("T") == order.count("L") == 1
        assert order.endswith("W")


def test_hopper_code_converts_exactly(hopper_code):
    """By the instructions for fp8 where there are some, without dividing. Else it divides as IEEE 754 does, and leaves
    no rounding to instructions that some GPUs lack. Denormals are kept.
    """
    assert hopper_code["casting"] == ["cvt.rn.f16x2.e5m2x2", "cvt.rn.satfinite.e4m3x2.f32"]
    assert hopper_code["computing"] == ["div.rn.f32"]
