import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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


# Two groups with blocks of 16 and 32 tokens have 4 rows of 6 and 3 blocks; row 0 is full.
FULL = [[7, 1, 2, 3, 4, 5], [2, 0, 1]]
REFUSED = [
    *(
        (lambda tables, ids=ids: tables.add_row([[5], ids], 0), BlockIdError, "")
        for ids in (
            [1, -1],
            [2**31],
            [2**70],
            [[1], [2]],
            [[1], [2, 3]],
            ["x"],
            [1.5],
            [0, True],
            np.array([2.5]),
            np.array([True]),
        )
    ),
    (lambda t: t.append_row([[], [1]], 0), BlockIdError, "num_blocks=3, num_new_blocks=1"),
    (lambda t: t.add_row([range(7), []], 1), BlockIdError, "max_num_blocks=6"),
    (lambda t: t.append_row([[1]], 1), GeometryError, "num_groups=2"),
    (lambda t: t.add_row([[1], [2], [3]], 1), GeometryError, "num_groups=2"),
    (lambda t: t.append_row([[1], [1]], 4), GeometryError, "no such row"),
    (lambda t: t.add_row([[1], [1]], -1), GeometryError, "no such row"),
    (lambda t: t.move_row(0, -1), GeometryError, "no such row"),
    (lambda t: t.swap_row(4, 0), GeometryError, "no such row"),
    (lambda t: t.clear_row(4), GeometryError, "no such row"),
    (lambda t: t[0].num_blocks(-1), GeometryError, "no such row"),
    (lambda t: t.commit(5), GeometryError, "num_reqs=5"),
    (lambda t: t[0].numpy(5), GeometryError, "num_reqs=5, limit=4"),
    (lambda t: t[0].host_tensor(-1), GeometryError, "num_reqs=-1"),
    (lambda t: t[0].device_tensor(5), GeometryError, "num_reqs=5"),
    (lambda t: t[0].device_slot_mapping(33), GeometryError, "num_tokens=33"),
    (lambda t: t.commit_slot_mapping(33), GeometryError, "num_tokens=33, limit=32"),
    (lambda t: t.commit_slot_mapping(-1), GeometryError, "num_tokens=-1"),
    (lambda t: t[0].append_row([1], 0), BlockIdError, "num_blocks=6, num_new_blocks=1"),
    (lambda t: t[0].add_row([-1], 0), BlockIdError, "lowest=-1"),
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
def test_refused_calls_change_no_rows(number):
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


def test_block_ids_that_overflow_kernel_ids_are_refused():
    tables = make_tables(block_sizes=[32], kernel_block_sizes=[16])
    tables.add_row([[2**30 - 1]], 0)
    assert tables[0].device_tensor()[0, :2].tolist() == [2**31 - 2, 2**31 - 1]
    with pytest.raises(BlockIdError, match="highest=1073741824"):
        tables.add_row([[2**30]], 0)


def geometry(**sizes):
    return BlockGeometry(**({"block_size": 4, "kernel_block_size": 4} | sizes))


UNEVEN = ContextParallel(world_size=2, interleave_tokens=3)
HALVES = ContextParallel(world_size=2, interleave_tokens=2)
IMPOSSIBLE = [
    (geometry, {"block_size": 48, "kernel_block_size": 32}, "block_size=48, kernel_block_size=32"),
    (geometry, {"context_parallel": UNEVEN}, "block_size=4, .*interleave_tokens=3"),
    (geometry, {"row_tokens": 0}, "row_tokens=0"),
    (geometry, {"kernel_block_size": 2, "row_tokens": 4}, "a row crosses"),
    (geometry, {"context_parallel": HALVES, "row_tokens": 4}, "a row crosses"),
    (geometry, {"block_size": 0}, "at least 1"),
    (geometry, {"kernel_block_size": 0}, "at least 1"),
    (ContextParallel, {"world_size": 0}, "."),
    (ContextParallel, {"world_size": 2, "rank": 2}, "."),
    (ContextParallel, {"rank": -1}, "."),
    (ContextParallel, {"interleave_tokens": 0}, "."),
    (make_groups, {"block_sizes": []}, "."),
    (make_groups, {"kernel_block_sizes": [16]}, "."),
    (make_groups, {"kernel_block_sizes": [16, 12]}, "."),
    (make_groups, {"row_tokens": [1]}, "row_tokens"),
    (make_groups, {"context_parallel": [HALVES]}, "context_parallel"),
    (make_groups, {"max_model_len": 0}, "."),
    (make_groups, {"num_speculative_tokens": -1}, "."),
    (make_groups, {"max_num_reqs": 0}, "."),
    (make_groups, {"max_num_batched_tokens": 0}, "."),
]


@pytest.mark.parametrize("make,sizes,complaint", IMPOSSIBLE)
def test_impossible_table_sizes_are_refused(make, sizes, complaint):
    with pytest.raises(GeometryError, match=complaint):
        make(**sizes)


@pytest.mark.parametrize(
    "changes,widths",
    [
        ({}, [6, 3]),
        ({"max_model_len": 97}, [7, 4]),
        ({"context_parallel": ContextParallel(world_size=4, rank=1)}, [2, 1]),
        ({"context_parallel": [ContextParallel(world_size=2), ContextParallel()]}, [3, 3]),
        ({"row_tokens": [4, 32], "max_model_len": 31}, [2, 1]),
        ({"row_tokens": [16, 32], "max_model_len": 95}, [5, 2]),
        ({"num_speculative_tokens": 4}, [6, 5]),
        ({"kernel_block_sizes": [16, 8]}, [6, 12]),
        ({"block_sizes": [16, 4096], "num_speculative_tokens": 0}, [6, 1]),
    ],
)
def test_rows_hold_the_longest_request(changes, widths):
    shapes = [tuple(table.device_tensor().shape) for table in make_groups(**changes)]
    assert shapes == [(4, width) for width in widths]


ROWS = st.integers(0, 3)
IDS = st.lists(st.integers(0, 900), max_size=2)
CHANGES = st.one_of(
    st.tuples(st.sampled_from(["append_row", "add_row"]), st.tuples(IDS, IDS), ROWS),
    st.tuples(st.sampled_from(["move_row", "swap_row"]), ROWS, ROWS),
    st.tuples(st.just("clear_row"), ROWS),
    st.tuples(st.just("clear")),
)


def changed(rows, change, *arguments):
    """Return lists of ids by row and group, after a change."""
    rows = [[list(ids) for ids in row] for row in rows]
    match change, arguments:
        case "append_row", (ids, row):
            rows[row] = [old + new for old, new in zip(rows[row], ids, strict=True)]
        case "add_row", (ids, row):
            rows[row] = list(ids)
        case "move_row", (source, target) if source != target:
            rows[target], rows[source] = rows[source], [[], []]
        case "swap_row", (first, second):
            rows[first], rows[second] = rows[second], rows[first]
        case "clear_row", (row,):
            rows[row] = [[], []]
        case "clear", ():
            rows = [[[], []]] * 4
    return rows


def test_a_row_that_moves_leaves_nothing_behind_and_stays_where_it_moves_onto_itself():
    table = make_groups(kernel_block_sizes=[16, 8], max_model_len=400)[0]
    table.add_row([3, 4], 1)
    table.add_row([7], 2)
    table.move_row(1, 2)
    table.move_row(2, 2)
    assert [table.num_blocks(row) for row in range(4)] == [0, 0, 2, 0]
    assert [row[:2] for row in table.numpy().tolist()] == [[0, 0], [0, 0], [3, 4], [0, 0]]
    table.swap_row(2, 0)
    assert [table.num_blocks(row) for row in range(4)] == [2, 0, 0, 0]
    assert [row[:2] for row in table.numpy().tolist()] == [[3, 4], [0, 0], [0, 0], [0, 0]]


@given(st.lists(CHANGES, max_size=12))
def test_rows_equal_lists_of_ids(changes):
    tables = make_groups(kernel_block_sizes=[16, 8], max_model_len=400)
    singles = list(make_groups(kernel_block_sizes=[16, 8], max_model_len=400))
    rows = [[[], []]] * 4
    for name, *arguments in changes:
        rows = changed(rows, name, *arguments)
        getattr(tables, name)(*arguments)
        for group, table in enumerate(singles):
            own = [ids[group] if isinstance(ids, tuple) else ids for ids in arguments]
            getattr(table, name)(*own)
    for group, ratio in enumerate((1, 4)):
        for table in (tables[group], singles[group]):
            width = table.numpy().shape[1]
            ids = [[ratio * i + j for i in row[group] for j in range(ratio)] for row in rows]
            assert table.numpy().tolist() == [each + [0] * (width - len(each)) for each in ids]
            assert [table.num_blocks(row) for row in range(4)] == [len(r[group]) for r in rows]


def test_host_and_device_rows_are_equal():
    table = make_tables()[0]
    table.add_row([3, 4], 1)
    expected = [[0] * 6, [3, 4, 0, 0, 0, 0]]
    for rows in (table.numpy(2), table.host_tensor(2), table.device_tensor(2)):
        assert rows.tolist() == expected
    assert table.numpy().shape == table.host_tensor().shape == (4, 6)
    with pytest.raises(ValueError, match="read-only"):
        table.numpy()[0, 0] = 1
    table.append_row([5], 1)
    assert table.numpy(2)[1].tolist() == [3, 4, 5, 0, 0, 0]
    table.add_row([6], 1)
    assert table.numpy(2)[1].tolist() == [6, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_some_of_the_slots_can_be_committed(device):
    tables = make_tables(device=device)
    tables.add_row([[3, 4]], 1)
    (table,) = tables
    for count, num_tokens in ((20, 20), (20, 12), (5, None), (20, 0), (7, 32), (20, None)):
        slots = table.compute_slot_mapping(np.ones(count, int), np.arange(count)).tolist()
        table.commit_slot_mapping(num_tokens)
        kept = slots[:num_tokens]
        padding = [PAD_SLOT_ID] * (32 - len(kept))
        assert table.device_slot_mapping().tolist() == kept + padding


@pytest.mark.gpu
class TestGpu:
    def test_the_device_gets_rows_on_commit(self):
        tables = make_tables(device="cuda")
        table = tables[0]
        tables.add_row([[3, 4]], 1)
        assert not table.device_tensor().any()
        tables.commit(2)
        assert table.device_tensor(2).tolist() == [[0] * 6, [3, 4, 0, 0, 0, 0]]
        tables.clear()
        assert not table.device_tensor().any()

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
