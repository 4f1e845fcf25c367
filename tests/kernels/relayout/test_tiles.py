"""The GPU plan: tiles within blocks where block sizes allow it, and 16-byte accesses where alignment does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvconnector_kernels.relayout import PackedSide, TokenRuns
from kvconnector_kernels.relayout.sides import CopyGeometry
from kvconnector_kernels.relayout.tiles import plan_tiles
from tests.kernels.relayout.pools import Pool, Window

ROOT = Path(__file__).parents[3]
PAIRS = [
    (("HND", 16), ("NHD", 64)),
    (("HND", 16), ("NHD", 0)),
    (("NHD", 0), ("NHD", 24)),
    (("HND", 16), ("HND", 3)),
    (("HDN", 32), ("NHD", 16)),
    (("HND", 32), ("HDN", 0)),
]


def _plan(src_block, dst_block, *, starts=(0, 0), order="HND", head_dim=128, num_heads=8):
    pool = {"num_heads": num_heads, "head_dim": head_dim, "num_blocks": 2, "num_parts": 1}
    src = Window(Pool("HND", src_block, **pool), 0, starts[0]).side()
    dst = Window(Pool(order, dst_block, **pool), 0, starts[1]).side()
    return plan_tiles(src, dst, CopyGeometry(1, num_heads, 512, head_dim, 2))


@pytest.mark.parametrize(
    "block_sizes,tokens", [((16, 16), 16), ((16, 64), 16), ((16, 24), 8), ((128, 8), 8)]
)
def test_tiles_stay_within_blocks(block_sizes, tokens):
    plan = _plan(*block_sizes)
    assert plan.tile_tokens == tokens
    assert plan.src.is_one_block
    assert plan.dst.is_one_block


def test_small_common_blocks_are_looked_up_per_token():
    plan = _plan(16, 3)
    assert plan.tile_tokens == 16
    assert plan.src.is_one_block
    assert not plan.dst.is_one_block


def test_tiles_start_where_the_destinations_blocks_do():
    congruent, shifted = _plan(16, 64, starts=(5, 21)), _plan(16, 64, starts=(5, 3))
    assert (congruent.lead_tokens, congruent.src.origin_tokens) == (5, 0)
    assert congruent.dst.origin_tokens == 16
    assert congruent.src.is_one_block
    assert (shifted.lead_tokens, shifted.dst.origin_tokens) == (3, 0)
    assert shifted.dst.is_one_block
    assert not shifted.src.is_one_block


@pytest.mark.parametrize(
    "runs,start,tokens,is_one_block",
    [
        (TokenRuns(16, 32), 16, 16, True),
        (TokenRuns(8, 32), 8, 8, True),
        (TokenRuns(16, 32), 8, 8, True),
        (TokenRuns(16, 32, 4), 0, 16, True),
        (TokenRuns(1, 2), 0, 16, False),
    ],
)
def test_tiles_stay_within_runs(runs, start, tokens, is_one_block):
    pool = {"num_heads": 8, "head_dim": 128, "num_blocks": 80, "num_parts": 1}
    side = Window(Pool("HND", 16, **pool), 0, start, runs).side()
    plan = plan_tiles(
        side, PackedSide(4096, 1 << 30, "HND", "cpu"), CopyGeometry(1, 8, 512, 128, 2)
    )
    assert (plan.tile_tokens, plan.src.is_one_block) == (tokens, is_one_block)


@pytest.mark.parametrize("num_heads,head_dim", [(1, 576), (1, 128), (8, 128), (8, 80), (32, 64)])
def test_a_tile_moves_enough_bytes_to_hide_latency(num_heads, head_dim):
    plan = _plan(64, 64, num_heads=num_heads, head_dim=head_dim)
    tile_bytes = plan.tile_heads * plan.tile_tokens * plan.tile_words * plan.word_bytes
    assert 8192 <= tile_bytes <= 16384


def test_accesses_are_no_wider_than_the_alignment():
    pool = Pool("HND", 16, num_heads=2, head_dim=8, num_parts=1)
    side = Window(pool).side()
    geometry = CopyGeometry(1, 2, 16, 8, 2)
    for address, word_bytes, align_bytes in ((4096, 8, 16), (4104, 8, 8), (4098, 2, 2)):
        plan = plan_tiles(side, PackedSide(address, 1 << 20, "HND", "cpu"), geometry)
        assert plan.word_bytes == word_bytes
        assert plan.dst.align_bytes == align_bytes


def test_hopper_code_moves_16_bytes_per_access(tmp_path):
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    environment["PYTHONPATH"] = f"{ROOT}:{ROOT / 'kernels'}"
    result = subprocess.run(
        [sys.executable, "-m", "tests.kernels.relayout.hopper_accesses", json.dumps(PAIRS)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    wide = ["ld.global 16 bytes", "st.global 16 bytes"]
    assert json.loads(result.stdout) == [wide] * len(PAIRS)
