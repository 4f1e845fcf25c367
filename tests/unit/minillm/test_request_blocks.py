"""Blocks of requests over several cache groups: windows, states, offers, pools that are too small."""

from __future__ import annotations

import pytest

from kvconnector.cache.block_manager import AllocStatus
from kvconnector.errors import UnknownRequestError
from tests.unit.minillm.engine_fakes import make_blocks


def test_a_scattered_pool_hands_out_scattered_blocks() -> None:
    blocks = make_blocks(64)
    blocks.add("a", range(60))
    blocks.allocate("a")
    (table,) = blocks.tables("a")
    assert len(set(table)) == 15
    assert table != sorted(table)


def test_a_prompt_s_beginning_is_found_again_in_whole_blocks() -> None:
    blocks = make_blocks(16)
    blocks.add("a", range(11))
    assert blocks.allocate("a") == 0
    blocks.mark_computed("a", 9)
    blocks.add("b", [*range(10), 99])
    assert blocks.allocate("b") == 8
    assert blocks.tables("b")[0][:2] == blocks.tables("a")[0][:2]
    blocks.remove("a")
    blocks.remove("b")
    assert blocks.get_num_free_gpu_blocks() == 16
    blocks.add("c", range(8))
    assert blocks.allocate("c") == 4, "the last token is always computed"


@pytest.mark.parametrize("architecture", ["hybrid", "mamba"])
def test_layers_that_forget_switch_prefix_caching_off(architecture: str) -> None:
    blocks = make_blocks(16, architecture=architecture)
    for name in ("a", "b"):
        blocks.add(name, range(11))
        assert blocks.allocate(name) == 0
        blocks.mark_computed(name, 11)


def test_a_window_s_table_goes_around_a_ring_and_offers_its_end() -> None:
    blocks = make_blocks(16, architecture="hybrid")
    blocks.add("a", range(30))
    blocks.allocate("a")
    full, window = blocks.tables("a")
    assert len(full) == len(set(full)) == 8
    assert len(window) == 8
    assert window == (window[:3] * 3)[:8]
    offer = blocks.offer("a", 30)
    assert offer is not None
    assert offer.block_ids == [full, window[5:]]
    assert offer.first_blocks == [0, 5]


def test_a_window_that_moved_on_is_not_offered() -> None:
    blocks = make_blocks(16, architecture="hybrid")
    blocks.add("a", range(10))
    blocks.allocate("a")
    for token in range(7):
        assert blocks.offer("a", 10) is not None
        blocks.append_token("a", token)
        assert blocks.grow("a", 10 + token) == []
    assert blocks.offer("a", 10) is None


def test_a_state_is_copied_before_the_next_token_replaces_it() -> None:
    blocks = make_blocks(16, architecture="mamba")
    blocks.add("a", range(10), keep_state_at=9)
    blocks.allocate("a")
    assert blocks.grow("a", 0) == []
    (kept,) = blocks.tables("a")[1]
    (move,) = blocks.grow("a", 9) or []
    (running,) = blocks.tables("a")[1]
    assert (move.group, move.kind, move.pairs) == (1, "copy", [(kept, running)])
    assert kept != running
    assert blocks.grow("a", 9) == []
    offer = blocks.offer("a", 10)
    assert offer is not None
    assert (offer.block_ids[1], offer.first_blocks) == ([kept], [0, 8])
    blocks.remove("a")
    assert blocks.get_num_free_gpu_blocks() == 32


def test_swapping_takes_all_groups_or_none() -> None:
    blocks = make_blocks(16, host=8, architecture="hybrid")
    for name, length in (("a", 20), ("b", 9)):
        blocks.add(name, [ord(name)] * length)
        blocks.allocate(name)
    assert blocks.can_swap_out("a")
    moves = blocks.swap_out("a")
    assert [(move.group, move.kind, len(move.pairs)) for move in moves] == [
        (0, "out", 5),
        (1, "out", 3),
    ]
    assert blocks.swapped_blocks == 8
    assert blocks.can_swap_out("b")
    blocks.swap_out("b")
    assert blocks.get_num_free_gpu_blocks() == 32
    blocks.add("c", range(4))
    blocks.allocate("c")
    assert not blocks.can_swap_out("c")
    assert blocks.can_swap_in("a")
    assert [len(move.pairs) for move in blocks.swap_in("a")] == [5, 3]
    for name in "abc":
        blocks.remove(name)
    assert (blocks.get_num_free_gpu_blocks(), blocks.get_num_free_cpu_blocks()) == (32, 16)


def test_what_never_fits_is_told_from_what_does_not_fit_now() -> None:
    blocks = make_blocks(4)
    assert blocks.can_ever_hold(16)
    assert not blocks.can_ever_hold(17)
    for name, length in (("a", 12), ("b", 8), ("c", 20)):
        blocks.add(name, [ord(name)] * length)
    blocks.allocate("a")
    assert blocks.can_allocate("b") is AllocStatus.LATER
    assert blocks.can_allocate("c") is AllocStatus.NEVER


def test_unknown_requests_are_named_and_forgotten_ones_ignored() -> None:
    blocks = make_blocks(4)
    with pytest.raises(UnknownRequestError, match="nobody"):
        blocks.tables("nobody")
    blocks.remove("nobody")
