"""Moving groups between the devices."""

from __future__ import annotations

import pytest

from kvconnector.cache.block_manager import (
    AllocStatus,
    BlockSpaceManager,
    Device,
    OutOfBlocksError,
    Sequence,
    SequenceGroup,
)
from kvconnector.errors import LocalProtocolError, UnknownRequestError
from tests.unit.cache.block_managers import running


def test_a_group_moves_out_and_back_block_by_block() -> None:
    manager = BlockSpaceManager(4, 10, 10)
    group = running(manager, 9)
    (seq,) = group.seqs()
    gpu_table = manager.get_block_table(seq)
    assert manager.can_swap_out(group)
    out = manager.swap_out(group)
    cpu_table = manager.get_block_table(seq)
    assert out == list(zip(gpu_table, cpu_table, strict=True))
    assert (manager.get_num_free_gpu_blocks(), manager.get_num_free_cpu_blocks()) == (10, 7)
    assert manager.can_swap_in(group) is AllocStatus.OK
    back = manager.swap_in(group)
    assert back == list(zip(cpu_table, manager.get_block_table(seq), strict=True))
    assert (manager.get_num_free_gpu_blocks(), manager.get_num_free_cpu_blocks()) == (7, 10)


def test_forked_sequences_move_each_shared_block_once_and_stay_shared() -> None:
    manager = BlockSpaceManager(4, 10, 4)
    group = running(manager, 9, seq_ids=(1, 2))
    first, second = group.seqs()
    first.append_tokens([9])
    manager.append_slots(first)
    assert manager.can_swap_out(group)
    out = manager.swap_out(group)
    assert len(out) == len({source for source, _ in out}) == 4
    moved = [manager.get_block_table(seq) for seq in (first, second)]
    assert moved[0][:2] == moved[1][:2]
    assert moved[0][2] != moved[1][2]
    assert manager.get_num_free_cpu_blocks() == 0
    assert len(manager.swap_in(group)) == 4
    manager.free(first)
    assert manager.get_num_free_gpu_blocks() == 7
    manager.free(second)
    assert manager.get_num_free_gpu_blocks() == 10


def test_a_cpu_pool_that_is_too_small_refuses_and_changes_nothing() -> None:
    manager = BlockSpaceManager(4, 10, 2)
    group = running(manager, 9)
    table = manager.get_block_table(group.seqs()[0])
    assert not manager.can_swap_out(group)
    with pytest.raises(OutOfBlocksError, match="cpu"):
        manager.swap_out(group)
    assert manager.get_block_table(group.seqs()[0]) == table
    assert (manager.get_num_free_gpu_blocks(), manager.get_num_free_cpu_blocks()) == (7, 2)


def test_swapping_in_waits_for_blocks_above_the_watermark() -> None:
    manager = BlockSpaceManager(4, 10, 10, watermark=0.2)
    group = running(manager, 12)
    manager.swap_out(group)
    blockers = [running(manager, num_tokens, seq_ids=(i,)) for i, num_tokens in ((2, 20), (3, 4))]
    assert manager.can_swap_in(group) is AllocStatus.LATER  # 4 free, 3 needed, 2 to remain
    manager.free(blockers[1].seqs()[0])
    assert manager.can_swap_in(group) is AllocStatus.OK
    group.seqs()[0].append_tokens([12])
    assert manager.can_swap_in(group) is AllocStatus.LATER


def test_a_group_that_needs_more_than_the_device_has_can_never_return() -> None:
    manager = BlockSpaceManager(4, 3, 10, watermark=0)
    group = running(manager, 12)
    manager.swap_out(group)
    assert manager.can_swap_in(group) is AllocStatus.OK
    group.seqs()[0].append_tokens([12])
    assert manager.can_swap_in(group) is AllocStatus.NEVER
    with pytest.raises(LocalProtocolError, match="other device"):
        manager.append_slots(group.seqs()[0])


