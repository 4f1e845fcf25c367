"""Appending slots, forks, copy on write."""

from __future__ import annotations

import pytest

from kvconnector.cache.block_manager import (
    BlockSpaceManager,
    DoubleAllocationError,
    OutOfBlocksError,
    Sequence,
    SequenceError,
    SequenceGroup,
    split_dependent_copies,
)
from kvconnector.errors import BlockIdError, UnknownRequestError
from tests.unit.cache.block_managers import running


def test_lookahead_slots_are_reserved_once_and_then_used() -> None:
    manager = BlockSpaceManager(4, 10, 0)
    (seq,) = running(manager, 4).seqs()
    seq.append_tokens([7])
    manager.append_slots(seq, num_lookahead_slots=4)
    table = manager.get_block_table(seq)
    assert len(table) == 3
    seq.append_tokens([8, 9, 10, 11])
    manager.append_slots(seq)
    assert manager.get_block_table(seq) == table


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


def test_the_first_writer_copies_a_shared_block_and_the_last_keeps_it() -> None:
    manager = BlockSpaceManager(4, 10, 0)
    first, second = running(manager, 6, seq_ids=(1, 2)).seqs()
    shared = manager.get_block_table(first)
    first.append_tokens([7])
    second.append_tokens([8])
    copies = manager.append_slots(first)
    own = manager.get_block_table(first)
    assert copies == [(shared[1], own[1])]
    assert own[0] == shared[0]
    assert own[1] not in shared
    assert manager.append_slots(second) == []
    assert manager.get_block_table(second) == shared


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


def test_can_append_slots_counts_the_worst_case_for_every_sequence() -> None:
    manager = BlockSpaceManager(4, 4, 0, watermark=0)
    group = running(manager, 6, seq_ids=(1, 2, 3))
    for seq in group.seqs():
        seq.append_tokens([seq.seq_id])
    # Three owners of one shared block: three copies at worst, two blocks free.
    assert not manager.can_append_slots(group)
    manager.free(group.seqs()[2])
    assert manager.can_append_slots(group)
    manager.append_slots(group.seqs()[0])
    assert manager.can_append_slots(group)


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


def test_a_sequence_without_blocks_cannot_grow_or_be_read() -> None:
    manager = BlockSpaceManager(4, 10, 0)
    group = SequenceGroup("r", [Sequence(1, [1])])
    (seq,) = group.seqs()
    with pytest.raises(UnknownRequestError):
        manager.append_slots(seq)
    with pytest.raises(UnknownRequestError):
        manager.can_append_slots(group)
    with pytest.raises(UnknownRequestError):
        manager.get_block_table(seq)
    with pytest.raises(UnknownRequestError):
        manager.access_all_blocks_in_seq(seq, 1.0)


def test_a_shorter_sequence_under_the_same_id_is_refused() -> None:
    manager = BlockSpaceManager(4, 10, 0)
    running(manager, 6)
    with pytest.raises(SequenceError, match="shrink"):
        manager.append_slots(Sequence(1, range(5)))


@pytest.mark.parametrize(
    "copies, batches",
    [
        ([], []),
        ([(1, 2), (3, 4), (1, 5)], [[(1, 2), (3, 4), (1, 5)]]),
        ([(1, 2), (3, 1)], [[(1, 2)], [(3, 1)]]),
        ([(1, 2), (2, 3)], [[(1, 2)], [(2, 3)]]),
        ([(1, 2), (3, 2)], [[(1, 2)], [(3, 2)]]),
        ([(1, 2), (3, 1), (4, 2)], [[(1, 2)], [(3, 1), (4, 2)]]),
    ],
)
def test_copies_that_touch_each_others_blocks_run_one_after_the_other(
    copies: list[tuple[int, int]], batches: list[list[tuple[int, int]]]
) -> None:
    assert split_dependent_copies(copies) == batches
