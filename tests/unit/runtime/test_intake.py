import re

import pytest

from kvconnector.errors import BlockIdError, LocalError
from kvconnector.ids import EngineAddress
from kvconnector.planning import GroupBlocks
from kvconnector.runtime.intake import checked_orders
from kvconnector.session.orders import (
    HoldRequest,
    LoadRequest,
    StepMetadata,
    WantRequest,
    WithdrawRequest,
)
from tests.unit.datapath.caches import Caches, Shape

NUM_BLOCKS = 10
OUTSIDE = [
    GroupBlocks.of([1, NUM_BLOCKS]),
    GroupBlocks(first_block=0, wire_ids=b"\xff\xff\xff\xff"),  # -1
]
UNUSABLE = [*OUTSIDE, GroupBlocks.of([1]), GroupBlocks.of([1, 2], 1)]


@pytest.fixture
def pools():
    return Caches(Shape(block=4, blocks=NUM_BLOCKS), seed=None).pools


def _note(subject, error):
    raise error


def _load(name, blocks, remote=None, tokens=(0, 8)):
    remote = remote or GroupBlocks.of([NUM_BLOCKS + 9, 1])
    return LoadRequest(name, (tokens,), (blocks,), (remote,))


def _hold(name, blocks):
    return HoldRequest(name, name, "5" * 32, (blocks,), 8)


REFUSED = [
    *((_load("bad", blocks), "") for blocks in UNUSABLE),
    *((_hold("bad", blocks), "") for blocks in OUTSIDE),
    (_load("bad", GroupBlocks.of([3, 3])), "blocks of request bad name a block twice .*distinct=1"),
    (_load("bad", OUTSIDE[0]), "blocks of request bad are outside the pool"),
    (HoldRequest("bad", "bad", "", (), 0), "a different number of cache groups"),
    (LoadRequest("bad", (), (), ()), "a different number of cache groups"),
    (LoadRequest("bad", (), (GroupBlocks.of([1]),), ()), "every cache group"),
    # no message could carry them
    (
        _load("bad", GroupBlocks.of([1], (1 << 29)), tokens=(1 << 31, (1 << 31) + 4)),
        "tokens of request bad must lie between 0",
    ),
    (
        _load("bad", GroupBlocks.of([1]), tokens=(-4, -4)),
        "tokens of request bad must lie between 0",
    ),
    (_load("bad", GroupBlocks.of([1]), tokens=(4, 0)), "tokens of request bad must lie between 0"),
]


@pytest.mark.parametrize("order, text", REFUSED)
def test_a_wrong_order_is_refused_alone(pools, order, text):
    orders = (order, _load("good", GroupBlocks.of([9, 0])), _hold("held", GroupBlocks.of([1, 2])))
    bad, asked, held = checked_orders(StepMetadata(orders=orders), pools, "both", _note)
    assert (bad.request_id, type(bad.error)) == ("bad", BlockIdError)
    assert re.search(text, str(bad.error))
    assert asked.error is held.error is None
    assert asked.token_ranges == ((0, 8),)
    blocks = (*asked.local_blocks, *asked.remote_blocks, *held.blocks)
    assert [[*each.block_ids] for each in blocks] == [[9, 0], [NUM_BLOCKS + 9, 1], [1, 2]]


def test_blocks_outside_a_loads_tokens_may_repeat(pools):
    window = _load("window", GroupBlocks.of([0, 0, 0, 5, 6]), tokens=(9, 20))
    step = StepMetadata(orders=(window,))
    assert checked_orders(step, pools, "both", _note)[0].error is None


def test_only_loads_and_leases_are_compared_with_the_pools(pools, monkeypatch):
    seen = []
    monkeypatch.setattr(type(pools), "check_blocks", lambda _, blocks, what: seen.append(what))
    place = EngineAddress("p", "tcp://")
    wants = [WantRequest(f"w{number}", "t", "", place) for number in range(1000)]
    orders = (*wants, _hold("held", GroupBlocks.of([1, 2])), WithdrawRequest("held"))
    assert checked_orders(StepMetadata(orders=orders), pools, "both", _note) == [*orders]
    assert seen == ["the blocks of request held"]


def test_orders_for_the_other_role_refuse_the_step(pools):
    want = WantRequest("w", "t", "", EngineAddress("p", "tcp://"))
    for order, role in ((want, "producer"), (WithdrawRequest("r"), "consumer")):
        with pytest.raises(LocalError, match=f"a {role} does not accept"):
            checked_orders(StepMetadata(orders=(order,)), pools, role, _note)
