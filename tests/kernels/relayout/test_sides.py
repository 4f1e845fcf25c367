"""The errors for invalid re-layouts."""

import dataclasses

import numpy as np
import pytest
import torch

from kvconnector_kernels.relayout import (
    BlockIdsAt,
    BlockIdsError,
    GeometryMismatchError,
    PackedSide,
    PagedSide,
    PartTable,
    RelayoutError,
    TokenRuns,
    relayout,
    relayout_cpu,
    relayout_triton,
    upload_block_ids,
)
from tests.kernels.relayout.pools import ORDERS, Pool, Window

COUNTS = {"num_parts": 2, "num_heads": 4, "num_tokens": 24}


def _table(**changes):
    values = {
        "num_blocks": 3,
        "block_size": 4,
        "num_heads": 2,
        "head_dim": 8,
        "item_size_bytes": 2,
        "device": "cpu",
    } | changes
    rows = values.pop("rows", np.array([[4096, 128, 64, 16, 2]], np.int64))
    return PartTable(rows, **values)


def _ids(*values):
    return np.array(values, np.int32)


def _chunk(nbytes=1 << 20, device="cpu"):
    return PackedSide(4096, nbytes, "HND", device)


def _relayout(dst, src=None, **counts):
    relayout(src or Window(Pool("HND", 4)).side(), dst, **(COUNTS | counts))


