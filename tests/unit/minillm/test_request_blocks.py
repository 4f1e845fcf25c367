"""Blocks of requests over several cache groups: hits, windows, states, offers, pools that are too small."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvconnector.errors import UnknownRequestError
from minillm.config import Architecture
from minillm.request_blocks import LoadTarget, RequestBlocks
from tests.unit.minillm.engine_fakes import make_blocks


def start(blocks: RequestBlocks, name: str, tokens: Sequence[int], salt: str = "") -> int:
    """Take a request in; returns its hit."""
    blocks.add(name, tokens, salt=salt)
    hit = blocks.find_hit(name)
    blocks.allocate(name, hit)
    return hit


def run_once(
    blocks: RequestBlocks, name: str, tokens: Sequence[int], chunk: int = 100, *, salt: str = ""
) -> int:
    """A request that computes its tokens in steps of `chunk` and is over; returns its hit."""
    hit = start(blocks, name, tokens, salt)
    for computed in range(hit, len(tokens), chunk):
        stop = min(len(tokens), computed + chunk)
        assert blocks.grow(name, computed, stop) == []
        blocks.mark_computed(name, stop)
    blocks.touch(name, 1.0)
    blocks.remove(name)
    return hit


def load_target(blocks: RequestBlocks, name: str, tokens: Sequence[int]) -> LoadTarget:
    """Take a request in that goes on in front of its last token, with what a connector brings."""
    blocks.add(name, tokens)
    return blocks.allocate(name, len(tokens) - 1)


@pytest.mark.parametrize("architecture", ["llama", "hybrid", "mamba"])
@pytest.mark.parametrize("chunk", [100, 5, 1])
def test_every_kind_of_layer_finds_a_beginning_again(
    architecture: Architecture, chunk: int
) -> None:
    blocks = make_blocks(32, architecture=architecture)
    assert run_once(blocks, "a", range(30), chunk) == 0
    for shared, hit in ((30, 28), (29, 28), (17, 16), (3, 0)):
        tokens = [*range(shared), *range(90, 95)]
        assert run_once(blocks, f"shares {shared}", tokens) == hit
    assert blocks.get_num_free_gpu_blocks() == 32 * len(blocks.groups)


def test_only_requests_with_the_same_salt_find_a_prompt_again() -> None:
    blocks = make_blocks(32)
    for salt, hit in (("a", 0), ("a", 8), ("b", 0), ("", 0)):
        assert run_once(blocks, "r", range(9), salt=salt) == hit


def test_a_window_holds_what_its_next_query_sees_and_its_step_writes() -> None:
    blocks = make_blocks(16, architecture="hybrid", step_tokens=8)
    start(blocks, "a", range(30))
    free = []
    for computed in range(0, 30, 8):
        stop = min(30, computed + 8)
        assert blocks.grow("a", computed, stop) == []
        blocks.mark_computed("a", stop)
        free.append(blocks.get_num_free_gpu_blocks())
    # the other layers hold 8 blocks for the whole prompt; the window 2, then 2 more beside up to 2 that it sees
    assert free == [32 - 8 - held for held in (2, 4, 4, 4)]
    offer = blocks.offer("a", 30)
    assert offer is not None
    full, window = blocks.tables("a")
    assert offer.first_blocks == [0, 4]
    assert offer.block_ids == [full, window[4:]]


def test_a_window_that_moved_on_is_not_offered() -> None:
    blocks = make_blocks(16, architecture="hybrid")
    start(blocks, "a", range(10))
    blocks.mark_computed("a", 10)
    for computed in (10, 11, 12, 13):
        assert blocks.offer("a", 10) is not None
        blocks.append_token("a", computed)
        assert blocks.grow("a", computed, computed + 1) == []
        blocks.mark_computed("a", computed + 1)
    assert blocks.offer("a", 10) is None


def test_of_a_window_only_its_end_has_blocks_to_load_into() -> None:
    blocks = make_blocks(16, architecture="hybrid")
    target = load_target(blocks, "a", range(31))
    full, window = blocks.tables("a")
    # token 30 sees tokens 25 to 29, from block 6 on
    assert target.block_ids == [full, window[6:]]
    assert (target.first_blocks, target.computed_tokens) == ([0, 6], [0, 0])
    blocks.mark_computed("a", 30)
    blocks.remove("a")
    # block 6 was loaded from token 25 on: only block 7, which is not full, could have been a hit's last
    assert start(blocks, "b", range(31)) == 0


def test_groups_are_asked_for_what_each_lacks() -> None:
    blocks = make_blocks(16, architecture="mamba")
    run_once(blocks, "a", range(22))
    # of tokens 0 to 19 all is here; of the first 22 the state was replaced by that of another position
    target = load_target(blocks, "b", [*range(22), 90, 91])
    assert target.computed_tokens == [20, 0]
    (state,) = target.block_ids[1]
    assert state == blocks.tables("b")[1][22 // 4]
    # and where the state is here, nothing of it is asked for
    target = load_target(blocks, "c", [*range(20), 90])
    assert target.computed_tokens == [20, 20]


def test_a_hit_needs_the_window_in_front_of_it_and_nothing_before_that() -> None:
    # a window of 6 in blocks of 4: in front of token 16 it sees tokens 11 to 15, of blocks 2 and 3
    blocks = make_blocks(16, architecture="hybrid")
    load_target(blocks, "a", range(17))
    blocks.mark_computed("a", 16)
    for token in range(17, 25):
        blocks.append_token("a", token)
    assert blocks.grow("a", 16, 25) == []
    blocks.mark_computed("a", 25)
    blocks.remove("a")
    # blocks 0 and 1 never came, of block 2 only token 11 did
    for length, hit in ((25, 24), (21, 20), (17, 0), (9, 0)):
        assert start(blocks, f"{length}", range(length)) == hit
        blocks.remove(f"{length}")
    target = load_target(blocks, "b", range(17))
    assert target.computed_tokens == [16, 0], "all layers but those with windows have it"


def test_unknown_requests_are_named_and_forgotten_ones_ignored() -> None:
    blocks = make_blocks(4)
    with pytest.raises(UnknownRequestError, match="nobody"):
        blocks.tables("nobody")
    blocks.remove("nobody")
