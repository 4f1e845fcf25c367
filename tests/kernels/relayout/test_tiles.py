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
    command = ("-m", "tests.kernels.relayout.hopper_accesses", json.dumps(PAIRS))
    folder = tmp_path_factory.mktemp("triton")
    found = run_python(*command, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(folder))
    return json.loads(found)


def test_hopper_code_moves_16_bytes_per_access(hopper_code):
    wanted = [["ld.global 16 bytes", "st.global 16 bytes"]] * len(PAIRS)
    assert hopper_code["accesses"] == wanted


def test_hopper_code_converts_exactly(hopper_code):
    """It divides as IEEE 754 does, keeps denormals, and leaves no rounding to instructions that some GPUs lack."""
    assert hopper_code["converting"] == ["div.rn.f32"]
