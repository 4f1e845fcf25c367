"""Settings, admission, first allocation, release."""

from __future__ import annotations

from typing import Any

import pytest

from kvconnector.cache.block_manager import (
    AllocStatus,
    BlockSpaceManager,
    DoubleAllocationError,
    ExtraKey,
    OutOfBlocksError,
    Sequence,
    SequenceError,
    SequenceGroup,
    SequenceStatus,
)
from kvconnector.errors import ConfigError, UnknownRequestError
from tests.unit.cache.block_managers import group_of


@pytest.mark.parametrize(
    "field, value",
    [
        ("block_size", 0),
        ("num_gpu_blocks", 0),
        ("num_cpu_blocks", -1),
        ("watermark", -0.1),
        ("watermark", 1.0),
        ("watermark", float("nan")),
        ("sliding_window", 0),
        ("max_step_tokens", 0),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(field: str, value: float) -> None:
    settings: dict[str, Any] = {"block_size": 4, "num_gpu_blocks": 8, "num_cpu_blocks": 8}
    with pytest.raises(ConfigError, match=field) as caught:
        BlockSpaceManager(**(settings | {field: value}))
    assert field in caught.value.context


@pytest.mark.parametrize(
    "num_tokens, expected",
    [(1, AllocStatus.OK), (32, AllocStatus.OK), (33, AllocStatus.NEVER), (40, AllocStatus.NEVER)],
)
def test_an_empty_device_admits_what_leaves_the_watermark_free(
    num_tokens: int, expected: AllocStatus
) -> None:
    manager = BlockSpaceManager(4, 10, 0, watermark=0.2)  # 8 blocks above the watermark
    assert manager.can_allocate(group_of(num_tokens)) is expected


def test_a_group_waits_until_enough_blocks_above_the_watermark_are_free() -> None:
    manager = BlockSpaceManager(4, 10, 0, watermark=0.2)
    first = group_of(16)
    manager.allocate(first)
    assert manager.can_allocate(group_of(16, seq_ids=(2,))) is AllocStatus.OK
    assert manager.can_allocate(group_of(17, seq_ids=(2,))) is AllocStatus.LATER
    manager.free(first.seqs()[0])
    assert manager.can_allocate(group_of(17, seq_ids=(2,))) is AllocStatus.OK


def test_a_group_without_a_waiting_sequence_is_refused() -> None:
    manager = BlockSpaceManager(4, 10, 0)
    group = group_of(9)
    group.seqs()[0].status = SequenceStatus.RUNNING
    with pytest.raises(SequenceError, match="waits"):
        manager.can_allocate(group)
    with pytest.raises(SequenceError, match="waits"):
        manager.allocate(group)


@pytest.mark.parametrize(
    "tokens, extra_keys",
    [([1, 2, 4], ()), ([1, 2], ()), ([1, 2, 3, 4], ()), ([1, 2, 3], ("adapter",))],
)
def test_waiting_sequences_with_different_prompts_are_refused(
    tokens: list[int], extra_keys: tuple[ExtraKey, ...]
) -> None:
    manager = BlockSpaceManager(4, 10, 0)
    seqs = [Sequence(1, [1, 2, 3]), Sequence(2, tokens, extra_keys=extra_keys)]
    with pytest.raises(SequenceError, match="same tokens"):
        manager.allocate(SequenceGroup("r", seqs))
    assert manager.get_num_free_gpu_blocks() == 10


def test_double_allocation_is_refused_and_changes_nothing() -> None:
    manager = BlockSpaceManager(4, 10, 0)
    group = group_of(9)
    manager.allocate(group)
    table = manager.get_block_table(group.seqs()[0])
    with pytest.raises(DoubleAllocationError) as caught:
        manager.allocate(group)
    assert caught.value.context["seq_id"] == 1
    assert manager.get_block_table(group.seqs()[0]) == table
    assert manager.get_num_free_gpu_blocks() == 7


def test_allocating_more_than_is_free_changes_nothing() -> None:
    manager = BlockSpaceManager(4, 4, 0)
    manager.allocate(group_of(8))
    late = group_of(12, seq_ids=(2, 3))
    with pytest.raises(OutOfBlocksError) as caught:
        manager.allocate(late)
    assert caught.value.context == {"device": "gpu", "needed": 3, "free": 2, "total": 4}
    assert manager.get_num_free_gpu_blocks() == 2
    for seq in late.seqs():
        with pytest.raises(UnknownRequestError):
            manager.get_block_table(seq)
