"""What a re-layout refuses, and that it says why."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from kvconnector_kernels.relayout import (
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
from tests.kernels.relayout.pools import Pool, Window

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


@pytest.mark.parametrize(
    "changes,text",
    [
        ({"num_blocks": 0}, "num_blocks must be at least 1, not 0"),
        ({"head_dim": -1}, "head_dim must be at least 1, not -1"),
        ({"item_size_bytes": 3}, "item_size_bytes must be one of .*: 3"),
        ({"device": "cuda"}, "'cpu' or 'cuda:N', not 'cuda'"),
        ({"rows": np.zeros((2, 4), np.int64)}, r"shape \(2, 4\)"),
        ({"rows": np.ones((1, 5), np.int32)}, "not int32"),
        ({"rows": np.ones((0, 5), np.int64)}, r"shape \(0, 5\)"),
        ({"rows": np.array([[0, 1, 1, 1, 1]])}, "address below 1"),
        ({"rows": np.array([[1, 1, -1, 1, 1]])}, "negative stride"),
    ],
)
def test_tables_that_describe_no_memory(changes, text):
    with pytest.raises(RelayoutError, match=text):
        _table(**changes)


@pytest.mark.parametrize("order", ["HND", "NHD", "HDN"])
def test_order_of_a_table(order):
    assert Pool(order, 4).table().order == order
    assert Pool(order, 4).table().num_parts == 2


def test_mixed_orders_in_one_table_have_no_name():
    rows = np.concatenate([Pool("HND", 4).table().rows, Pool("HDN", 4).table().rows])
    table = _table(rows=rows, block_size=4, num_heads=4, head_dim=6)
    with pytest.raises(GeometryMismatchError, match=r"HDN.*HND"):
        _ = table.order


@pytest.mark.parametrize(
    "ids,text",
    [
        (np.array([0, 1]), "int64"),
        (np.array([0, 1], np.uint32), "uint32"),
        (np.zeros((1, 2), np.int32), r"\(1, 2\)"),
        (np.zeros(4, np.int32)[::2], "contiguous"),
        ([0, 1], "not list"),
        (torch.zeros(2, dtype=torch.int32), "Tensor"),
    ],
)
def test_block_ids_of_another_type(ids, text):
    with pytest.raises(BlockIdsError, match=text):
        PagedSide(_table(), ids)


@pytest.mark.parametrize("name", ["part_start", "head_start", "token_start"])
def test_negative_starts(name):
    with pytest.raises(RelayoutError, match=f"{name} must not be negative: -1"):
        PagedSide(_table(), _ids(0), **{name: -1})


@pytest.mark.parametrize(
    "values,text",
    [
        ((0, 16, "HND", "cpu"), "16 bytes can be at address 0"),
        ((4096, -1, "HND", "cpu"), "-1 bytes"),
        ((4096, 16, "DNH", "cpu"), "unknown order 'DNH'; known are HND, NHD, HDN"),
        ((4096, 16, "HND", "gpu"), "not 'gpu'"),
    ],
)
def test_chunks_that_describe_no_memory(values, text):
    with pytest.raises(RelayoutError, match=text):
        PackedSide(*values)


@pytest.mark.parametrize("numbers", [(0, 1), (2, 1), (2, 3, 2), (2, 3, -1)])
def test_runs_that_overlap_or_have_no_token(numbers):
    with pytest.raises(RelayoutError, match="0 <= skip < run <= step"):
        TokenRuns(*numbers)


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
        ({}, {"head_dim": 7}, GeometryMismatchError, "head_dim differs: asked 7"),
    ],
)
def test_windows_beyond_the_pool_change_nothing(copy, changes, counts, error, text):
    dst = Pool("NHD", 8)
    before = dst.buffer.clone()
    side = dataclasses.replace(Window(Pool("HND", 4)).side(), **changes)
    with pytest.raises(error, match=text) as raised:
        copy(side, Window(dst).side(), **(COUNTS | counts))
    assert isinstance(raised.value, ValueError)
    assert torch.equal(dst.buffer, before)


def test_ids_outside_the_copied_range_do_not_matter():
    src, dst = Pool("HND", 4).fill_random(), Pool("HND", 4)
    side = dataclasses.replace(Window(src).side(), block_ids=_ids(-1, 2, 99), token_start=4)
    relayout(side, Window(dst).side(), num_parts=2, num_heads=4, num_tokens=4)
    source, copied = src.views(src.buffer)[0][2], dst.views(dst.buffer)[0][dst.block_ids()[0]]
    assert torch.equal(copied, source)


def test_sides_that_disagree():
    src = Window(Pool("HND", 4)).side()
    with pytest.raises(GeometryMismatchError, match=r"head_dim differs.*\[6, 5\]"):
        relayout(src, Window(Pool("HND", 4, head_dim=5)).side(), **COUNTS)
    with pytest.raises(GeometryMismatchError, match=r"item_size_bytes differs.*\[2, 4\]"):
        relayout(src, Window(Pool("HND", 4, item=4)).side(), **COUNTS)
    with pytest.raises(GeometryMismatchError, match="on cpu, destination on cuda:0"):
        relayout(src, PackedSide(4096, 1 << 20, "HND", "cuda:0"), **COUNTS)


def test_chunk_too_small():
    nbytes = 2 * 4 * 24 * 6 * 2
    room = torch.zeros(nbytes, dtype=torch.uint8)
    src = Window(Pool("HND", 4)).side()
    relayout(src, PackedSide(room.data_ptr(), nbytes, "HND", "cpu"), **COUNTS)
    with pytest.raises(RelayoutError, match=f"room for {nbytes - 1} bytes, the copy has {nbytes}"):
        relayout(src, PackedSide(room.data_ptr(), nbytes - 1, "HND", "cpu"), **COUNTS)


def test_two_chunks_need_a_geometry():
    chunk = PackedSide(4096, 1 << 20, "HND", "cpu")
    with pytest.raises(GeometryMismatchError, match="head_dim must be given"):
        relayout(chunk, chunk, **COUNTS)
    with pytest.raises(RelayoutError, match="item_size_bytes must be one of"):
        relayout(chunk, chunk, **COUNTS, head_dim=4, item_size_bytes=16)


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
