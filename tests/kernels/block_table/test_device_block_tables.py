from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvconnector.cache.device_block_table import StagedWriteTensor
from kvconnector.cache.slot_mapping import PAD_SLOT_ID, BlockGeometry, naive_slot
from kvconnector.errors import BlockIdError, ConfigError, GeometryError
from kvconnector.layout import ContextParallel
from kvconnector_kernels.block_table import implementation
from tests.kernels.block_table.tables import (
    CPU,
    MAX_REQS,
    gather,
    make_host_tables,
    make_tables,
    slots,
    vector,
)

HAS_GPU = torch.cuda.is_available()
PLACES = ["naive", "cpu", "triton"]


@pytest.fixture(scope="module", params=PLACES)
def place(request):
    """A device and its kernels: Triton runs natively on a GPU, else in its interpreter. Since writes may run in any
    order, the last one runs first here.
    """
    device = "cuda" if request.param == "triton" and HAS_GPU else "cpu"
    kernels = implementation(request.param)

    def write(tables, geometry, records, ids):
        kernels.apply_writes(tables, geometry, records.flip(0), ids)

    others = {"gather_rows": kernels.gather_rows, "map_slots": kernels.map_slots}
    return {"device": device, "kernels": SimpleNamespace(apply_writes=write, **others)}


class TestSteps:
    def test_padding_rows_and_missing_blocks_get_no_slot(self, place):
        tables = make_tables(place)
        tables.append_block_ids(1, [[3], [2]], overwrite=True)
        tables.apply_staged_writes()
        gather(tables, [1, 1, 1])
        assert gather(tables, [1, -1, MAX_REQS])[0] == [[3, 0, 0, 0, 0, 0], [0] * 6, [0] * 6]
        # the row has one block of 4 tokens in group 0 and one of 8 in group 1
        expected = [[12, 15, -1, -1, -1], [16, 19, 20, -1, -1]]
        assert slots(tables, [0, 4, 5, 5], [0, 3, 4, 8, 0]) == expected

    def test_dummy_tables_share_the_real_memory(self, place):
        tables = make_tables(place)
        tables.append_block_ids(0, [[5], [1]], overwrite=True)
        tables.apply_staged_writes()
        rows = tables.gather_block_tables(vector(tables, [0, 0], torch.int32))
        mapped = tables.compute_slot_mappings(
            vector(tables, [0, 1, 2], torch.int32), vector(tables, [0, 1], torch.int64)
        )
        dummy_rows, dummy_slots = tables.dummy_block_tables(2), tables.dummy_slot_mappings()
        assert [table.data_ptr() for table in dummy_rows] == [table.data_ptr() for table in rows]
        assert dummy_slots.data_ptr() == mapped.data_ptr()
        assert not any(table.any() for table in dummy_rows)
        assert (dummy_slots == PAD_SLOT_ID).all()
        # the rows are empty, not just zero: a token finds no block
        assert slots(tables, [0, 1], [0]) == [[-1], [-1]]
        assert gather(tables, [0])[0] == [[5, 0, 0, 0, 0, 0]]


def test_a_step_may_append_to_a_row_and_replace_it(place):
    tables = make_tables(place)
    for ids, overwrite in (([[1], [5]], False), ([[2, 3], [6]], False), ([[9], []], True)):
        tables.append_block_ids(1, ids, overwrite=overwrite)
    tables.append_block_ids(1, [[8], [7]], overwrite=False)
    tables.apply_staged_writes()
    first, second = gather(tables, [1])
    assert first == [[9, 8, 0, 0, 0, 0]]
    assert second == [[28, 29, 30, 31] + [0] * 8]
    assert [tables.num_blocks(group, 1) for group in range(2)] == [2, 1]


@st.composite
def steps(draw):
    """For each step: the changes of rows, the requests of the batch, and their tokens."""
    ids = st.lists(st.integers(0, 500), max_size=3)
    rows = st.integers(0, MAX_REQS - 1)
    # up to more changes than are staged at once
    changes = st.lists(st.tuples(rows, ids, ids, st.booleans()), max_size=MAX_REQS + 2)
    batch = st.lists(rows, max_size=MAX_REQS, unique=True)
    return draw(st.lists(st.tuples(changes, batch, st.data()), min_size=1, max_size=3))


