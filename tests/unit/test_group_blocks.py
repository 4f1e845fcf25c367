import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnector.errors import BlockIdError
from kvconnector.layout import GroupBlocks


@pytest.mark.parametrize(
    "tokens,ids,first",
    [
        (range(33, 48), [7], 2),
        (range(47, 49), [7, 3], 2),
        (range(48, 49), [3], 3),
        (range(48, 48), [], 2),
    ],
)
def test_covering_keeps_the_blocks_of_the_tokens(tokens, ids, first):
    covering = GroupBlocks.of([7, 3, 9], first_block=2).covering(tokens, 16, what="blocks")
    assert covering.block_ids.tolist() == ids
    assert covering.first_block == first


@pytest.mark.parametrize("tokens", [range(31, 40), range(40, 81), range(5), range(80, 81)])
def test_tokens_outside_the_blocks_are_refused(tokens):
    with pytest.raises(BlockIdError, match="my blocks do not hold") as refused:
        GroupBlocks.of([7, 3, 9], first_block=2).covering(tokens, 16, what="my blocks")
    assert refused.value.context["blocks_hold"] == (32, 80)


def test_group_blocks_check_their_values():
    for wrong in ([1 << 31], [1 << 70], [None]):
        with pytest.raises(BlockIdError):
            GroupBlocks.of(wrong)
    with pytest.raises(BlockIdError, match=r"from 0 to 2\^31 - 1 \[lowest=-1, highest=3\]"):
        GroupBlocks.of([3, -1])
    for values in ((b"123", 0), (b"", -1), (b"", 1 << 31)):
        with pytest.raises(BlockIdError, match="first_block"):
            GroupBlocks(wire_ids=values[0], first_block=values[1])


ids_of_peers = st.integers(-(1 << 31), (1 << 31) - 1)


@given(ids=st.lists(ids_of_peers, max_size=10) | st.lists(ids_of_peers, min_size=60, max_size=70))
def test_the_highest_id_is_found_in_the_bytes(ids):
    """A negative one, which only a peer can send, exceeds any pool. Many are compared in another way than few."""
    wire_ids = np.array(ids, "<i4").tobytes()
    found = GroupBlocks(first_block=0, wire_ids=wire_ids).highest_id()
    assert found == max((each % (1 << 32) for each in ids), default=-1)


def test_a_block_holds_one_part_of_a_prompt():
    blocks = GroupBlocks.of([7, 3, 7])
    assert blocks.covering(range(32), 16, what="blocks").block_ids.tolist() == [7, 3]
    with pytest.raises(BlockIdError, match="blocks name a block twice") as refused:
        blocks.covering(range(33), 16, what="blocks")
    assert refused.value.context == {"blocks": 3, "distinct": 2}
