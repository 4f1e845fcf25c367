"""The block manager for layers that keep only some tokens: windows, chunks and states."""

import pytest

from kvconnector.cache.block_manager import AllocStatus, Device, Sequence
from kvconnector.errors import ConfigError
from tests.unit.cache.block_managers import group_of, manager_of, start

# A window of 10 and steps of 8 tokens span ceil((9 + 8) / 4) + 1 blocks of 4.
MOST_BLOCKS = 6


@pytest.mark.parametrize("window", range(1, 13))
def test_a_window_prefills_in_few_blocks_without_a_step_limit(window):
    limit = window // 4 + 2
    manager = manager_of(limit, sliding_window=window)
    group = group_of(range(40), 1)
    assert manager.can_allocate(group) is AllocStatus.OK
    assert manager.fits_alone(40)
    assert not manager_of(limit - 1, sliding_window=window).fits_alone(40)
    manager.allocate(group)
    (seq,) = group.seqs()
    while (num_computed := manager.get_num_computed_tokens(seq)) < 40:
        slots = 4 * len(manager.get_block_table(seq)) - num_computed
        step = min(slots, 40 - num_computed, 4 - window % 4 + 1)
        manager.mark_blocks_as_computed(group, step)
        manager.drop_left_behind(seq)
        assert manager.can_append_slots(group)
        manager.append_slots(seq)


def window_manager(num_gpu_blocks):
    return manager_of(num_gpu_blocks, sliding_window=10, max_step_tokens=8, enable_caching=True)


def test_a_window_prefills_a_long_prompt_in_few_blocks():
    manager = window_manager(MOST_BLOCKS)
    group = start(manager, 1, range(400))
    (seq,) = group.seqs()
    for _ in range(50):  # the pool has no more blocks
        manager.mark_blocks_as_computed(group, 8)
        manager.drop_left_behind(seq)
        manager.append_slots(seq)
    assert manager.get_num_computed_tokens(seq) == 400
    assert manager.fits_alone(400)
    assert not window_manager(MOST_BLOCKS - 1).fits_alone(400)


def test_a_window_begins_with_the_blocks_of_a_short_step():
    manager, group = window_manager(1), group_of(range(400), 1)
    assert manager.can_allocate(group) is AllocStatus.NEVER
    assert manager.can_allocate(group, num_tokens=4) is AllocStatus.OK
    manager.allocate(group, num_tokens=4)
    assert len(manager.get_block_table(group.seqs()[0])) == 1


def test_the_hit_rate_of_a_window_counts_the_blocks_that_it_needs():
    manager = window_manager(20)
    group = start(manager, 1, range(40))  # looks for 9 full blocks
    (seq,) = group.seqs()
    for _ in range(5):
        manager.mark_blocks_as_computed(group, 8)
        manager.drop_left_behind(seq)
        manager.append_slots(seq)
    manager.free(seq)
    (again,) = start(manager, 2, range(44)).seqs()
    assert manager.get_first_block(again) == 7
    assert manager.get_prefix_cache_hit_rate(Device.GPU) == 3 / (9 + 3)


def test_a_window_of_one_token_needs_no_earlier_block():
    manager = manager_of(8, sliding_window=1, max_step_tokens=8, enable_caching=True)
    group = group_of(range(26), 1)
    manager.allocate(group, resume_at=13)
    (seq,) = group.seqs()
    assert manager.get_first_block(seq) == 3
    assert manager.get_num_cached_tokens(seq) == 12
    manager.mark_blocks_as_computed(group, 8)
    probe = Sequence(2, range(30))
    assert manager.find_cached_tokens(probe) == 20
    assert manager.find_cached_tokens(probe, 19) == 0, "token 12 was neither loaded nor computed"


def test_a_recurrent_request_reserves_a_copy_target():
    for num_blocks, fits in ((5, True), (4, False)):
        manager = manager_of(num_blocks, is_recurrent=True, max_step_tokens=8)
        assert manager.fits_alone(100) is fits


# Chunks of 10 start at even offsets of blocks of 4: at most 2 + 9 + 8 tokens, which are 5 blocks.
MOST_CHUNK_BLOCKS = 5


def chunk_manager(num_gpu_blocks):
    return manager_of(
        num_gpu_blocks, attention_chunk_size=10, max_step_tokens=8, enable_caching=True
    )


def test_a_sequence_holds_the_blocks_of_its_chunk_and_step():
    manager = chunk_manager(MOST_CHUNK_BLOCKS)
    group = start(manager, 1, range(400))
    (seq,) = group.seqs()
    most = computed = 0
    for count in (7, *[8] * 49):
        first = manager.get_first_block(seq)
        assert first == computed // 10 * 10 // 4
        most = max(most, len(manager.get_block_table(seq)) - first)
        manager.mark_blocks_as_computed(group, count)
        computed += count
        manager.drop_left_behind(seq)
        manager.append_slots(seq)
    assert most == MOST_CHUNK_BLOCKS
    assert manager.fits_alone(400)
    assert not chunk_manager(MOST_CHUNK_BLOCKS - 1).fits_alone(400)


def test_loaded_chunks_are_hit_where_they_are_whole():
    manager = chunk_manager(8)
    group = group_of(range(26), 1)
    manager.allocate(group, resume_at=18)
    (seq,) = group.seqs()
    assert manager.get_first_block(seq) == 2, "tokens 10 to 17 are loaded"
    manager.mark_blocks_as_computed(group, 18)
    manager.free(seq)
    probe = Sequence(2, range(30))
    assert manager.find_cached_tokens(probe) == 0, "the block before token 16 lacks tokens 8 and 9"
    group = start(manager, 3, range(24))
    for _ in range(3):
        manager.mark_blocks_as_computed(group, 8)
        manager.append_slots(group.seqs()[0])
    manager.free(group.seqs()[0])
    assert manager.find_cached_tokens(probe) == 24


def test_windows_and_chunks_exclude_each_other():
    with pytest.raises(ConfigError, match="only one of"):
        manager_of(8, sliding_window=10, attention_chunk_size=10)
