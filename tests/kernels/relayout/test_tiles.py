"""The GPU plan: tiles that hide latency, and 16-byte accesses where alignment allows them."""

from __future__ import annotations

from kvconnector_kernels.relayout import PackedSide
from kvconnector_kernels.relayout.sides import CopyGeometry
from kvconnector_kernels.relayout.tiles import plan_tiles
from tests.kernels.relayout.pools import Pool, Window


def test_accesses_are_no_wider_than_the_alignment():
    pool = Pool("HND", 16, num_heads=2, head_dim=8, num_parts=1)
    side = Window(pool).side()
    geometry = CopyGeometry(1, 2, 16, 8, 2)
    for address, word_bytes, align_bytes in ((4096, 8, 16), (4104, 8, 8), (4098, 2, 2)):
        plan = plan_tiles(side, PackedSide(address, 1 << 20, "HND", "cpu"), geometry)
        assert plan.word_bytes == word_bytes
        assert plan.dst.align_bytes == align_bytes
