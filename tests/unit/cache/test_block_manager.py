"""The block manager's refusals, hits and evictions. Minillm's scheduler tests cover normal use."""

import pytest

from kvconnector.cache.block_manager import (
    AllocStatus,
    BlockSpaceManager,
    Device,
    DoubleAllocationError,
    OutOfBlocksError,
    Sequence,
    SequenceError,
    SequenceGroup,
    SequenceStatus,
)
from kvconnector.errors import BlockIdError, ConfigError, LocalProtocolError, UnknownRequestError
from tests.unit.cache.block_managers import computed, group_of, manager_of, num_cached_tokens, start


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
def test_settings_out_of_range_are_refused(field, value):
    settings = {"block_size": 4, "num_gpu_blocks": 8, "num_cpu_blocks": 8}
    with pytest.raises(ConfigError, match=field) as caught:
        BlockSpaceManager(**(settings | {field: value}))
    assert field in caught.value.context


def _with(seq, *tokens):
    seq.append_tokens(tokens)
    return seq


def _prompts(*others):
    return SequenceGroup("r", [Sequence(2, [1, 2, 3]), *others])


# Calls with a manager of 3 blocks, a running request of 7 tokens in 2 of them, and its one sequence.
REFUSED = [
    (lambda m, group, seq: m.allocate(group), SequenceError, "is waiting"),
    (lambda m, group, seq: m.can_allocate(group), SequenceError, "is waiting"),
    (lambda m, group, seq: m.allocate(group_of([1], 1)), DoubleAllocationError, "seq_id=1"),
    (
        lambda m, group, seq: m.allocate(group_of(range(9), 2, 3)),
        OutOfBlocksError,
        "device='gpu', needed=3, free=1, total=3",
    ),
    (lambda m, group, seq: m.append_slots(_with(seq, *range(6))), OutOfBlocksError, "needed=2"),
    (lambda m, group, seq: m.append_slots(seq, num_lookahead_slots=-1), BlockIdError, "negative"),
    (
        lambda m, group, seq: m.can_append_slots(group, num_lookahead_slots=-1),
        BlockIdError,
        "negative",
    ),
    (lambda m, group, seq: m.allocate(group_of([1], 2), -1), BlockIdError, "negative"),
    (lambda m, group, seq: m.can_allocate(group_of([1], 2), -1), BlockIdError, "negative"),
    (
        lambda m, group, seq: m.allocate(group_of([1], 2, num_encoder_tokens=1), 1),
        OutOfBlocksError,
        "needed=2, free=1",
    ),
    (lambda m, group, seq: m.get_cross_block_table(group), UnknownRequestError, "cross-attention"),
    (lambda m, group, seq: m.append_slots(Sequence(1, range(5))), SequenceError, "shrink"),
    (lambda m, group, seq: m.fork(seq.fork(2), seq.fork(3)), UnknownRequestError, "seq_id=2"),
    (lambda m, group, seq: m.fork(seq, seq.fork(1)), DoubleAllocationError, "seq_id=1"),
    (lambda m, group, seq: m.fork(seq, Sequence(2, range(5))), SequenceError, "start with"),
    (
        lambda m, group, seq: m.fork(seq, Sequence(2, range(7), extra_keys=["adapter"])),
        SequenceError,
        "extra keys",
    ),
    (lambda m, group, seq: m.mark_blocks_as_computed(group, 8), SequenceError, "mark more"),
    (lambda m, group, seq: m.mark_blocks_as_computed(group, -1), SequenceError, "mark more"),
    (lambda m, group, seq: m.swap_out(group_of([1], 7)), UnknownRequestError, "no blocks"),
    (
        lambda m, group, seq: m.mark_blocks_as_computed(group_of([1], 7), 1),
        UnknownRequestError,
        "no unfinished sequence",
    ),
    (lambda m, group, seq: m.can_swap_in(group), LocalProtocolError, "on this device"),
    (lambda m, group, seq: m.swap_in(group), LocalProtocolError, "on this device"),
    (lambda m, group, seq: m.allocate(_prompts(Sequence(3, [1, 2]))), SequenceError, "same tokens"),
    (
        lambda m, group, seq: m.allocate(_prompts(Sequence(3, [1, 2, 3], extra_keys=("a",)))),
        SequenceError,
        "same tokens",
    ),
    (lambda m, group, seq: seq.append_tokens([2**63]), SequenceError, "64-bit"),
    (lambda m, group, seq: Sequence(2, [1.5]), SequenceError, "64-bit"),  # type: ignore[list-item]
    (lambda m, group, seq: Sequence(2, []), SequenceError, "at least one token"),
    (lambda m, group, seq: Sequence(2, [1], extra_keys=[1.5]), SequenceError, "extra key"),  # type: ignore[list-item]
    (lambda m, group, seq: SequenceGroup("r", []), SequenceError, "at least one sequence"),
    (lambda m, group, seq: group.add(Sequence(1, [5])), SequenceError, "seq_id=1"),
    (lambda m, group, seq: seq.block_hashes(4, 2), SequenceError, "full blocks"),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_refused_calls_change_no_blocks(number):
    call, error, text = REFUSED[number]
    manager = manager_of(3)
    group = start(manager, 1, range(7))
    (seq,) = group.seqs()
    table = manager.get_block_table(seq)
    with pytest.raises(error, match=text):
        call(manager, group, seq)
    assert manager.get_block_table(seq) == table
    assert manager.get_num_free_gpu_blocks() == 1
    assert manager.get_num_free_cpu_blocks() == 10


def test_a_swapped_out_group_cannot_grow_or_swap_out():
    manager = manager_of()
    group = start(manager, 1, range(6))
    manager.swap_out(group)
    for refused in (manager.can_append_slots, manager.can_swap_out, manager.swap_out):
        with pytest.raises(LocalProtocolError, match="device"):
            refused(group)
    for refused in (manager.append_slots, lambda seq: manager.get_common_computed_block_ids([seq])):
        with pytest.raises(LocalProtocolError, match="other device"):
            refused(group.seqs()[0])


@pytest.mark.parametrize(
    "settings, feature",
    [({"enable_caching": True}, "prefix caching"), ({"sliding_window": 8}, "a sliding window")],
)
def test_encoders_exclude_prefix_caching_and_windows(settings, feature):
    manager = manager_of(**settings)
    group = group_of(range(3), 1, num_encoder_tokens=2)
    for call in (manager.can_allocate, manager.allocate):
        with pytest.raises(ConfigError, match=f"not supported with {feature}.*request-1"):
            call(group)
    assert manager.can_allocate(group_of(range(3), 1)) is AllocStatus.OK
    assert manager.get_num_free_gpu_blocks() == 10


def test_cross_attention_blocks_are_not_shared():
    manager = manager_of(num_gpu_blocks=6, watermark=0.2)  # one block stays free
    assert manager.can_allocate(group_of(range(8), 1, num_encoder_tokens=13)) is AllocStatus.NEVER
    assert manager.fits_alone(8, 12)
    assert not manager.fits_alone(8, 13)
    group = group_of(range(8), 1, 2, num_encoder_tokens=12)
    assert manager.can_allocate(group) is AllocStatus.OK
    manager.allocate(group)
    first, second = group.seqs()
    cross = manager.get_cross_block_table(group)
    assert len(cross) == 3
    assert not set(cross) & set(manager.get_block_table(first))
    assert manager.get_block_table(second) == manager.get_block_table(first)
    assert manager.can_allocate(group_of([1], 3)) is AllocStatus.LATER
    for seq in group.seqs():
        manager.free(seq)
    assert manager.get_num_free_gpu_blocks() == 3
    with pytest.raises(DoubleAllocationError, match="request-1"):
        manager.allocate(group)
    for _ in range(2):
        manager.free_cross(group)
        assert manager.get_num_free_gpu_blocks() == 6


def test_the_last_prompt_tokens_block_is_never_a_hit():
    manager = manager_of(enable_caching=True)
    (first,) = computed(manager, 1, range(8)).seqs()
    (second,) = start(manager, 2, range(8)).seqs()
    assert manager.get_num_cached_tokens(second) == 4
    assert manager.get_block_table(second)[1] != manager.get_block_table(first)[1]
    assert num_cached_tokens(manager, 3, range(9)) == 8
    for limit in (None, 7, 8, 100):
        assert manager.find_cached_tokens(Sequence(4, range(8)), limit) == 4


def test_eviction_is_least_recently_used_and_from_the_chains_end():
    manager = manager_of(num_gpu_blocks=8, enable_caching=True)
    prompts = {seq_id: [seq_id * 100 + i for i in range(9)] for seq_id in (1, 2)}
    groups = {seq_id: computed(manager, seq_id, tokens) for seq_id, tokens in prompts.items()}
    for seq_id, now in ((1, 9.0), (2, 2.0)):  # their order of release differs
        manager.access_all_blocks_in_seq(groups[seq_id].seqs()[0], now)
        manager.free(groups[seq_id].seqs()[0])
    (other,) = start(manager, 10, range(900, 919)).seqs()
    manager.free(other)  # it took the 4 empty blocks and one more
    found = {i: num_cached_tokens(manager, i, tokens) for i, tokens in prompts.items()}
    assert found == {1: 8, 2: 4}


def test_swapping_in_keeps_the_groups_cached_gpu_blocks():
    manager = manager_of(num_gpu_blocks=4, enable_caching=True)
    group = computed(manager, 1, range(5))
    (seq,) = group.seqs()
    manager.access_all_blocks_in_seq(seq, 1.0)
    cached, _ = manager.get_block_table(seq)
    manager.swap_out(group)
    (other,) = computed(manager, 2, range(100, 112)).seqs()
    manager.access_all_blocks_in_seq(other, 2.0)
    manager.free(other)
    ((source, target),) = manager.swap_in(group)
    assert source == 1
    assert manager.get_block_table(seq) == [cached, target]
    assert target != cached


def test_free_blocks_are_reused_in_the_order_of_their_release():
    manager = manager_of(num_gpu_blocks=4)
    tables = []
    for seq_id in range(4):
        (seq,) = start(manager, seq_id, range(8)).seqs()
        tables.append(manager.get_block_table(seq))
        manager.free(seq)
    assert tables == [[0, 1], [2, 3], [0, 1], [2, 3]]


def test_a_shared_blocks_latest_use_counts():
    manager = manager_of(num_gpu_blocks=3, enable_caching=True)
    group = computed(manager, 1, range(4))
    (first,) = group.seqs()
    second = first.fork(2)
    manager.fork(first, second)
    (other,) = computed(manager, 3, range(100, 104)).seqs()
    for seq, now in ((first, 9.0), (second, 2.0), (other, 5.0)):
        manager.access_all_blocks_in_seq(seq, now)
        manager.free(seq)
    start(manager, 4, range(200, 208))
    found = {at: manager.find_cached_tokens(Sequence(9, range(at, at + 5))) for at in (0, 100)}
    assert found == {0: 4, 100: 0}


def test_the_hit_rate_counts_looked_up_blocks():
    manager = manager_of(enable_caching=True)
    computed(manager, 1, range(9))  # 2 looked up, none found
    assert manager.get_prefix_cache_hit_rate(Device.GPU) == 0.0
    manager.can_allocate(group_of(range(9), 9))
    start(manager, 2, range(9))  # 2 of 2
    start(manager, 3, range(16))  # 2 of 3: the block with the last token is not looked up
    assert manager.get_prefix_cache_hit_rate(Device.GPU) == 4 / 7
    assert manager.get_prefix_cache_hit_rate(Device.CPU) == 0.0


def test_prompts_above_the_watermark_are_never_allocated():
    manager = manager_of(watermark=0.2)  # 2 of 10 blocks
    assert manager.fits_alone(32)
    assert not manager.fits_alone(33)
    assert manager.can_allocate(group_of(range(32), 1)) is AllocStatus.OK
    assert manager.can_allocate(group_of(range(33), 1)) is AllocStatus.NEVER
    start(manager, 2, range(1))
    assert manager.can_allocate(group_of(range(32), 1)) is AllocStatus.LATER


def test_swapping_in_waits_for_blocks_above_the_watermark():
    manager = manager_of(watermark=0.2)
    group = start(manager, 1, range(12))
    manager.swap_out(group)
    start(manager, 2, range(20))
    blocker = start(manager, 3, range(4))
    assert manager.can_swap_in(group) is AllocStatus.LATER  # 4 free, 3 needed, 2 must stay free
    manager.free(blocker.seqs()[0])
    assert manager.can_swap_in(group) is AllocStatus.OK
    group.seqs()[0].append_tokens([12])
    assert manager.can_swap_in(group) is AllocStatus.LATER


def test_accepted_drafts_are_copied_after_a_fork():
    manager = manager_of(enable_caching=True)
    group = computed(manager, 1, range(4))
    (parent,) = group.seqs()
    manager.append_slots(parent, num_lookahead_slots=4)
    parent.append_tokens(range(4, 8))  # four drafts, which the step has written
    child = parent.fork(2)
    manager.fork(parent, child)
    group.add(child)
    drafts = manager.get_block_table(parent)[1]
    copies = manager.append_slots(parent)
    assert copies == [(drafts, manager.get_block_table(parent)[1])]
    assert manager.append_slots(child) == []
    assert manager.get_block_table(child)[1] == drafts


def test_a_reset_cache_finds_nothing_of_before():
    manager = manager_of(enable_caching=True)
    group = computed(manager, 1, range(8))
    (seq,) = group.seqs()
    gone = computed(manager, 2, range(20, 28))
    manager.free(gone.seqs()[0])
    swapped = computed(manager, 3, range(40, 48))
    manager.swap_out(swapped)
    free = manager.get_num_free_gpu_blocks(), manager.get_num_free_cpu_blocks()
    manager.reset_prefix_cache()
    assert (manager.get_num_free_gpu_blocks(), manager.get_num_free_cpu_blocks()) == free
    for tokens in (range(9), range(20, 29), range(40, 49)):
        assert num_cached_tokens(manager, 9, tokens) == 0
    # what a request computes on top of its old blocks depends on them, and must not be found either
    manager.swap_in(swapped)
    swapped.seqs()[0].status = SequenceStatus.RUNNING
    seq.append_tokens(range(8, 12))
    manager.append_slots(seq)
    child = seq.fork(4)
    manager.fork(seq, child)
    group.add(child)
    manager.mark_blocks_as_computed(group, 4)
    computed(manager, 5, range(8))
    assert num_cached_tokens(manager, 9, range(13)) == 8, "only what was computed anew"
    assert num_cached_tokens(manager, 9, range(40, 49)) == 0
