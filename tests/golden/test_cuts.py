"""Both sides of wire version 3 cut a read into these chunks. Released builds rely on it, so never change it."""

from itertools import pairwise

import pytest

from kvconnector.ids import Rank
from kvconnector.layout import Stripe
from kvconnector.planning import make_route, plan_read
from kvconnector.topology import GroupGeometry, PartGeometry, Segment

MIB = 1 << 20
TOKEN_BYTES = 2048


def group(block_size):
    sizes = {"total_heads": 8, "head_start": 0, "head_stop": 8, "head_dim": 128}
    parts = tuple(PartGeometry(name=name, item_size_bytes=2, **sizes) for name in "kv")
    return GroupGeometry(block_size=block_size, layers=tuple(range(8)), parts=parts)


def cut(tokens, chunk_bytes, *, blocks=(16, 24), layers=range(8), stripe=(0, 1, 1)):
    segment = Segment(0, 0, tuple(range(8)), 2, 0, 8, 256, stripe=Stripe(*stripe))
    ours, theirs = (group(size) for size in blocks)
    route = make_route(Rank(0, 0), (segment,), [ours], [theirs])
    read = plan_read(route, [tokens], chunk_bytes=chunk_bytes, layers=layers)
    return [tuple(each)[1:] for each in read.chunks.tolist()]


def test_whole_rows_share_chunks():
    assert cut(range(3, 103), MIB) == [
        (row, rows, 3, 100) for row, rows in ((0, 5), (5, 5), (10, 5), (15, 1))
    ]


@pytest.mark.parametrize(
    "tokens_fit,edges",
    [
        (100, [5, 96, 120]),  # at blocks of both sides
        (30, [5, 24, 48, 72, 96, 120]),  # of the larger ones
        (20, [5, 16, 32, 48, 64, 80, 96, 112, 120]),  # of the smaller ones
        (10, [5, *range(10, 121, 10)]),  # of neither
    ],
)
def test_long_rows_are_cut_at_block_edges(tokens_fit, edges):
    assert cut(range(5, 120), tokens_fit * TOKEN_BYTES, layers=range(7, 8)) == [
        (row, 1, start, stop - start) for row in (14, 15) for start, stop in pairwise(edges)
    ]


def test_stripes_count_only_their_members():
    whole = cut(range(5, 120), 60 * TOKEN_BYTES, layers=range(7, 8), stripe=(4, 4, 8))
    assert whole == [(14, 1, 1, 59), (15, 1, 1, 59)]


def test_the_first_and_the_last_chunks_are_shorter():
    rows = [(0, 1), (1, 1), (2, 2), (4, 4), (8, 4), (12, 2), (14, 1), (15, 1)]
    assert cut(range(16384), 256 * MIB) == [(*each, 0, 16384) for each in rows]
