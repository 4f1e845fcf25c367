import subprocess
import sys
import tracemalloc

import numpy as np
import pytest

from kvconnector.cache.block_table import BlockTable, MultiGroupBlockTable
from kvconnector.cache.slot_mapping import PAD_SLOT_ID, BlockGeometry, ContextParallel
from kvconnector.errors import BlockIdError, ConfigError, GeometryError

SIXTEEN = BlockGeometry(block_size=16, kernel_block_size=16)


def make_table(geometry: BlockGeometry = SIXTEEN, *, device: str | None = None) -> BlockTable:
    return BlockTable(
        geometry=geometry,
        max_num_reqs=4,
        max_num_blocks_per_req=6,
        max_num_batched_tokens=32,
        device=device,
    )


def make_groups(**changes: object) -> MultiGroupBlockTable:
    arguments: dict[str, object] = {
        "block_sizes": [16, 32],
        "max_num_reqs": 4,
        "max_model_len": 96,
        "max_num_batched_tokens": 32,
    }
    return MultiGroupBlockTable(**(arguments | changes))  # type: ignore[arg-type]


class TestRows:
    def test_clear(self) -> None:
        table = make_table()
        for row in range(4):
            table.add_row([1, 2], row)
        table.clear_row(2)
        assert [table.num_blocks(row) for row in range(4)] == [2, 2, 0, 2]
        table.clear()
        assert [table.num_blocks(row) for row in range(4)] == [0, 0, 0, 0]
        assert not table.numpy().any()

    @pytest.mark.parametrize(
        "block_ids",
        [[1, -1], [2**31], [2**70], [[1], [2]], ["x"], [1.5], [1, 2.0], np.array([2.5])],
        ids=str,
    )
    def test_bad_ids_change_nothing(self, block_ids: list[int]) -> None:
        table = make_table()
        table.add_row([7], 0)
        for change in (table.append_row, table.add_row):
            with pytest.raises(BlockIdError):
                change(block_ids, 0)
        assert table.numpy()[0].tolist() == [7, 0, 0, 0, 0, 0]

    def test_an_id_whose_kernel_ids_overflow_is_refused(self) -> None:
        table = make_table(BlockGeometry(block_size=32, kernel_block_size=16))
        table.add_row([2**30 - 1], 0)
        assert table.numpy()[0, :2].tolist() == [2**31 - 2, 2**31 - 1]
        with pytest.raises(BlockIdError, match="highest=1073741824"):
            table.add_row([2**30], 0)

    def test_a_full_row_is_refused(self) -> None:
        table = make_table()
        table.add_row(range(6), 0)
        with pytest.raises(BlockIdError, match="num_blocks=6, num_new_blocks=1"):
            table.append_row([1], 0)
        with pytest.raises(BlockIdError, match="max_num_blocks_per_req=6"):
            table.add_row(range(7), 0)
        assert table.numpy()[0].tolist() == [0, 1, 2, 3, 4, 5]

    @pytest.mark.parametrize("row", [-1, 4])
    def test_unknown_rows_are_refused(self, row: int) -> None:
        table = make_table()
        calls = (
            lambda: table.append_row([1], row),
            lambda: table.add_row([1], row),
            lambda: table.move_row(0, row),
            lambda: table.swap_row(row, 0),
            lambda: table.clear_row(row),
            lambda: table.num_blocks(row),
            lambda: table.compute_slot_mapping(np.array([row]), np.array([0])),
        )
        for call in calls:
            with pytest.raises(GeometryError, match="no such row"):
                call()

    @pytest.mark.parametrize("ratio", [1, 4])
    def test_changing_a_row_allocates_nothing(self, ratio: int) -> None:
        table = BlockTable(
            geometry=BlockGeometry(block_size=16, kernel_block_size=16 // ratio),
            max_num_reqs=2,
            max_num_blocks_per_req=100_000,
            max_num_batched_tokens=1,
        )
        block_ids = list(range(50_000))
        changes = (
            lambda: table.append_row(block_ids, 0),
            lambda: table.append_row(block_ids, 0),
            lambda: table.add_row(block_ids, 0),
            lambda: table.swap_row(0, 1),
            lambda: table.move_row(1, 0),
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


class TestGeometry:
    def test_the_kernels_block_must_divide(self) -> None:
        with pytest.raises(GeometryError, match="block_size=48, kernel_block_size=32"):
            BlockGeometry(block_size=48, kernel_block_size=32)

    def test_the_interleave_must_divide(self) -> None:
        turns = ContextParallel(world_size=2, rank=0, interleave_tokens=3)
        with pytest.raises(GeometryError, match="block_size=4, interleave_tokens=3"):
            BlockGeometry(block_size=4, kernel_block_size=4, context_parallel=turns)

    @pytest.mark.parametrize(
        "fields",
        [
            {"world_size": 0},
            {"world_size": 2, "rank": 2},
            {"rank": -1},
            {"interleave_tokens": 0},
        ],
        ids=str,
    )
    def test_context_parallel(self, fields: dict[str, int]) -> None:
        with pytest.raises(GeometryError):
            ContextParallel(**fields)

    @pytest.mark.parametrize("sizes", [(0, 1), (4, 0)])
    def test_sizes(self, sizes: tuple[int, int]) -> None:
        with pytest.raises(GeometryError):
            BlockGeometry(block_size=sizes[0], kernel_block_size=sizes[1])

    @pytest.mark.parametrize(
        "field", ["max_num_reqs", "max_num_blocks_per_req", "max_num_batched_tokens"]
    )
    def test_table_sizes(self, field: str) -> None:
        sizes = {"max_num_reqs": 1, "max_num_blocks_per_req": 1, "max_num_batched_tokens": 1}
        with pytest.raises(GeometryError, match=field):
            BlockTable(geometry=SIXTEEN, **(sizes | {field: 0}))


class TestSlots:
    @pytest.mark.parametrize("position", [-1, 32])
    def test_a_token_without_a_block_is_refused(self, position: int) -> None:
        table = make_table()
        table.add_row([5, 2], 1)
        before = table.compute_slot_mapping(np.array([1]), np.array([3])).copy()
        with pytest.raises(BlockIdError, match=f"token=1, row=1, position={position}"):
            table.compute_slot_mapping(np.array([1, 1]), np.array([0, position]))
        assert table.compute_slot_mapping(np.array([1]), np.array([3])) == before

    @pytest.mark.parametrize(
        "rows,positions",
        [([0], [0, 1]), ([[0]], [[0]]), ([0.0], [0]), ([0] * 33, [0] * 33)],
        ids=["lengths", "shape", "type", "too-many"],
    )
    def test_bad_vectors_are_refused(self, rows: object, positions: object) -> None:
        table = make_table()
        table.add_row([1], 0)
        with pytest.raises(GeometryError):
            table.compute_slot_mapping(np.array(rows), np.array(positions))


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
        tables = make_groups(**changes)
        assert [table.numpy().shape for table in tables] == [(4, width) for width in widths]

    def test_every_operation_reaches_every_group(self) -> None:
        tables = make_groups(device="cpu")
        tables.add_row([[1, 2], [3]], 0)
        tables.append_row([[4], []], 0)
        tables.add_row([[9], [8]], 1)
        tables.swap_row(0, 1)
        tables.move_row(1, 2)
        tables.clear_row(0)
        tables.commit(3)
        assert tables[0].numpy()[2].tolist() == [1, 2, 4, 0, 0, 0]
        assert tables[1].numpy()[2].tolist() == [3, 0, 0]
        assert not any(table.numpy()[[0, 1, 3]].any() for table in tables)
        first, second = tables.compute_slot_mapping(np.array([2, 2]), np.array([0, 17]))
        assert (first.tolist(), second.tolist()) == ([16, 33], [96, 113])
        tables.commit_slot_mapping()
        assert [table.device_slot_mapping(2).tolist() for table in tables] == [[16, 33], [96, 113]]
        tables.clear()
        assert not any(table.numpy().any() for table in tables)

    def test_one_bad_group_changes_none(self) -> None:
        tables = make_groups()
        tables.add_row([[1], [2]], 0)
        for change in (tables.append_row, tables.add_row):
            with pytest.raises(BlockIdError):
                change([[5], [-1]], 0)
            with pytest.raises(BlockIdError):
                change([[5], [1, 2, 3, 4]], 0)
        assert [table.numpy()[0, :2].tolist() for table in tables] == [[1, 0], [2, 0]]

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
        ],
        ids=str,
    )
    def test_sizes_are_checked(self, changes: dict[str, object]) -> None:
        with pytest.raises(GeometryError):
            make_groups(**changes)


