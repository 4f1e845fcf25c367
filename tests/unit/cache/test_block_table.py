import numpy as np
import pytest

from kvconnector.cache.block_table import MultiGroupBlockTable
from kvconnector.cache.slot_mapping import PAD_SLOT_ID, BlockGeometry
from kvconnector.errors import BlockIdError, GeometryError
from kvconnector.layout import ContextParallel


def make_tables(**changes):
    arguments = {
        "block_sizes": [16],
        "max_num_reqs": 4,
        "max_model_len": 96,
        "max_num_batched_tokens": 32,
        "device": "cpu",
    }
    return MultiGroupBlockTable(**(arguments | changes))


def make_groups(**changes):
    return make_tables(**({"block_sizes": [16, 32]} | changes))


# Of two groups of blocks of 16 and 32 tokens, with 4 rows of 6 and 3 blocks, of which row 0 is full.
FULL = [[7, 1, 2, 3, 4, 5], [2, 0, 1]]
REFUSED = [
    *(
        (lambda tables, ids=ids: tables.add_row([[5], ids], 0), BlockIdError, "")
        for ids in ([1, -1], [2**31], [2**70], [[1], [2]], ["x"], [1.5], np.array([2.5]))
    ),
    (lambda t: t.append_row([[], [1]], 0), BlockIdError, "num_blocks=3, num_new_blocks=1"),
    (lambda t: t.add_row([range(7), []], 1), BlockIdError, "max_num_blocks=6"),
    (lambda t: t.append_row([[1]], 1), GeometryError, "num_groups=2"),
    (lambda t: t.add_row([[1], [2], [3]], 1), GeometryError, "num_groups=2"),
    (lambda t: t.append_row([[1], [1]], 4), GeometryError, "no such row"),
    (lambda t: t.move_row(0, -1), GeometryError, "no such row"),
    (lambda t: t.swap_row(4, 0), GeometryError, "no such row"),
    (lambda t: t.clear_row(4), GeometryError, "no such row"),
    (lambda t: t[0].num_blocks(-1), GeometryError, "no such row"),
    (lambda t: t.commit(5), GeometryError, "num_reqs=5"),
    *(
        (
            lambda t, rows=rows, at=at: t.compute_slot_mapping(np.array(rows), np.array(at)),
            error,
            text,
        )
        for rows, at, error, text in (
            ([4], [0], GeometryError, "no such row"),
            ([0], [0, 1], GeometryError, "one row and one position"),
            ([[0]], [[0]], GeometryError, "vector of integers"),
            ([0.0], [0], GeometryError, "vector of integers"),
            ([0] * 33, [0] * 33, GeometryError, "num_tokens"),
            ([0, 0], [0, -1], BlockIdError, "token=1, row=0, position=-1"),
            ([0, 1], [0, 0], BlockIdError, "token=1, row=1, position=0"),
        )
    ),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_makes_no_sense_is_refused_and_changes_nothing(number):
    call, error, text = REFUSED[number]
    tables = make_groups()
    tables.add_row(FULL, 0)
    before = [slots.copy() for slots in tables.compute_slot_mapping(np.zeros(3, int), np.arange(3))]
    with pytest.raises(error, match=text or "block ids"):
        call(tables)
    assert [table.device_tensor()[0].tolist() for table in tables] == FULL
    assert not any(table.device_tensor()[1:].any() for table in tables)
    after = tables.compute_slot_mapping(np.zeros(3, int), np.arange(3))
    assert np.array_equal(after, before)


def test_an_id_whose_kernel_ids_overflow_is_refused():
    tables = make_tables(block_sizes=[32], kernel_block_sizes=[16])
    tables.add_row([[2**30 - 1]], 0)
    assert tables[0].device_tensor()[0, :2].tolist() == [2**31 - 2, 2**31 - 1]
    with pytest.raises(BlockIdError, match="highest=1073741824"):
        tables.add_row([[2**30]], 0)


def geometry(**sizes):
    return BlockGeometry(**({"block_size": 4, "kernel_block_size": 4} | sizes))


UNEVEN = ContextParallel(world_size=2, interleave_tokens=3)
IMPOSSIBLE = [
    (geometry, {"block_size": 48, "kernel_block_size": 32}, "block_size=48, kernel_block_size=32"),
    (geometry, {"context_parallel": UNEVEN}, "block_size=4, .*interleave_tokens=3"),
    (geometry, {"block_size": 0}, "at least 1"),
    (geometry, {"kernel_block_size": 0}, "at least 1"),
    (ContextParallel, {"world_size": 0}, "."),
    (ContextParallel, {"world_size": 2, "rank": 2}, "."),
    (ContextParallel, {"rank": -1}, "."),
    (ContextParallel, {"interleave_tokens": 0}, "."),
    (make_groups, {"block_sizes": []}, "."),
    (make_groups, {"kernel_block_sizes": [16]}, "."),
    (make_groups, {"kernel_block_sizes": [16, 12]}, "."),
    (make_groups, {"max_model_len": 0}, "."),
    (make_groups, {"num_speculative_tokens": -1}, "."),
    (make_groups, {"max_num_reqs": 0}, "."),
    (make_groups, {"max_num_batched_tokens": 0}, "."),
]


@pytest.mark.parametrize("make,sizes,complaint", IMPOSSIBLE)
def test_sizes_that_do_not_fit_are_refused(make, sizes, complaint):
    with pytest.raises(GeometryError, match=complaint):
        make(**sizes)


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
def test_rows_hold_the_longest_request(changes, widths):
    shapes = [tuple(table.device_tensor().shape) for table in make_groups(**changes)]
    assert shapes == [(4, width) for width in widths]


@pytest.mark.gpu
class TestGpu:
    def test_the_device_sees_rows_when_committed(self):
        tables = make_tables(device="cuda")
        table = tables[0]
        tables.add_row([[3, 4]], 1)
        assert not table.device_tensor().any()
        tables.commit(2)
        assert table.device_tensor(2).tolist() == [[0] * 6, [3, 4, 0, 0, 0, 0]]
        tables.clear()
        assert not table.device_tensor().any()

    def test_slots_behind_the_last_token_are_padding_on_the_device(self):
        tables = make_tables(device="cuda")
        tables.add_row([[3, 4]], 1)
        for num_tokens in (20, 5, 0, 7):
            (slots,) = tables.compute_slot_mapping(np.ones(num_tokens, int), np.arange(num_tokens))
            tables.commit_slot_mapping()
            expected = slots.tolist() + [PAD_SLOT_ID] * (32 - num_tokens)
            assert tables[0].device_slot_mapping().tolist() == expected

    def test_a_copy_in_flight_is_not_overwritten(self):
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
