"""The compiled kernels against the naive ones, on the CPU: Triton in its interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvconnector_kernels.block_table import (
    BlockTableKernels,
    TableGeometry,
    TableSet,
    implementation,
    implementation_for,
)

GPU = torch.cuda.is_available()
DEVICES = {"cpu": "cpu", "triton": "cuda" if GPU else "cpu"}
SENTINEL = -77
naive = implementation("naive")


@pytest.fixture(scope="module", params=["cpu", "triton"])
def kernels(request) -> tuple[BlockTableKernels, torch.device]:
    return implementation(request.param), torch.device(DEVICES[request.param])


def copy_of(tables: TableSet, device: torch.device) -> TableSet:
    copy = TableSet.zeros(tables.num_rows, tables.widths.tolist(), device)
    for target, source in zip(copy.tables, tables.tables, strict=True):
        target.copy_(source)
    copy.lengths.copy_(tables.lengths)
    return copy


def geometry_on(geometry: TableGeometry, device: torch.device) -> TableGeometry:
    return TableGeometry(
        geometry.block_sizes.to(device),
        geometry.kernel_block_sizes.to(device),
        geometry.world_size,
        geometry.rank,
        geometry.interleave_tokens,
    )


def assert_equal_sets(tables: TableSet, expected: TableSet) -> None:
    torch.testing.assert_close(tables.lengths.cpu(), expected.lengths, rtol=0, atol=0)
    for table, reference in zip(tables.tables, expected.tables, strict=True):
        torch.testing.assert_close(table.cpu(), reference, rtol=0, atol=0)


@st.composite
def geometries(draw) -> TableGeometry:
    interleave = draw(st.sampled_from([1, 2, 3]))
    kernel_sizes, sizes = [], []
    for _ in range(draw(st.integers(1, 3))):
        size = interleave * draw(st.sampled_from([1, 2, 4, 5]))
        divisors = [divisor for divisor in range(1, size + 1) if size % divisor == 0]
        sizes.append(size)
        kernel_sizes.append(draw(st.sampled_from(divisors)))
    world_size = draw(st.integers(1, 3))
    return TableGeometry(
        block_sizes=torch.tensor(sizes),
        kernel_block_sizes=torch.tensor(kernel_sizes),
        world_size=world_size,
        rank=draw(st.integers(0, world_size - 1)),
        interleave_tokens=interleave,
    )


@st.composite
def writes(draw, geometry: TableGeometry, num_rows: int, blocks_per_row: int):
    """Records of disjoint writes, and the ids they point into."""
    num_groups = len(geometry.block_sizes)
    records: list[list[int]] = []
    ids = [SENTINEL] * draw(st.integers(0, 3))
    for group in range(num_groups):
        for row in range(num_rows):
            start = draw(st.integers(0, blocks_per_row))
            parts = draw(st.integers(0, 2))
            for part in range(parts):
                count = draw(st.integers(0, blocks_per_row - start))
                length = start + count if part == parts - 1 else -1
                records.append([group, row, start, count, len(ids), length])
                ids += [100 * len(records) + index for index in range(count)]
                start += count
    records = draw(st.permutations(records))
    return (
        torch.tensor(records, dtype=torch.int32).reshape(-1, 6),
        torch.tensor([*ids, SENTINEL], dtype=torch.int32),
    )


@given(data=st.data())
def test_staged_writes(kernels, data):
    run, device = kernels
    geometry = data.draw(geometries())
    blocks_per_row, num_rows = data.draw(st.integers(1, 5)), 3
    records, ids = data.draw(writes(geometry, num_rows, blocks_per_row))
    ratios = (geometry.block_sizes // geometry.kernel_block_sizes).tolist()
    expected = TableSet.zeros(
        num_rows, [ratio * blocks_per_row for ratio in ratios], torch.device("cpu")
    )
    for table in expected.tables:
        table.fill_(SENTINEL)
    expected.lengths.fill_(SENTINEL)
    tables = copy_of(expected, device)
    naive.apply_writes(expected, geometry, records, ids)
    run.apply_writes(tables, geometry_on(geometry, device), records.to(device), ids.to(device))
    assert_equal_sets(tables, expected)


def test_rows_and_requests_longer_than_a_tile(kernels):
    """3000 ids per row and 2500 tokens per request: several tiles, the last one partial."""
    run, device = kernels
    geometry = TableGeometry(torch.tensor([6, 2]), torch.tensor([2, 2]), 2, 1, 2)
    cpu = torch.device("cpu")
    requests, batch = (TableSet.zeros(2, [3000, 2900], cpu) for _ in range(2))
    random = torch.Generator().manual_seed(0)
    ids = torch.randperm(5000, dtype=torch.int32, generator=random)
    records = torch.tensor(
        [[0, 1, 0, 1000, 7, 1000], [1, 1, 0, 2900, 1500, 2900], [1, 0, 0, 2100, 9, 2100]],
        dtype=torch.int32,
    )
    rows = torch.tensor([1, 0], dtype=torch.int32)
    query_start_loc = torch.tensor([0, 2500, 5000], dtype=torch.int32)
    positions = torch.randint(0, 12000, (5000,), generator=random)
    slots = torch.full((2, 7000), SENTINEL)
    on_device = [copy_of(tables, device) for tables in (requests, batch)]
    slots_on_device, geometry_there = slots.to(device), geometry_on(geometry, device)

    naive.apply_writes(requests, geometry, records, ids)
    naive.gather_rows(requests, batch, rows)
    naive.map_slots(batch, geometry, query_start_loc, positions, slots)
    run.apply_writes(on_device[0], geometry_there, records.to(device), ids.to(device))
    run.gather_rows(on_device[0], on_device[1], rows.to(device))
    run.map_slots(
        on_device[1],
        geometry_there,
        query_start_loc.to(device),
        positions.to(device),
        slots_on_device,
    )
    assert_equal_sets(on_device[0], requests)
    assert_equal_sets(on_device[1], batch)
    torch.testing.assert_close(slots_on_device.cpu(), slots, rtol=0, atol=0)
    assert (slots[:, :5000] >= 0).any(dim=1).all()


def test_slots_beyond_32_bits(kernels):
    run, device = kernels
    geometry = geometry_on(TableGeometry(torch.tensor([512]), torch.tensor([512]), 1, 0, 1), device)
    batch = TableSet.zeros(1, [1], device)
    batch.tables[0][0, 0] = 2**31 - 1
    batch.lengths[0, 0] = 1
    slots = torch.zeros((1, 3), dtype=torch.int64, device=device)
    run.map_slots(
        batch,
        geometry,
        torch.tensor([0, 2], dtype=torch.int32, device=device),
        torch.tensor([5, 511], device=device),
        slots,
    )
    assert slots.tolist() == [[1_099_511_627_269, 1_099_511_627_775, -1]]


def test_devices_without_kernels_are_refused():
    assert implementation_for(torch.device("cpu")) is implementation("cpu")
    with pytest.raises(ValueError, match="meta"):
        implementation_for(torch.device("meta"))
