"""Sliding windows and states: a sequence holds what its next token sees and what its step writes."""

from __future__ import annotations

import pytest

from kvconnector.cache.block_manager import (
    AllocStatus,
    BlockSpaceManager,
    Sequence,
    SequenceGroup,
    SequenceStatus,
)

# A window of 10 and steps of 8 tokens reach over ceil((9 + 8) / 4) + 1 blocks of 4.
MOST_BLOCKS = 6


def window_manager(num_gpu_blocks: int = MOST_BLOCKS) -> BlockSpaceManager:
    return BlockSpaceManager(
        4,
        num_gpu_blocks,
        12,
        watermark=0,
        sliding_window=10,
        max_step_tokens=8,
        enable_caching=True,
    )


def run(manager: BlockSpaceManager, num_tokens: int, seq_id: int = 1) -> list[int]:
    """A prompt in chunks; returns how many blocks it held in each step."""
    group = SequenceGroup(f"r{seq_id}", [Sequence(seq_id, range(num_tokens))])
    (seq,) = group.seqs()
    assert manager.can_allocate(group) is AllocStatus.OK
    free = manager.get_num_free_gpu_blocks()
    manager.allocate(group)
    seq.status = SequenceStatus.RUNNING
    held = []
    while True:
        held.append(free - manager.get_num_free_gpu_blocks())
        computed = manager.get_num_computed_tokens(seq)
        manager.mark_blocks_as_computed(group, min(8, num_tokens - computed))
        if manager.get_num_computed_tokens(seq) == num_tokens:
            manager.free(seq)
            return held
        manager.drop_left_behind(seq)
        manager.append_slots(seq)


def test_a_prompt_of_any_length_is_prefilled_in_chunks_in_a_few_blocks() -> None:
    manager = window_manager()
    held = run(manager, 400)
    assert len(held) == 50
    assert max(held) <= MOST_BLOCKS
    assert manager.fits_alone(400)
    assert not window_manager(MOST_BLOCKS - 1).fits_alone(400)


def test_a_prefix_is_hit_where_the_window_in_front_of_it_is_cached() -> None:
    manager = window_manager(8)
    run(manager, 33)
    probe = Sequence(2, range(40))
    assert manager.find_cached_tokens(probe) == 32
    group = SequenceGroup("r", [probe])
    manager.allocate(group)
    assert (manager.get_num_cached_tokens(probe), manager.get_first_block(probe)) == (32, 5)


def test_a_window_that_was_brought_is_hit_where_it_is_whole() -> None:
    manager = window_manager(8)
    group = SequenceGroup("r", [Sequence(1, range(26))])
    manager.allocate(group, resume_at=21)
    (seq,) = group.seqs()
    assert manager.get_first_block(seq) == 3, "tokens 12 to 20 are brought"
    manager.mark_blocks_as_computed(group, 26)
    manager.free(seq)
    probe = Sequence(2, range(30))
    assert manager.find_cached_tokens(probe) == 24
    assert manager.find_cached_tokens(probe, 23) == 0, "token 11 never came"


@pytest.mark.parametrize("num_tokens", [6, 8])
def test_a_forked_state_stays_as_it_is_while_its_sequence_goes_on(num_tokens: int) -> None:
    manager = BlockSpaceManager(4, 9, 0, watermark=0, is_recurrent=True)
    group = SequenceGroup("r", [Sequence(1, range(num_tokens))])
    (seq,) = group.seqs()
    manager.allocate(group)
    manager.mark_blocks_as_computed(group, num_tokens)
    manager.drop_left_behind(seq)
    kept = seq.fork(2)
    manager.fork(seq, kept)
    state = manager.get_block_table(kept)[-1]
    seq.append_tokens([99])
    copies = manager.append_slots(seq)
    running = manager.get_block_table(seq)[num_tokens // 4]
    assert running != state
    assert copies == ([(state, running)] if num_tokens % 4 else [])
    assert manager.get_block_table(kept)[-1] == state
