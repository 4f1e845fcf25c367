"""Blocks of requests over several cache groups: hits, windows, states, offers, pools that are too small."""

import pytest

from tests.unit.minillm.engine_fakes import make_blocks


def start(blocks, name, tokens, salt=""):
    """Take a request in; returns its hit."""
    blocks.add(name, tokens, salt=salt)
    hit = blocks.find_hit(name)
    blocks.allocate(name, hit)
    return hit


def run_once(blocks, name, tokens, chunk=100, *, salt=""):
    """A request that computes its tokens in steps of `chunk` and is over; returns its hit."""
    hit = start(blocks, name, tokens, salt)
    for computed in range(hit, len(tokens), chunk):
        stop = min(len(tokens), computed + chunk)
        assert blocks.grow(name, computed, stop) == []
        blocks.mark_computed(name, stop)
    blocks.touch(name, 1.0)
    blocks.remove(name)
    return hit


@pytest.mark.parametrize("architecture", ["llama", "hybrid", "mamba"])
@pytest.mark.parametrize("chunk", [100, 5, 1])
def test_every_kind_of_layer_finds_a_beginning_again(architecture, chunk):
    blocks = make_blocks(32, architecture=architecture)
    assert run_once(blocks, "a", range(30), chunk) == 0
    for shared, hit in ((30, 28), (29, 28), (17, 16), (3, 0)):
        tokens = [*range(shared), *range(90, 95)]
        assert run_once(blocks, f"shares {shared}", tokens) == hit
    assert blocks.get_num_free_gpu_blocks() == 32 * len(blocks.groups)


def test_only_requests_with_the_same_salt_find_a_prompt_again():
    blocks = make_blocks(32)
    for salt, hit in (("a", 0), ("a", 8), ("b", 0), ("", 0)):
        assert run_once(blocks, "r", range(9), salt=salt) == hit


def test_a_window_that_moved_on_is_not_offered():
    blocks = make_blocks(16, architecture="hybrid")
    start(blocks, "a", range(10))
    blocks.mark_computed("a", 10)
    for computed in (10, 11, 12, 13):
        assert blocks.offer("a", 10) is not None
        blocks.append_token("a", computed)
        assert blocks.grow("a", computed, computed + 1) == []
        blocks.mark_computed("a", computed + 1)
    assert blocks.offer("a", 10) is None