@st.composite
def geometries(draw):
    """Geometries of two groups of one rank, each with or without context parallelism and compressed rows, with any
    kernel block sizes.
    """
    found = []
    for _ in range(2):
        is_ring = draw(st.sampled_from([False, False, False, True]))
        world_size = 1 if is_ring else draw(st.integers(1, 3))
        m = 1 if is_ring else draw(st.sampled_from([1, 1, 2, 4]))
        interleave, rank = (
            m * draw(st.sampled_from([1, 2, 3])),
            draw(st.integers(0, world_size - 1)),
        )
        size = interleave * draw(st.sampled_from([1, 2, 4, 5, 8]))
        kernel = draw(st.sampled_from([p for p in range(m, size + 1, m) if size % p == 0]))
        place = ContextParallel(world_size=world_size, rank=rank, interleave_tokens=interleave)
        found.append(
            BlockGeometry(
                block_size=size,
                kernel_block_size=kernel,
                context_parallel=place,
                row_tokens=m,
                is_ring=is_ring,
            )
        )
    return found


@given(sequence=steps(), geometries=geometries())
def test_device_and_host_slots_equal_the_naive_ones(place, sequence, geometries):
    sizes = {
        "block_sizes": [each.block_size for each in geometries],
        "kernel_block_sizes": [each.kernel_block_size for each in geometries],
        "max_model_len": 60 * max(each.virtual_block_tokens for each in geometries),
        "context_parallel": [each.context_parallel for each in geometries],
        "row_tokens": [each.row_tokens for each in geometries],
        "rings": [each.is_ring for each in geometries],
    }
    tables, host = make_tables(place, **sizes), make_host_tables(**sizes)
    held = [[[], []] for _ in range(MAX_REQS)]
    for changes, batch, step_data in sequence:
        for row, *added, overwrite in changes:
            # a ring's row has room for one block
            old = [[], []] if overwrite else held[row]
            first, second = (
                ids[: 1 - len(before)] if each.is_ring else ids
                for ids, before, each in zip(added, old, geometries, strict=True)
            )
            tables.append_block_ids(row, [first, second], overwrite=overwrite)
            (host.add_row if overwrite else host.append_row)([first, second], row)
            held[row] = [old[0] + first, old[1] + second]
        tables.apply_staged_writes()
        assert gather(tables, batch) == [table.device_tensor()[batch].tolist() for table in host]
        starts, tokens = [0], []
        for row in batch:
            reach = min(
                # the first tokens of a row need no slot, so none of their row's block either
                (99 if each.is_ring and ids else len(ids) * each.virtual_block_tokens)
                + each.row_tokens
                - 1
                for ids, each in zip(held[row], geometries, strict=True)
            )
            position = st.integers(0, max(reach - 1, 0))
            drawn = step_data.draw(st.lists(position, max_size=min(6, reach)))
            tokens += [(row, each) for each in drawn]
            starts.append(len(tokens))
        rows, positions = np.array(tokens, int).reshape(-1, 2).T
        expected = [
            [naive_slot(held[row][group], position, geometry) for row, position in tokens]
            for group, geometry in enumerate(geometries)
        ]
        assert slots(tables, starts, positions.tolist()) == expected
        assert [each.tolist() for each in host.compute_slot_mapping(rows, positions)] == expected


@pytest.mark.parametrize("at", [7, 6])
def test_only_the_last_token_of_a_row_needs_a_block(at):
    tables = make_host_tables(kernel_block_sizes=[4, 4], row_tokens=[1, 4], max_model_len=7)
    assert [table.max_num_blocks_per_req for table in tables] == [2, 1]
    tables.add_row([[3, 4], []], 0)
    if at == 6:
        found = tables.compute_slot_mapping(np.array([0]), np.array([at]))
        assert [each.tolist() for each in found] == [[18], [PAD_SLOT_ID]]
    else:
        with pytest.raises(BlockIdError, match="position=7"):
            tables.compute_slot_mapping(np.array([0]), np.array([at]))