def test_a_group_that_has_grown_into_the_watermark_can_return_to_an_empty_device() -> None:
    manager = BlockSpaceManager(4, 4, 10, watermark=0.5)
    group = running(manager, 8)
    group.seqs()[0].append_tokens(range(8))
    manager.append_slots(group.seqs()[0])
    manager.swap_out(group)
    blocker = running(manager, 4, seq_ids=(2,))
    assert manager.can_swap_in(group) is AllocStatus.LATER
    manager.free(blocker.seqs()[0])
    assert manager.can_swap_in(group) is AllocStatus.OK
    assert len(manager.swap_in(group)) == 4


def test_a_swapped_out_group_can_be_forked_and_freed_but_not_grown() -> None:
    manager = BlockSpaceManager(4, 10, 10)
    group = running(manager, 6)
    (seq,) = group.seqs()
    manager.swap_out(group)
    child = seq.fork(2)
    manager.fork(seq, child)
    assert manager.get_num_free_cpu_blocks() == 8
    with pytest.raises(LocalProtocolError, match="other device"):
        manager.append_slots(seq)
    with pytest.raises(LocalProtocolError, match="other device"):
        manager.can_append_slots(group)
    manager.free(seq)
    manager.free(child)
    assert manager.get_num_free_cpu_blocks() == 10


def test_a_group_that_is_not_there_cannot_be_moved() -> None:
    manager = BlockSpaceManager(4, 10, 10)
    stranger = SequenceGroup("stranger", [Sequence(7, [1])])
    for refused in (
        manager.can_swap_in,
        manager.can_swap_out,
        manager.swap_in,
        manager.swap_out,
    ):
        with pytest.raises(UnknownRequestError):
            refused(stranger)
    group = running(manager, 6)
    for refused in (manager.can_swap_in, manager.swap_in):
        with pytest.raises(LocalProtocolError, match="on this device"):
            refused(group)
    manager.swap_out(group)
    for refused in (manager.can_swap_out, manager.swap_out):
        with pytest.raises(LocalProtocolError, match="on this device"):
            refused(group)


def test_blocks_that_the_other_device_still_caches_are_not_copied() -> None:
    manager = BlockSpaceManager(4, 10, 10, enable_caching=True)
    group = running(manager, 9)
    (seq,) = group.seqs()
    manager.mark_blocks_as_computed(group, 9)
    table = manager.get_block_table(seq)
    assert len(manager.swap_out(group)) == 3
    assert manager.get_prefix_cache_hit_rate(Device.CPU) == 0.0
    back = manager.swap_in(group)
    assert [source for source, _ in back] == [2]  # the last block is not full
    assert manager.get_block_table(seq)[:2] == table[:2]
    assert manager.get_prefix_cache_hit_rate(Device.GPU) == 2 / 4  # 2 of allocate's 0 hits, 2 here
    assert len(manager.swap_out(group)) == 1
    assert manager.get_prefix_cache_hit_rate(Device.CPU) == 2 / 4


def test_cached_blocks_without_an_owner_use_up_free_blocks_when_swapped_in() -> None:
    manager = BlockSpaceManager(4, 4, 5, watermark=0, enable_caching=True)
    group = running(manager, 9)
    manager.mark_blocks_as_computed(group, 9)
    manager.swap_out(group)
    manager.allocate(SequenceGroup("blocker", [Sequence(3, range(200, 208))]))
    assert manager.get_num_free_gpu_blocks() == 2
    assert manager.can_swap_in(group) is AllocStatus.LATER
    with pytest.raises(OutOfBlocksError):
        manager.swap_in(group)
    assert manager.get_num_free_cpu_blocks() == 2


def test_swapped_out_blocks_are_evicted_by_their_last_access() -> None:
    manager = BlockSpaceManager(4, 4, 4, watermark=0, enable_caching=True)
    used, older = running(manager, 5), SequenceGroup("older", [Sequence(2, range(100, 105))])
    manager.allocate(older)
    for group, now in ((used, 9.0), (older, 5.0)):
        manager.mark_blocks_as_computed(group, 5)
        manager.access_all_blocks_in_seq(group.seqs()[0], now)
    manager.swap_out(used)
    manager.free(older.seqs()[0])
    blocker = SequenceGroup("blocker", [Sequence(3, range(200, 212))])
    manager.allocate(blocker)  # two blocks without content and the least recently used one
    manager.free(blocker.seqs()[0])
    assert len(manager.swap_in(used)) == 1
