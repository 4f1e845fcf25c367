"""Requests that a consumer reads while they are computed, as both engines' schedulers see them."""

import pytest
from msgspec import structs

from kvconnector.config import ConnectorConfig
from kvconnector.errors import RemoteProtocolError
from kvconnector.planning import KeepsAll, KeepsWindow
from kvconnector.runtime import Scheduler
from kvconnector.session import WorkerOutput
from kvconnector.session.orders import DropRequest, HoldRequest, LoadRequest, WithdrawRequest
from tests.support.fakes import FakeEngine, FakeGroup, FakeModel, FakePart
from tests.unit.runtime.test_scheduler import _metadata, _orders

SECRET = "5" * 32
NAMES = {"transfer_id": "t", "transfer_secret": SECRET}
DECODE = {"do_remote_decode": True, **NAMES}
ADDRESS = {"remote_engine_id": "p", "remote_host": "127.0.0.1", "remote_port": 5}
PREFILL = {"do_remote_prefill": True, **ADDRESS, **NAMES}
PARTS = (FakePart("k", 1, 1), FakePart("v", 1, 1))
SHAPE = FakeEngine(
    "d",
    FakeModel(groups=(FakeGroup((0,), PARTS), FakeGroup((1,), PARTS)), num_layers=2),
    block_sizes=(4, 4),
    num_blocks=(8, 8),
)


def _scheduler(role, **settings):
    config = {"engine_id": "d", "role": role, "control": {"insecure": True}, **settings}
    retentions = [KeepsAll(), KeepsWindow(4)]
    config = ConnectorConfig.from_mapping(config)
    return Scheduler(config, _metadata(SHAPE), retentions=retentions)


@pytest.fixture
def producer():
    scheduler = _scheduler("producer")
    yield scheduler
    scheduler.close()


def _held(scheduler):
    """What each order to hold says: its tokens, its ids by group, and whether it is all."""
    return [
        (
            hold.num_tokens,
            [blocks.block_ids.tolist() for blocks in hold.blocks],
            hold.is_complete,
        )
        for hold in _orders(scheduler.build_step(), HoldRequest)
    ]


def test_a_prompt_is_granted_as_it_is_computed_and_windows_at_the_end(producer):
    producer.on_new_request("r", DECODE)
    assert _held(producer) == [(0, [[], []], False)]
    blocks = [[3, 1, 2], [0, 0, 5]]
    for num_tokens in (0, 0, 5, 5, 8):
        producer.grow("r", blocks=blocks, num_tokens=num_tokens)
    # the first says that it begins
    assert _held(producer) == [
        (0, [[3], []], False),
        (5, [[3, 1], []], False),
        (8, [[3, 1], []], False),
    ]
    params = producer.offer("r", blocks=[[3, 1, 2], [5]], num_tokens=9, first_blocks=[0, 2])
    (hold,) = _orders(producer.build_step(), HoldRequest)
    assert (hold.is_complete, hold.transfer_id, hold.secret) == (True, "t", SECRET)
    assert params["remote_request_id"].split("|")[:2] == ["t", SECRET]
    assert producer.held == {"r"}


@pytest.mark.parametrize("ending", ["finish", "abort", "withdraw", "grow"])
def test_whoever_follows_a_prompt_that_is_given_up_is_told(producer, ending):
    producer.on_new_request("r", DECODE)
    producer.grow("r", blocks=[[3], [3]], num_tokens=3)
    # tokens that have to be computed again were never right
    arguments = {"blocks": [[3], [3]], "num_tokens": 2} if ending == "grow" else {}
    for _ in range(2):
        getattr(producer, ending)("r", **arguments)
    producer.grow("r", blocks=[[3], [3]], num_tokens=4)
    assert _orders(producer.build_step(), HoldRequest | WithdrawRequest)[2:] == [
        WithdrawRequest("r")
    ]


def test_a_name_of_a_transfer_is_used_once_at_a_time(producer):
    producer.on_new_request("r", DECODE)
    with pytest.raises(RemoteProtocolError, match="in use"):
        producer.on_new_request("s", DECODE)
    producer.offer("r", blocks=[[3], [3]], num_tokens=1)
    with pytest.raises(RemoteProtocolError, match="in use"):
        producer.on_new_request("s", DECODE)
    producer.update(WorkerOutput(finished_sending=frozenset("r")))
    producer.on_new_request("s", DECODE)


@pytest.mark.parametrize("wrong", [{"transfer_id": ""}, {"transfer_secret": "no"}])
def test_names_that_cannot_be_used_are_refused(producer, wrong):
    with pytest.raises(RemoteProtocolError, match="cannot be used"):
        producer.on_new_request("r", {**DECODE, **wrong})


@pytest.mark.parametrize("params", [{"do_remote_decode": True}, DECODE])
def test_without_names_or_with_stream_off_a_prompt_is_offered_when_it_is_done(params):
    scheduler = _scheduler("producer", stream=params is not DECODE)
    scheduler.on_new_request("r", params)
    scheduler.grow("r", blocks=[[3], [3]], num_tokens=4)
    assert scheduler.build_step().orders == ()
    offer = scheduler.offer("r", blocks=[[3], [3]], num_tokens=4)
    assert offer["remote_request_id"].startswith("r|")
    scheduler.close()


def test_a_consumer_waits_until_the_producer_has_begun_and_then_loads_what_it_will_have():
    consumer = _scheduler("consumer")
    consumer.on_new_request("w", PREFILL)
    (want,) = consumer.build_step().orders
    assert (want.is_followed, want.transfer_id, want.secret) == (True, "t", SECRET)
    assert consumer.is_early("w")
    consumer.update(WorkerOutput(begun=frozenset(["w", "unknown"])))
    assert not consumer.is_early("w")
    assert consumer.matched_tokens("w", 12, 4) == (7, True)
    consumer.load("w", blocks=[[1, 2, 3], [4]], first_blocks=[0, 2], num_tokens=7)
    (load,) = consumer.build_step().orders
    assert load == structs.replace(load, token_ranges=((4, 11), (8, 11)), remote_blocks=())
    assert isinstance(load, LoadRequest)


def test_an_offer_without_blocks_is_no_prompt_that_is_still_computed():
    params = {**PREFILL, "remote_request_id": "r", "remote_num_tokens": 4, "remote_block_ids": []}
    del params["transfer_id"]
    with pytest.raises(RemoteProtocolError, match="every cache group"):
        _scheduler("consumer").on_new_request("w", params)


def test_a_consumer_that_gives_up_early_tells_its_workers():
    consumer = _scheduler("consumer")
    consumer.on_new_request("w", PREFILL)
    consumer.abort("w")
    assert consumer.build_step().orders[1:] == (DropRequest("w"),)
    assert not consumer.is_early("w")
