"""Blocks of requests over several cache groups: hits, windows, states, offers, pools that are too small."""

from minillm.messages import block_number
from tests.unit.minillm.engine_fakes import BLOCK_SIZE, make_blocks


def start(blocks, name, tokens, salt=""):
    """Add a request. Returns the number of tokens that it hits."""
    blocks.add(name, tokens, salt=salt)
    hit = blocks.find_hit(name)
    blocks.allocate(name, hit)
    return hit


def run_once(blocks, name, tokens, salt):
    """Run a request that computes its tokens and ends. Returns the number of tokens that it hits."""
    hit = start(blocks, name, tokens, salt)
    assert blocks.grow(name, hit, len(tokens)) == []
    blocks.mark_computed(name, len(tokens))
    blocks.touch(name, 1.0)
    blocks.remove(name)
    return hit


def test_only_requests_with_the_same_salt_find_a_prompt_again():
    blocks = make_blocks(32)
    for salt, hit in (("a", 0), ("a", 8), ("b", 0), ("", 0)):
        assert run_once(blocks, "r", range(9), salt) == hit


def test_a_reset_cache_is_filled_anew():
    blocks = make_blocks(32, architecture="compressed")
    prompt = range(16 * BLOCK_SIZE + 1)  # a block of the longest rows
    assert [run_once(blocks, "r", prompt, "") for _ in range(2)] == [0, 16 * BLOCK_SIZE]
    blocks.reset_prefix_cache()
    assert [run_once(blocks, "r", prompt, "") for _ in range(2)] == [0, 16 * BLOCK_SIZE]


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


def test_the_placeholder_of_a_block_that_a_window_left_is_not_invalid():
    """The placeholder may be the id of a block that another request loads into."""
    blocks = make_blocks(16, architecture="hybrid")
    start(blocks, "other", range(9), salt="other")
    blocks.add("r", range(17))
    target = blocks.allocate("r", 16)
    first = target.first_blocks[1]
    assert first > 0
    blocks.mark_invalid(block_number(1, each, 2) for each in blocks.tables("r")[1][:first])
    assert blocks.take_valid_tokens("r", 16) == 16
    blocks.mark_invalid([block_number(1, target.block_ids[1][0], 2)])
    assert blocks.take_valid_tokens("r", 16) == first * BLOCK_SIZE
    assert blocks.take_valid_tokens("r", 16) == 16
