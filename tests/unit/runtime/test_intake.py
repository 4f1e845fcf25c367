import numpy as np
import pytest

from kvconnector.datapath import Pools
from kvconnector.errors import BlockIdError, LocalError
from kvconnector.runtime.intake import events_of
from kvconnector.runtime.steps import (
    BlockList,
    HoldRequest,
    LoadRequest,
    StepMetadata,
    WantRequest,
    WithdrawRequest,
)
from tests.support.fakes import FakeCaches, FakeEngine, attention_model

BLOCK_SIZE, NUM_BLOCKS = 4, 10
OUTSIDE = [BlockList.of([1, NUM_BLOCKS]), BlockList(b"\xff\xff\xff\xff")]
UNUSABLE = [*OUTSIDE, BlockList.of([1]), BlockList.of([1, 2], 1), BlockList(bytes(8), -1)]


@pytest.fixture
def pools():
    shape = FakeEngine("e", attention_model(), block_sizes=(BLOCK_SIZE,), num_blocks=(NUM_BLOCKS,))
    return Pools(
        FakeCaches(shape, shape.geometry().ranks[0], np.random.default_rng(0)).groups(), "cpu"
    )


def _load(name, blocks, remote=None, tokens=(0, 8)):
    remote = remote or BlockList.of([NUM_BLOCKS + 9, 1])
    return LoadRequest(name, (tokens,), (blocks,), (remote,))


def _hold(name, blocks):
    return HoldRequest(name, name, "5" * 32, (blocks,), 8)


REFUSED = [
    *((_load("bad", blocks), "") for blocks in UNUSABLE),
    *((_hold("bad", blocks), "") for blocks in [*OUTSIDE, UNUSABLE[-1]]),
    (_load("bad", OUTSIDE[0]), "blocks of request bad are outside the pool"),
    (_hold("bad", BlockList(b"123")), "not a multiple of 4"),
    (HoldRequest("bad", "bad", "", (), 0), "every cache group"),
    (LoadRequest("bad", (), (), ()), "every cache group"),
    (_load("bad", BlockList(b"1")), "not a multiple of 4"),
    (_load("bad", BlockList.of([1, 2]), BlockList(b"1")), "not a multiple of 4"),
]


@pytest.mark.parametrize("order, text", REFUSED)
def test_an_order_that_cannot_be_is_refused_alone(pools, order, text):
    orders = (order, _load("good", BlockList.of([9, 0])), _hold("held", BlockList.of([1, 2])))
    bad, asked, held = events_of(StepMetadata(orders=orders), pools, "both")
    assert (bad.request_id, type(bad.error)) == ("bad", BlockIdError)
    assert text in str(bad.error)
    assert asked.error is held.error is None
    assert asked.token_ranges == (range(8),)
    blocks = (*asked.local_blocks, *asked.remote_blocks, *held.blocks)
    assert [[*each.block_ids] for each in blocks] == [[9, 0], [NUM_BLOCKS + 9, 1], [1, 2]]


def test_orders_for_the_other_role_refuse_the_step(pools):
    want = WantRequest("w", "t", "", "p", "tcp://", "")
    for order, role in ((want, "producer"), (WithdrawRequest("r"), "consumer")):
        with pytest.raises(LocalError, match=f"a {role} takes no"):
            events_of(StepMetadata(orders=(order,)), pools, role)
