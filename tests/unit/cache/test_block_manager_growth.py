"""Appending slots, forks, copy on write."""

from __future__ import annotations

import pytest

from kvconnector.cache.block_manager import (
    BlockSpaceManager,
    DoubleAllocationError,
    OutOfBlocksError,
    Sequence,
    SequenceError,
)
from kvconnector.errors import BlockIdError, UnknownRequestError
from tests.unit.cache.block_managers import running


def test_negative_lookahead_is_refused() -> None:
    manager = BlockSpaceManager(4, 10, 0)
    group = running(manager, 4)
    with pytest.raises(BlockIdError, match="negative"):
        manager.append_slots(group.seqs()[0], num_lookahead_slots=-1)
    with pytest.raises(BlockIdError, match="negative"):
        manager.can_append_slots(group, num_lookahead_slots=-1)


def test_a_full_device_refuses_a_new_block_and_changes_nothing() -> None:
    manager = BlockSpaceManager(4, 2, 0, watermark=0)
    group = running(manager, 7)
    (seq,) = group.seqs()
    seq.append_tokens([7])
    assert manager.can_append_slots(group)
    manager.append_slots(seq)
    seq.append_tokens([8])
    assert not manager.can_append_slots(group)
    table = manager.get_block_table(seq)
    with pytest.raises(OutOfBlocksError):
        manager.append_slots(seq)
    assert manager.get_block_table(seq) == table
    assert manager.get_num_free_gpu_blocks() == 0


def test_shared_lookahead_blocks_are_replaced_without_a_copy() -> None:
    manager = BlockSpaceManager(4, 10, 0)
    (parent,) = running(manager, 4).seqs()
    parent.append_tokens([7, 8, 9, 10])
    manager.append_slots(parent, num_lookahead_slots=2)
    child = parent.fork(2)
    manager.fork(parent, child)
    child.append_tokens([11])
    assert manager.append_slots(child) == []
    parent_table, child_table = manager.get_block_table(parent), manager.get_block_table(child)
    assert parent_table[:2] == child_table[:2]
    assert parent_table[2] != child_table[2]


def test_a_fork_is_refused_for_unknown_allocated_or_different_sequences() -> None:
    manager = BlockSpaceManager(4, 10, 0)
    (parent,) = running(manager, 6).seqs()
    child = parent.fork(2)
    with pytest.raises(UnknownRequestError) as unknown:
        manager.fork(child, parent.fork(3))
    assert unknown.value.context == {"seq_id": 2}
    with pytest.raises(SequenceError, match="start with the tokens"):
        manager.fork(parent, Sequence(2, [0, 1, 2, 3, 4, 6]))
    with pytest.raises(SequenceError, match="start with the tokens"):
        manager.fork(parent, Sequence(2, range(5)))
    with pytest.raises(SequenceError, match="extra keys"):
        manager.fork(parent, Sequence(2, range(6), extra_keys=["adapter"]))
    manager.fork(parent, child)
    with pytest.raises(DoubleAllocationError):
        manager.fork(parent, child)
    manager.free(parent)
    manager.free(child)
    assert manager.get_num_free_gpu_blocks() == 10


def test_a_shorter_sequence_under_the_same_id_is_refused() -> None:
    manager = BlockSpaceManager(4, 10, 0)
    running(manager, 6)
    with pytest.raises(SequenceError, match="shrink"):
        manager.append_slots(Sequence(1, range(5)))