def test_a_bad_group_leaves_all_groups_unchanged():
    tables = make_tables(CPU)
    for block_ids in ([[5], [-1]], [[5], [1, 2, 3, 4]], [[5], [2**29]]):
        with pytest.raises(BlockIdError):
            tables.append_block_ids(0, block_ids, overwrite=False)
    assert tables.num_blocks(0, 0) == 0


STARTS, POSITIONS = torch.zeros(4, dtype=torch.int32), torch.zeros(25, dtype=torch.int64)
REFUSED = [
    (lambda t: t.append_block_ids(4, [[1], [1]], overwrite=True), "req_index=4"),
    (lambda t: t.append_block_ids(0, [[1]], overwrite=True), "num_groups=2, num_given=1"),
    (lambda t: t.num_blocks(2, 0), "group=2"),
    (lambda t: t.gather_block_tables(POSITIONS[:2]), "req_indices"),
    (lambda t: t.gather_block_tables(STARTS.reshape(2, 2)), "req_indices"),
    (lambda t: t.gather_block_tables(torch.zeros(5, dtype=torch.int32)), "req_indices"),
    (lambda t: t.gather_block_tables(STARTS[::2]), "req_indices"),
    (lambda t: t.compute_slot_mappings(STARTS[:2], STARTS[:2]), "positions"),
    (lambda t: t.compute_slot_mappings(STARTS[:2], POSITIONS), "positions=25, limit=24"),
    (lambda t: t.compute_slot_mappings(STARTS[:0], POSITIONS[:1]), "query_start_loc"),
    (lambda t: t.dummy_block_tables(5), "limit=4"),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_device_tables_refuse_wrong_arguments(number):
    call, complaint = REFUSED[number]
    with pytest.raises(GeometryError, match=complaint):
        call(make_tables(CPU))


@pytest.mark.parametrize(
    "changes",
    [{"block_sizes": []}, {"max_num_reqs": 0}, {"max_num_batched_tokens": 0}, {"device": "meta"}],
    ids=str,
)
def test_device_tables_refuse_wrong_sizes_and_devices(changes):
    with pytest.raises(ConfigError if "device" in changes else GeometryError):
        make_tables(CPU, **changes)


def test_a_full_staging_buffer_is_flushed(place):
    staged = StagedWriteTensor(
        geometries=[BlockGeometry(block_size=4, kernel_block_size=4)],
        num_rows=2,
        max_blocks_per_row=[6],
        device=torch.device(str(place["device"])),
        kernels=place["kernels"],
        max_staged_ids=1,
    )
    for start in range(0, 6, 2):
        for row in range(2):
            ids = staged.check(0, start, [10 * row + start, 10 * row + start + 1])
            staged.stage(0, row, start, ids)
    staged.apply()
    expected = [[0, 1, 2, 3, 4, 5], [10, 11, 12, 13, 14, 15]]
    assert staged.tables.tables[0].tolist() == expected
    assert staged.tables.lengths.tolist() == [[6, 6]]


def test_rows_longer_than_a_tile(place):
    """Rows of 3000 ids and requests of 2500 tokens fill several tiles and part of another."""
    sizes = {"max_model_len": 12_000, "max_num_batched_tokens": 7000}
    tables, host = make_tables(place, **sizes), make_host_tables(**sizes)
    random = np.random.default_rng(0)
    for row in range(2):
        ids = [random.permutation(count) for count in (3000, 1500)]
        tables.append_block_ids(row, ids, overwrite=True)
        host.add_row(ids, row)
    tables.apply_staged_writes()
    assert gather(tables, [1, 0]) == [table.device_tensor()[[1, 0]].tolist() for table in host]
    positions = random.integers(0, 12_000, 5000)
    expected = host.compute_slot_mapping(np.repeat([1, 0], 2500), positions)
    found = slots(tables, [0, 2500, 5000], positions.tolist())
    assert found == [group.tolist() for group in expected]


def test_slots_beyond_32_bits(place):
    sizes = {"block_sizes": [512], "kernel_block_sizes": [512], "max_model_len": 512}
    tables = make_tables(place, **sizes)
    tables.append_block_ids(0, [[2**31 - 1]], overwrite=True)
    tables.apply_staged_writes()
    gather(tables, [0])
    assert slots(tables, [0, 2], [5, 511]) == [[1_099_511_627_269, 1_099_511_627_775]]
