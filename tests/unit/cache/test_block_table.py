import tracemalloc

import numpy as np
import pytest

from kvconnector.cache.block_table import MultiGroupBlockTable
from kvconnector.cache.slot_mapping import PAD_SLOT_ID, BlockGeometry, ContextParallel
from kvconnector.errors import BlockIdError, GeometryError


def make_tables(**changes: object) -> MultiGroupBlockTable:
    arguments: dict[str, object] = {
        "block_sizes": [16],
        "max_num_reqs": 4,
        "max_model_len": 96,
        "max_num_batched_tokens": 32,
        "device": "cpu",
    }
    return MultiGroupBlockTable(**(arguments | changes))  # type: ignore[arg-type]


def make_groups(**changes: object) -> MultiGroupBlockTable:
    return make_tables(**({"block_sizes": [16, 32]} | changes))


class TestRows:
    def test_clear(self) -> None:
        tables = make_tables()
        for row in range(4):
            tables.add_row([[1, 2]], row)
        tables.clear_row(2)
        assert [tables[0].num_blocks(row) for row in range(4)] == [2, 2, 0, 2]
        tables.clear()
        assert [tables[0].num_blocks(row) for row in range(4)] == [0, 0, 0, 0]
        assert not tables[0].device_tensor().any()

    @pytest.mark.parametrize(
        "block_ids",
        [[1, -1], [2**31], [2**70], [[1], [2]], ["x"], [1.5], [1, 2.0], np.array([2.5])],
        ids=str,
    )
    def test_bad_ids_change_nothing(self, block_ids: list[int]) -> None:
        tables = make_tables()
        tables.add_row([[7]], 0)
        for change in (tables.append_row, tables.add_row):
            with pytest.raises(BlockIdError):
                change([block_ids], 0)
        assert tables[0].device_tensor()[0].tolist() == [7, 0, 0, 0, 0, 0]

    def test_an_id_whose_kernel_ids_overflow_is_refused(self) -> None:
        tables = make_tables(block_sizes=[32], kernel_block_sizes=[16])
        tables.add_row([[2**30 - 1]], 0)
        assert tables[0].device_tensor()[0, :2].tolist() == [2**31 - 2, 2**31 - 1]
        with pytest.raises(BlockIdError, match="highest=1073741824"):
            tables.add_row([[2**30]], 0)

    def test_a_full_row_is_refused(self) -> None:
        tables = make_tables()
        tables.add_row([range(6)], 0)
        with pytest.raises(BlockIdError, match="num_blocks=6, num_new_blocks=1"):
            tables.append_row([[1]], 0)
        with pytest.raises(BlockIdError, match="max_num_blocks_per_req=6"):
            tables.add_row([range(7)], 0)
        assert tables[0].device_tensor()[0].tolist() == [0, 1, 2, 3, 4, 5]

    @pytest.mark.parametrize("row", [-1, 4])
    def test_unknown_rows_are_refused(self, row: int) -> None:
        tables = make_tables()
        calls = (
            lambda: tables.append_row([[1]], row),
            lambda: tables.add_row([[1]], row),
            lambda: tables.move_row(0, row),
            lambda: tables.swap_row(row, 0),
            lambda: tables.clear_row(row),
            lambda: tables[0].num_blocks(row),
            lambda: tables.compute_slot_mapping(np.array([row]), np.array([0])),
        )
        for call in calls:
            with pytest.raises(GeometryError, match="no such row"):
                call()

    @pytest.mark.parametrize("ratio", [1, 4])
    def test_changing_a_row_allocates_nothing(self, ratio: int) -> None:
        tables = make_tables(kernel_block_sizes=[16 // ratio], max_model_len=1_600_000)
        block_ids = [list(range(50_000))]
        changes = (
            lambda: tables.append_row(block_ids, 0),
            lambda: tables.append_row(block_ids, 0),
            lambda: tables.add_row(block_ids, 0),
            lambda: tables.swap_row(0, 1),
            lambda: tables.move_row(1, 0),
        )
        tracemalloc.start()
        try:
            for change in changes:
                tracemalloc.reset_peak()
                before = tracemalloc.get_traced_memory()[0]
                change()
                # One copy of the ids would take 200 kB.
                assert tracemalloc.get_traced_memory()[1] - before < 10_000
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize(
    "sizes,complaint",
    [
        ({"block_size": 48, "kernel_block_size": 32}, "block_size=48, kernel_block_size=32"),
        (
            {"context_parallel": ContextParallel(world_size=2, interleave_tokens=3)},
            "block_size=4, interleave_tokens=3",
        ),
        ({"block_size": 0}, "at least 1"),
        ({"kernel_block_size": 0}, "at least 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes: dict[str, object], complaint: str) -> None:
    with pytest.raises(GeometryError, match=complaint):
        BlockGeometry(**({"block_size": 4, "kernel_block_size": 4} | sizes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fields",
    [{"world_size": 0}, {"world_size": 2, "rank": 2}, {"rank": -1}, {"interleave_tokens": 0}],
    ids=str,
)
def test_a_place_in_no_group_is_refused(fields: dict[str, int]) -> None:
    with pytest.raises(GeometryError):
        ContextParallel(**fields)


class TestSlots:
    @pytest.mark.parametrize("position", [-1, 32])
    def test_a_token_without_a_block_is_refused(self, position: int) -> None:
        tables = make_tables()
        tables.add_row([[5, 2]], 1)
        (slots,) = tables.compute_slot_mapping(np.array([1]), np.array([3]))
        before = slots.copy()
        with pytest.raises(BlockIdError, match=f"token=1, row=1, position={position}"):
            tables.compute_slot_mapping(np.array([1, 1]), np.array([0, position]))
        assert slots == before

    @pytest.mark.parametrize(
        "rows,positions",
        [([0], [0, 1]), ([[0]], [[0]]), ([0.0], [0]), ([0] * 33, [0] * 33)],
        ids=["lengths", "shape", "type", "too-many"],
    )
    def test_bad_vectors_are_refused(self, rows: object, positions: object) -> None:
        tables = make_tables()
        tables.add_row([[1]], 0)
        with pytest.raises(GeometryError):
            tables.compute_slot_mapping(np.array(rows), np.array(positions))


class TestGroups:
    @pytest.mark.parametrize(
        "changes,widths",
        [
            ({}, [6, 3]),
            ({"max_model_len": 97}, [7, 4]),
            ({"context_parallel": ContextParallel(world_size=4, rank=1)}, [2, 1]),
            ({"num_speculative_tokens": 4}, [6, 5]),
            ({"kernel_block_sizes": [16, 8]}, [6, 12]),
            ({"block_sizes": [16, 4096], "num_speculative_tokens": 0}, [6, 1]),
        ],
    )
    def test_widths(self, changes: dict[str, object], widths: list[int]) -> None:
        shapes = [tuple(table.device_tensor().shape) for table in make_groups(**changes)]
        assert shapes == [(4, width) for width in widths]

    def test_every_operation_reaches_every_group(self) -> None:
        tables = make_groups()
        tables.add_row([[1, 2], [3]], 0)
        tables.append_row([[4], []], 0)
        tables.add_row([[9], [8]], 1)
        tables.swap_row(0, 1)
        tables.move_row(1, 2)
        tables.clear_row(0)
        tables.commit(3)
        rows = [table.device_tensor() for table in tables]
        assert [row[2].tolist() for row in rows] == [[1, 2, 4, 0, 0, 0], [3, 0, 0]]
        assert not any(row[[0, 1, 3]].any() for row in rows)
        first, second = tables.compute_slot_mapping(np.array([2, 2]), np.array([0, 17]))
        assert (first.tolist(), second.tolist()) == ([16, 33], [96, 113])
        tables.commit_slot_mapping()
        assert [table.device_slot_mapping(3).tolist() for table in tables] == [
            [16, 33, PAD_SLOT_ID],
            [96, 113, PAD_SLOT_ID],
        ]
        tables.clear()
        assert not any(row.any() for row in rows)

    def test_one_bad_group_changes_none(self) -> None:
        tables = make_groups()
        tables.add_row([[1], [2]], 0)
        for change in (tables.append_row, tables.add_row):
            with pytest.raises(BlockIdError):
                change([[5], [-1]], 0)
            with pytest.raises(BlockIdError):
                change([[5], [1, 2, 3, 4]], 0)
        assert [table.device_tensor()[0, :2].tolist() for table in tables] == [[1, 0], [2, 0]]

    @pytest.mark.parametrize("block_ids", [[[1]], [[1], [2], [3]]])
    def test_ids_of_every_group_are_needed(self, block_ids: list[list[int]]) -> None:
        tables = make_groups()
        for change in (tables.append_row, tables.add_row):
            with pytest.raises(GeometryError, match="num_groups=2"):
                change(block_ids, 0)

    @pytest.mark.parametrize(
        "changes",
        [
            {"block_sizes": []},
            {"kernel_block_sizes": [16]},
            {"kernel_block_sizes": [16, 12]},
            {"max_model_len": 0},
            {"num_speculative_tokens": -1},
            {"max_num_reqs": 0},
            {"max_num_batched_tokens": 0},
        ],
        ids=str,
    )
    def test_sizes_are_checked(self, changes: dict[str, object]) -> None:
        with pytest.raises(GeometryError):
            make_groups(**changes)


@pytest.mark.parametrize("num_reqs", [-1, 5])
def test_commit_of_rows_that_are_not_there_is_refused(num_reqs: int) -> None:
    with pytest.raises(GeometryError, match=f"num_reqs={num_reqs}"):
        make_tables().commit(num_reqs)


@pytest.mark.gpu
class TestGpu:
    def test_the_device_sees_rows_when_committed(self) -> None:
        tables = make_tables(device="cuda")
        table = tables[0]
        tables.add_row([[3, 4]], 1)
        assert not table.device_tensor().any()
        tables.commit(2)
        assert table.device_tensor(2).tolist() == [[0] * 6, [3, 4, 0, 0, 0, 0]]
        tables.clear()
        assert not table.device_tensor().any()

    def test_slots_behind_the_last_token_are_padding_on_the_device(self) -> None:
        tables = make_tables(device="cuda")
        tables.add_row([[3, 4]], 1)
        for num_tokens in (20, 5, 0, 7):
            (slots,) = tables.compute_slot_mapping(np.ones(num_tokens, int), np.arange(num_tokens))
            tables.commit_slot_mapping()
            expected = slots.tolist() + [PAD_SLOT_ID] * (32 - num_tokens)
            assert tables[0].device_slot_mapping().tolist() == expected

    def test_a_copy_in_flight_is_not_overwritten(self) -> None:
        import torch

        tables = make_tables(device="cuda")
        table = tables[0]
        seen = []
        for step in range(20):
            torch.cuda._sleep(2_000_000)
            tables.add_row([[step]], 0)
            (slots,) = tables.compute_slot_mapping(np.zeros(1, int), np.zeros(1, int))
            tables.commit(1)
            tables.commit_slot_mapping()
            seen.append((table.device_tensor()[0, 0].clone(), table.device_slot_mapping(1).clone()))
            assert slots.tolist() == [step * 16]
        expected = [(step, [step * 16]) for step in range(20)]
        assert [(block.item(), slot.tolist()) for block, slot in seen] == expected
