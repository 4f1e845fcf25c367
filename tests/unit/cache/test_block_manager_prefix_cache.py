"""Prefix caching: what is hit, what is computed, what is evicted first."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from kvconnector.cache.block_manager import (
    AllocStatus,
    BlockSpaceManager,
    Device,
    OutOfBlocksError,
    Sequence,
    SequenceError,
    SequenceGroup,
    SequenceStatus,
)
from kvconnector.errors import UnknownRequestError


def caching_manager(num_gpu_blocks: int = 20) -> BlockSpaceManager:
    return BlockSpaceManager(4, num_gpu_blocks, 20, watermark=0, enable_caching=True)


def start(manager: BlockSpaceManager, seq_id: int, tokens: Iterable[int]) -> SequenceGroup:
    group = SequenceGroup(f"request-{seq_id}", [Sequence(seq_id, tokens)])
    manager.allocate(group)
    group.seqs()[0].status = SequenceStatus.RUNNING
    return group


def computed(manager: BlockSpaceManager, seq_id: int, tokens: Iterable[int]) -> SequenceGroup:
    group = start(manager, seq_id, tokens)
    (seq,) = group.seqs()
    manager.mark_blocks_as_computed(group, seq.num_tokens - manager.get_num_computed_tokens(seq))
    return group


def run_once(manager: BlockSpaceManager, seq_id: int, tokens: Iterable[int], now: float) -> None:
    (seq,) = computed(manager, seq_id, tokens).seqs()
    manager.access_all_blocks_in_seq(seq, now)
    manager.free(seq)


def num_cached_tokens(manager: BlockSpaceManager, seq_id: int, tokens: Iterable[int]) -> int:
    (seq,) = start(manager, seq_id, tokens).seqs()
    cached = manager.get_num_cached_tokens(seq)
    manager.free(seq)
    return cached


def test_the_block_with_the_last_prompt_token_is_always_computed_anew() -> None:
    manager = caching_manager()
    (first,) = computed(manager, 1, range(8)).seqs()
    (second,) = start(manager, 2, range(8)).seqs()
    assert manager.get_num_cached_tokens(second) == 4
    assert manager.get_block_table(second)[1] != manager.get_block_table(first)[1]
    assert num_cached_tokens(manager, 3, range(9)) == 8


def test_the_least_recently_accessed_block_is_evicted_first() -> None:
    manager = caching_manager(num_gpu_blocks=6)
    prompts = {seq_id: [seq_id * 100 + i for i in range(5)] for seq_id in (1, 2, 3)}
    groups = {seq_id: computed(manager, seq_id, tokens) for seq_id, tokens in prompts.items()}
    # Freed in the order 1, 2, 3, last used in the order 2, 3, 1.
    for seq_id, now in ((1, 9.0), (2, 2.0), (3, 4.0)):
        manager.access_all_blocks_in_seq(groups[seq_id].seqs()[0], now)
        manager.free(groups[seq_id].seqs()[0])
    (other,) = start(manager, 10, range(900, 916)).seqs()
    manager.free(other)  # it took the 3 blocks without content and one more
    survivors = [i for i, tokens in prompts.items() if num_cached_tokens(manager, i, tokens)]
    assert survivors == [1, 3]


def test_a_chain_is_evicted_from_its_end() -> None:
    manager = caching_manager(num_gpu_blocks=5)
    run_once(manager, 1, range(17), now=1.0)
    (other,) = start(manager, 2, range(100, 108)).seqs()  # one block without content, one evicted
    manager.free(other)
    assert num_cached_tokens(manager, 3, range(17)) == 12


def test_cached_blocks_in_use_cost_nothing_and_idle_ones_one_each() -> None:
    manager = BlockSpaceManager(4, 6, 0, watermark=0, enable_caching=True)
    first = computed(manager, 1, range(16))
    probe = SequenceGroup("probe", [Sequence(2, range(20))])
    # Four of its five blocks are those of the first; two are free.
    assert manager.can_allocate(probe) is AllocStatus.OK
    manager.free(first.seqs()[0])
    start(manager, 3, range(100, 108))
    assert manager.can_allocate(probe) is AllocStatus.LATER
    with pytest.raises(OutOfBlocksError):
        manager.allocate(probe)
    assert manager.get_num_free_gpu_blocks() == 4


def test_more_tokens_than_have_slots_cannot_be_marked() -> None:
    manager = caching_manager()
    group = start(manager, 1, range(6))
    for chunk in (7, -1):
        with pytest.raises(SequenceError, match="mark more") as caught:
            manager.mark_blocks_as_computed(group, chunk)
        assert caught.value.context["token_chunk_size"] == chunk
    manager.mark_blocks_as_computed(group, 6)
    group.seqs()[0].append_tokens([6])
    with pytest.raises(SequenceError, match="mark more"):
        manager.mark_blocks_as_computed(group, 1)
    with pytest.raises(UnknownRequestError):
        manager.mark_blocks_as_computed(SequenceGroup("r", [Sequence(2, [1])]), 1)


def test_a_hit_is_cut_where_another_cache_lacks_more() -> None:
    manager = caching_manager()
    (first,) = computed(manager, 1, range(13)).seqs()
    group = SequenceGroup("second", [Sequence(2, [*range(12), 90])])
    (second,) = group.seqs()
    assert manager.find_cached_tokens(second) == 12
    assert manager.can_allocate(group, resume_at=9) is AllocStatus.OK
    manager.allocate(group, resume_at=9)
    assert manager.get_num_cached_tokens(second) == 8
    shared = manager.get_block_table(first)
    assert manager.get_block_table(second)[:2] == shared[:2]
    assert not set(manager.get_block_table(second)[2:]) & set(shared)
    assert manager.get_prefix_cache_hit_rate(Device.GPU) == 2 / 6


def test_the_hit_rate_counts_the_blocks_that_allocations_looked_up() -> None:
    manager = caching_manager()
    assert manager.get_prefix_cache_hit_rate(Device.GPU) == 0.0
    computed(manager, 1, range(9))  # 2 looked up, none found
    assert manager.get_prefix_cache_hit_rate(Device.GPU) == 0.0
    manager.can_allocate(SequenceGroup("probe", [Sequence(9, range(9))]))
    start(manager, 2, range(9))  # 2 of 2
    start(manager, 3, range(17))  # 2 of 4
    assert manager.get_prefix_cache_hit_rate(Device.GPU) == 4 / 8
    assert manager.get_prefix_cache_hit_rate(Device.CPU) == 0.0