class TestCopies:
    def test_numpy_alone_has_no_device_copy(self) -> None:
        table = make_table()
        table.add_row([1], 0)
        table.commit(1)
        table.commit_slot_mapping()
        for read in (table.device_tensor, table.device_slot_mapping):
            with pytest.raises(ConfigError, match="no device"):
                read()

    def test_torch_is_not_needed_without_a_device(self) -> None:
        program = (
            "import sys; from kvconnector.cache.block_table import MultiGroupBlockTable as T;"
            "t = T(block_sizes=[4], max_num_reqs=1, max_model_len=8, max_num_batched_tokens=8);"
            "t.add_row([[3]], 0); t.commit(1); print(t.compute_slot_mapping([0], [2])[0]);"
            "sys.exit('torch' in sys.modules)"
        )
        subprocess.run([sys.executable, "-c", program], check=True, timeout=60)

    def test_on_the_cpu_all_accessors_share_memory(self) -> None:
        pytest.importorskip("torch")
        for table in (make_table(), make_table(device="cpu")):
            table.add_row([3, 4], 1)
            assert table.host_tensor(2).tolist() == table.numpy(2).tolist()
        assert table.device_tensor(2).data_ptr() == table.numpy().ctypes.data
        slots = table.compute_slot_mapping(np.array([1, 1]), np.array([0, 16]))
        table.commit_slot_mapping()
        assert table.device_slot_mapping(3).tolist() == [*slots.tolist(), PAD_SLOT_ID]

    @pytest.mark.parametrize("num_reqs", [-1, 5])
    def test_commit_of_rows_that_are_not_there_is_refused(self, num_reqs: int) -> None:
        with pytest.raises(GeometryError, match=f"num_reqs={num_reqs}"):
            make_table().commit(num_reqs)


