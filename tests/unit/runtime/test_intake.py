from __future__ import annotations

import numpy as np
import pytest

from kvconnector.datapath import Pools
from kvconnector.errors import BlockIdError, LocalError
from kvconnector.runtime.intake import events_of
from kvconnector.runtime.steps import (
    BlockList,
    DropRequest,
    HoldRequest,
    LoadRequest,
    StepMetadata,
    WantRequest,
    WithdrawRequest,
)
from kvconnector.session import events as ev
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


@pytest.mark.parametrize("blocks", UNUSABLE)
def test_a_load_that_cannot_be_is_refused_alone(pools, blocks):
    good = _load("good", BlockList.of([9, 0]))
    step = StepMetadata(orders=(_load("bad", blocks), good, DropRequest("x")))
    bad, asked, dropped = events_of(step, pools, "consumer")
    assert (bad.request_id, type(bad.error)) == ("bad", BlockIdError)
    assert (asked.error, asked.token_ranges) == (None, (range(8),))
    assert [[*side[0].block_ids] for side in (asked.local_blocks, asked.remote_blocks)] == [
        [9, 0],
        [NUM_BLOCKS + 9, 1],
    ]
    assert dropped == ev.LoadWithdrawn("x")


def test_a_refusal_names_the_request_and_what_disagrees(pools):
    (bad,) = events_of(StepMetadata(orders=(_load("bad", OUTSIDE[0]),)), pools, "both")
    text = str(bad.error)
    for part in ("the blocks of request bad are outside the pool", "highest=10", "num_blocks=10"):
        assert part in text


@pytest.mark.parametrize("blocks", [*OUTSIDE, BlockList(bytes(8), -1)])
def test_a_lease_that_cannot_be_is_refused_alone(pools, blocks):
    step = StepMetadata(orders=(_hold("bad", blocks), _hold("good", BlockList.of([1, 2]))))
    bad, good = events_of(step, pools, "producer")
    assert (bad.request_id, bad.blocks, type(bad.error)) == ("bad", (), BlockIdError)
    assert good.error is None
    assert [[*blocks.block_ids] for blocks in good.blocks] == [[1, 2]]


@pytest.mark.parametrize(
    "order, error",
    [
        (_hold("r", BlockList(b"123")), "not a multiple of 4"),
        (HoldRequest("r", "r", "", (), 0), "every cache group"),
        (LoadRequest("r", (), (), ()), "every cache group"),
        (_load("r", BlockList(b"1")), "not a multiple of 4"),
        (_load("r", BlockList.of([1, 2]), BlockList(b"1")), "not a multiple of 4"),
    ],
)
def test_an_order_that_is_malformed_is_refused_alone(pools, order, error):
    good = _load("good", BlockList.of([9, 0]))
    bad, asked = events_of(StepMetadata(orders=(order, good)), pools, "both")
    assert error in str(bad.error)
    assert asked.error is None


def test_orders_for_the_other_role_refuse_the_step(pools):
    want = WantRequest("w", "t", "", "p", "tcp://", "")
    for order, role in ((want, "producer"), (WithdrawRequest("r"), "consumer")):
        with pytest.raises(LocalError, match=f"a {role} takes no"):
            events_of(StepMetadata(orders=(order,)), pools, role)
