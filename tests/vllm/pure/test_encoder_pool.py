"""The pool of encoders' outputs: its blocks, its room, and copies in and out."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvconnector.errors import ConfigError
from kvconnector.integrations.vllm.encoder.pool import (
    BLOCK_ROWS,
    EncoderMemory,
    Outputs,
    PoolShape,
)
from tests.support.examples import examples

ROW = 8
NUM_BLOCKS = 6
NAMES = st.sampled_from("abcdefgh")
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "ready", "use", "leave", "drop", "get"]), NAMES, st.integers(1, 7)
    ),
    max_size=60,
)


@examples(200)
@given(steps=STEPS)
def test_what_is_used_stays_and_the_longest_idle_makes_room(steps):
    """Against a list of names in the order of their last use."""
    outputs, order = Outputs(NUM_BLOCKS), []
    for number, (what, name, count) in enumerate(steps):
        found = outputs.get(name) if what in ("use", "get") else outputs._held.get(name)
        assert (found is not None) == (name in order)
        if found is not None and what in ("use", "get"):
            order.append(order.pop(order.index(name)))
        if what == "add" and found is None:
            held = [outputs._held[each] for each in order]
            idle = [
                each for each, of in zip(order, held, strict=True) if of.is_ready and not of.uses
            ]
            left = NUM_BLOCKS - sum(len(each.blocks) for each in held)
            gone = []
            while left < count and idle:
                gone.append(idle.pop(0))
                left += len(outputs._held[gone[-1]].blocks)
            added = outputs.add(name, count, (count, 1))
            assert (added is not None) == (left >= count)
            if added is not None:
                order = [each for each in order if each not in gone] + [name]
        elif found is not None and what == "ready":
            found.is_ready = True
        elif found is not None and what == "use":
            found.uses.add(number)
        elif found is not None and what == "leave":
            found.uses.clear()
        elif found is not None and what == "drop" and not found.uses:
            outputs.drop(name)
            order.remove(name)
        assert list(outputs._held) == order
        blocks = [block for each in outputs._held.values() for block in each.blocks]
        assert sorted(blocks + outputs._free) == list(range(NUM_BLOCKS))


@pytest.fixture
def shape():
    return PoolShape.within(NUM_BLOCKS * BLOCK_ROWS * ROW * 2 + 5, ROW, 2, num_ranks=3)


@pytest.mark.parametrize("embeddings, width", [(1, 1), (3, ROW), (5, 3 * ROW // 2), (40, 2 * ROW)])
def test_an_output_comes_out_as_it_went_in(shape, embeddings, width):
    assert shape.num_blocks == NUM_BLOCKS
    ours = EncoderMemory.make(shape, torch.bfloat16)
    theirs = EncoderMemory.open(ours.path, shape, torch.bfloat16)
    ours.rows.fill_(7.0)
    output = torch.randn(embeddings, width, dtype=torch.bfloat16)
    count = shape.blocks_for((embeddings, width))
    blocks = [4, 1, 5, 0, 2][:count]
    theirs.save(blocks, output)
    assert torch.equal(ours.load(blocks, (embeddings, width), "cpu"), output)
    others = [block for block in range(NUM_BLOCKS) if block not in blocks]
    assert (ours.rows[others] == 7.0).all()
    for each in (ours, theirs):
        each.close()
        each.close()


def test_reports_reach_the_other_process_s_mapping(shape):
    ours = EncoderMemory.make(shape, torch.bfloat16)
    theirs = EncoderMemory.open(ours.path, shape, torch.bfloat16)
    for rank in range(3):
        assert ours.executed == 0
        theirs.report_step(rank, 5 + rank)
    assert ours.executed == 5
    theirs.report_saved(NUM_BLOCKS - 1, 9)
    assert [ours.saved(block) for block in range(NUM_BLOCKS)] == [0] * (NUM_BLOCKS - 1) + [9]
    assert (ours.rows == 0).all()
    for each in (ours, theirs):
        each.close()


def test_memory_that_a_worker_cannot_see_is_named(shape):
    with pytest.raises(ConfigError, match="one host"):
        EncoderMemory.open("/proc/self/fd/99999", shape, torch.bfloat16)