NBYTES = 2 * 4 * 24 * 6 * 2  # of COUNTS, from a pool of Pool's geometry
REFUSED = [
    (lambda: _table(num_blocks=0), "num_blocks must be at least 1, not 0"),
    (lambda: _table(head_dim=-1), "head_dim must be at least 1, not -1"),
    (lambda: _table(item_size_bytes=3), "item_size_bytes must be one of .*: 3"),
    (lambda: _table(device="cuda"), "'cpu' or 'cuda:N', not 'cuda'"),
    (lambda: _table(rows=np.zeros((2, 4), np.int64)), r"shape \(2, 4\)"),
    (lambda: _table(rows=np.ones((1, 5), np.int32)), "not int32"),
    (lambda: _table(rows=np.ones((0, 5), np.int64)), r"shape \(0, 5\)"),
    (lambda: _table(rows=np.array([[0, 1, 1, 1, 1]])), "address below 1"),
    (lambda: _table(rows=np.array([[1, 1, -1, 1, 1]])), "negative stride"),
    (lambda: PagedSide(_table(), np.array([0, 1])), "int64"),
    (lambda: PagedSide(_table(), np.zeros((1, 2), np.int32)), r"\(1, 2\)"),
    (lambda: PagedSide(_table(), np.zeros(4, np.int32)[::2]), "contiguous"),
    (lambda: PagedSide(_table(), [0, 1]), "not list"),
    (lambda: PagedSide(_table(), torch.zeros(2, dtype=torch.int32)), "Tensor"),
    (lambda: PagedSide(_table(), _ids(0), part_start=-1), "part_start must not be negative: -1"),
    (lambda: PagedSide(_table(), _ids(0), head_start=-1), "head_start must not be negative: -1"),
    (lambda: PagedSide(_table(), _ids(0), token_start=-1), "token_start must not be negative"),
    (lambda: PackedSide(0, 16, "HND", "cpu"), "16 bytes can be at address 0"),
    (lambda: PackedSide(4096, -1, "HND", "cpu"), "-1 bytes"),
    (lambda: PackedSide(4096, 16, "DNH", "cpu"), "unknown order 'DNH'; known are HND, NHD, HDN"),
    (lambda: PackedSide(4096, 16, "HND", "gpu"), "not 'gpu'"),
    (lambda: BlockIdsAt(0, 1, "cuda:0"), "1 block ids cannot be at 0"),
    (lambda: BlockIdsAt(1 << 20, -1, "cuda:0"), "-1 block ids cannot be at"),
    (
        lambda: PagedSide(_table(), BlockIdsAt(1 << 20, 1, "cuda:1")),
        "on cuda:1, the part table is on cpu",
    ),
    (lambda: TokenRuns(2, 1), "0 <= skip < run <= step"),
    (lambda: TokenRuns(2, 3, 2), "0 <= skip < run <= step"),
    (lambda: _relayout(Window(Pool("HND", 4, head_dim=5)).side()), r"head_dim differs.*\[6, 5\]"),
    (
        lambda: _relayout(Window(Pool("HND", 4, item=4)).side()),
        r"item_size_bytes differs.*\[2, 4\]",
    ),
    (lambda: _relayout(_chunk(device="cuda:0")), "on cpu, destination on cuda:0"),
    (lambda: _relayout(_chunk(NBYTES - 1)), f"{NBYTES - 1} bytes, the copy has {NBYTES}"),
    (lambda: _relayout(_chunk(), _chunk()), "not between two chunks"),
    (
        lambda: relayout_triton(Window(Pool("HND", 4)).side(), _chunk(), **COUNTS, max_programs=0),
        "max_programs must be",
    ),
    (lambda: upload_block_ids([0, 3], num_blocks=3, device="cpu"), "from 0 to 3, the pool has 3"),
    (lambda: upload_block_ids(np.array([0.0]), num_blocks=3, device="cpu"), "float64"),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_impossible_sides_and_copies_are_refused(number):
    call, text = REFUSED[number]
    with pytest.raises(RelayoutError, match=text):
        call()


def test_a_part_table_knows_its_order():
    assert tuple(Pool(order, 4).table().order for order in ORDERS) == ORDERS
    rows = np.concatenate([Pool("HND", 4).table().rows, Pool("HDN", 4).table().rows])
    with pytest.raises(GeometryMismatchError, match=r"HDN.*HND"):
        _ = _table(rows=rows, num_heads=4, head_dim=6).order


@pytest.mark.parametrize("copy", [relayout_cpu, relayout_triton])
@pytest.mark.parametrize(
    "changes,counts,error,text",
    [
        ({"part_start": 1}, {}, RelayoutError, "source has 2 parts, the copy wants 1 to 3"),
        ({"head_start": 2}, {}, RelayoutError, "source has 4 heads, the copy wants 2 to 6"),
        ({"token_start": 1}, {}, BlockIdsError, "6 block ids of 4 tokens.*1 to 25 needs 7"),
        ({"block_ids": _ids(0, 1, 2, 3, 4)}, {}, BlockIdsError, "5 block ids.*needs 6"),
        ({"runs": TokenRuns(2, 3)}, {}, BlockIdsError, "6 block ids of 4.*0 to 35 needs 9"),
        ({"block_ids": _ids(0, 1, 2, 3, 4, 6)}, {}, BlockIdsError, "0 to 6, the pool has 6"),
        ({"block_ids": _ids(0, 1, 2, 3, 4, -1)}, {}, BlockIdsError, "from -1 to 4"),
        ({}, {"num_tokens": -1}, RelayoutError, "num_tokens must not be negative: -1"),
    ],
)
def test_windows_beyond_the_pool_are_refused(copy, changes, counts, error, text):
    dst = Pool("NHD", 8)
    before = dst.buffer.clone()
    side = dataclasses.replace(Window(Pool("HND", 4)).side(), **changes)
    with pytest.raises(error, match=text) as raised:
        copy(side, Window(dst).side(), **(COUNTS | counts))
    assert isinstance(raised.value, ValueError)
    assert torch.equal(dst.buffer, before)


def test_ids_outside_the_copied_range_are_ignored():
    src, dst = Pool("HND", 4).fill_random(), Pool("HND", 4)
    side = dataclasses.replace(Window(src).side(), block_ids=_ids(-1, 2, 99), token_start=4)
    relayout(side, Window(dst).side(), num_parts=2, num_heads=4, num_tokens=4)
    source, copied = src.views(src.buffer)[0][2], dst.views(dst.buffer)[0][dst.block_ids()[0]]
    assert torch.equal(copied, source)


def test_transposing_misaligned_items_on_a_gpu_is_refused():
    src = Pool("HDN", 4).table()
    shifted = _table(
        rows=src.rows + np.array([1, 0, 0, 0, 0]), num_blocks=6, num_heads=4, head_dim=6
    )
    side = PagedSide(shifted, _ids(0, 1, 2, 3, 4, 5))
    with pytest.raises(RelayoutError, match="multiples of 2 bytes"):
        relayout_triton(side, Window(Pool("NHD", 4)).side(), **COUNTS)


@pytest.mark.gpu
def test_block_ids_reach_the_gpu():
    ids = upload_block_ids([2, 0, 1], num_blocks=3, device="cuda:0")
    assert isinstance(ids, torch.Tensor)
    assert ids.dtype == torch.int32
    assert ids.tolist() == [2, 0, 1]
    with pytest.raises(BlockIdsError, match="from 0 to 3"):
        upload_block_ids([0, 3], num_blocks=3, device="cuda:0")
