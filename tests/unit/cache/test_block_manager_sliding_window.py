"""Sliding windows: a ring of blocks per sequence."""

from __future__ import annotations

import pytest

from kvconnector.cache.block_manager import AllocStatus, BlockSpaceManager, Sequence, SequenceGroup
from kvconnector.errors import BlockIdError
from tests.unit.cache.block_managers import running


def window_manager(num_gpu_blocks: int = 12) -> BlockSpaceManager:
    # Ring of 10 // 4 + 2 = 4 blocks.
    return BlockSpaceManager(4, num_gpu_blocks, 12, watermark=0, sliding_window=10)


@pytest.mark.parametrize("num_tokens, num_blocks", [(5, 2), (16, 4), (17, 4), (400, 4)])
def test_a_prompt_takes_no_more_than_the_ring(num_tokens: int, num_blocks: int) -> None:
    manager = window_manager(num_gpu_blocks=4)
    group = SequenceGroup("r", [Sequence(1, range(num_tokens))])
    assert manager.can_allocate(group) is AllocStatus.OK
    manager.allocate(group)
    assert manager.get_num_free_gpu_blocks() == 4 - num_blocks
    table = manager.get_block_table(group.seqs()[0])
    assert len(table) == -(-num_tokens // 4)
    assert table == [table[index % num_blocks] for index in range(len(table))]


def test_decoding_goes_round_the_ring() -> None:
    manager = window_manager()
    (seq,) = running(manager, 15).seqs()
    ring = manager.get_block_table(seq)
    assert manager.get_first_kept_token(seq) == 0
    for token in range(15, 25):
        seq.append_tokens([token])
        assert manager.append_slots(seq) == []
    assert manager.get_block_table(seq) == [*ring, *ring[:3]]
    assert manager.get_first_kept_token(seq) == 12
    assert manager.get_num_free_gpu_blocks() == 8


def test_a_full_device_can_still_decode_in_the_ring() -> None:
    manager = window_manager(num_gpu_blocks=4)
    group = running(manager, 16)
    group.seqs()[0].append_tokens([16])
    assert manager.can_append_slots(group)
    manager.append_slots(group.seqs()[0])


def test_a_shared_block_is_replaced_without_a_copy_when_the_ring_returns_to_it() -> None:
    manager = window_manager()
    group = running(manager, 16, seq_ids=(1, 2))
    first, second = group.seqs()
    shared = manager.get_block_table(second)
    first.append_tokens([16])
    assert manager.append_slots(first) == []
    own = manager.get_block_table(first)
    assert own[1:4] == shared[1:]
    assert own[4] not in shared
    assert manager.get_block_table(second) == shared
    second.append_tokens([17])
    manager.append_slots(second)
    assert manager.get_block_table(second)[4] == shared[0]


def test_a_partly_filled_shared_block_in_the_ring_is_copied() -> None:
    manager = window_manager()
    first, second = running(manager, 18, seq_ids=(1, 2)).seqs()
    shared = manager.get_block_table(first)
    first.append_tokens([18])
    copies = manager.append_slots(first)
    assert copies == [(shared[4], manager.get_block_table(first)[4])]
    assert manager.get_block_table(second) == shared


def test_lookahead_that_would_overwrite_the_window_is_refused_at_any_fill() -> None:
    manager = window_manager()
    # Window 10 of blocks of 4: two tokens reach into a third block, leaving room for 4 new slots.
    for num_tokens in (1, 15, 16, 17, 18, 19):
        group = SequenceGroup("r", [Sequence(1, range(num_tokens))])
        with pytest.raises(BlockIdError, match="sliding window") as caught:
            manager.can_allocate(group, num_lookahead_slots=4)
        assert caught.value.context["limit"] == 4
        manager.allocate(group, num_lookahead_slots=3)
        (seq,) = group.seqs()
        seq.append_tokens([99])
        with pytest.raises(BlockIdError, match="sliding window"):
            manager.can_append_slots(group, num_lookahead_slots=4)
        manager.append_slots(seq, num_lookahead_slots=3)
        manager.free(seq)
    assert manager.get_num_free_gpu_blocks() == 12


def test_many_new_tokens_at_once_are_refused_only_where_they_overwrite() -> None:
    manager = window_manager()
    (seq,) = running(manager, 6).seqs()
    seq.append_tokens(range(10))
    manager.append_slots(seq)  # 16 tokens: the ring is just full
    seq.append_tokens(range(5))
    with pytest.raises(BlockIdError, match="sliding window"):
        manager.append_slots(seq)
    assert len(manager.get_block_table(seq)) == 4


def test_a_ring_swaps_each_block_once_and_goes_on() -> None:
    manager = window_manager()
    group = running(manager, 30)
    (seq,) = group.seqs()
    assert len(manager.swap_out(group)) == 4
    assert len(manager.swap_in(group)) == 4
    table = manager.get_block_table(seq)
    assert len(table) == 8
    assert table == table[:4] * 2
    seq.append_tokens(range(3))
    manager.append_slots(seq)
    assert manager.get_block_table(seq) == [*table, table[0]]
