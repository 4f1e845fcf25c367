from __future__ import annotations

import numpy as np
import pytest

from kvconnector.datapath import Pools
from kvconnector.errors import BlockIdError, LocalError
from kvconnector.runtime.intake import check_step
from kvconnector.runtime.steps import (
    BlockList,
    HoldRequest,
    LoadRequest,
    StepMetadata,
    WantRequest,
)
from kvconnector.session import events as ev
from tests.support.fakes import EngineShape, FakeCaches, attention_model

BLOCK_SIZE, NUM_BLOCKS = 4, 10
OUTSIDE = [BlockList.of([1, NUM_BLOCKS]), BlockList(b"\xff\xff\xff\xff")]
UNUSABLE = [*OUTSIDE, BlockList.of([1]), BlockList.of([1, 2], 1), BlockList(bytes(8), -1)]


@pytest.fixture
def pools():
    shape = EngineShape("e", attention_model(), block_sizes=(BLOCK_SIZE,), num_blocks=(NUM_BLOCKS,))
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
    step = StepMetadata(loads=(_load("bad", blocks), good), dropped=("x",))
    checked = check_step(step, pools, "consumer")
    bad, asked, dropped = checked.events()
    assert (bad.request_id, type(bad.error)) == ("bad", BlockIdError)
    assert (asked.error, asked.token_ranges) == (None, (range(8),))
    assert [[*side[0].block_ids] for side in (asked.local_blocks, asked.remote_blocks)] == [
        [9, 0],
        [NUM_BLOCKS + 9, 1],
    ]
    assert dropped == ev.LoadWithdrawn("x")


def test_a_refusal_names_the_request_and_what_disagrees(pools):
    checked = check_step(StepMetadata(loads=(_load("bad", OUTSIDE[0]),)), pools, "both")
    (bad,) = checked.events()
    text = str(bad.error)
    for part in ("the blocks of request bad are outside the pool", "highest=10", "num_blocks=10"):
        assert part in text


@pytest.mark.parametrize("blocks", [*OUTSIDE, BlockList(bytes(8), -1)])
def test_a_lease_that_cannot_be_is_refused_alone(pools, blocks):
    step = StepMetadata(holds=(_hold("bad", blocks), _hold("good", BlockList.of([1, 2]))))
    checked = check_step(step, pools, "producer")
    assert list(checked.refused_holds) == ["bad"]
    bad, good = checked.events()
    assert (bad.blocks, bad.error) == ((), checked.refused_holds["bad"])
    assert good.error is None
    assert [[*blocks.block_ids] for blocks in good.blocks] == [[1, 2]]


@pytest.mark.parametrize(
    "step, error",
    [
        (StepMetadata(holds=(_hold("r", BlockList(b"123")),)), "no whole number of int32"),
        (StepMetadata(holds=(HoldRequest("r", "r", "", (), 0),)), "every cache group"),
        (StepMetadata(loads=(LoadRequest("r", (), (), ()),)), "every cache group"),
        (StepMetadata(loads=(_load("r", BlockList(b"1")),)), "no whole number of int32"),
        (StepMetadata(loads=(_load("r", BlockList.of([1, 2]), BlockList(b"1")),)), "int32"),
    ],
)
def test_what_no_scheduler_half_says_refuses_the_step(pools, step, error):
    with pytest.raises(BlockIdError, match=error):
        check_step(step, pools, "both")


def test_news_of_the_other_role_refuses_the_step(pools):
    want = WantRequest("w", "t", "", "p", "tcp://", "")
    for step, role in (
        (StepMetadata(wants=(want,)), "producer"),
        (StepMetadata(withdrawn=("r",)), "consumer"),
    ):
        with pytest.raises(LocalError, match=f"a {role} "):
            check_step(step, pools, role)