@pytest.mark.gpu
class TestGpu:
    def test_the_device_sees_rows_when_committed(self) -> None:
        table = make_table(device="cuda")
        table.add_row([3, 4], 1)
        assert not table.device_tensor().any()
        table.commit(2)
        assert table.device_tensor(2).tolist() == [[0] * 6, [3, 4, 0, 0, 0, 0]]
        assert table.host_tensor().is_pinned()
        table.clear()
        assert not table.device_tensor().any()

    def test_slots_behind_the_last_token_are_padding_on_the_device(self) -> None:
        table = make_table(device="cuda")
        table.add_row([3, 4], 1)
        for num_tokens in (20, 5, 0, 7):
            slots = table.compute_slot_mapping(np.ones(num_tokens, int), np.arange(num_tokens))
            table.commit_slot_mapping()
            expected = slots.tolist() + [PAD_SLOT_ID] * (32 - num_tokens)
            assert table.device_slot_mapping().tolist() == expected

    def test_a_copy_in_flight_is_not_overwritten(self) -> None:
        import torch

        table = make_table(device="cuda")
        seen = []
        for step in range(20):
            torch.cuda._sleep(2_000_000)
            table.add_row([step], 0)
            slots = table.compute_slot_mapping(np.zeros(1, int), np.zeros(1, int))
            table.commit(1)
            table.commit_slot_mapping()
            seen.append((table.device_tensor()[0, 0].clone(), table.device_slot_mapping(1).clone()))
            assert slots.tolist() == [step * 16]
        expected = [(step, [step * 16]) for step in range(20)]
        assert [(block.item(), slot.tolist()) for block, slot in seen] == expected
