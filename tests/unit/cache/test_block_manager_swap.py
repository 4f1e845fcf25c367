"""Moving groups between the devices."""

from __future__ import annotations

import pytest

from kvconnector.cache.block_manager import (
    AllocStatus,
    BlockSpaceManager,
    Device,
    Sequence,
    SequenceGroup,
)
from kvconnector.errors import LocalProtocolError, UnknownRequestError
from tests.unit.cache.block_managers import running


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
