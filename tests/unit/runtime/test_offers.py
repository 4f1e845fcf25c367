"""An engine's offers, and the workers that a scheduler accepts."""

from contextlib import nullcontext

import pytest
from msgspec import structs

from kvconnector.config import LeaseConfig
from kvconnector.errors import BlockIdError, ConfigError, GeometryError, LocalError
from kvconnector.runtime import Scheduler
from kvconnector.runtime.intake import checked_orders
from kvconnector.runtime.outbox import Outbox
from kvconnector.session import WorkerOutput
from kvconnector.session.orders import ReclaimRequest
from tests.support.fakes import FakeEngine, attention_model, metadata_of
from tests.unit.datapath.caches import Caches, Shape
from tests.unit.runtime.test_scheduler import CONFIG, STREAMED, hybrid

PRODUCER = structs.replace(CONFIG, role="producer")


@pytest.fixture
def producer():
    with Scheduler(PRODUCER, metadata_of(role="producer")) as scheduler:
        yield scheduler


@pytest.mark.parametrize(
    "change", [{"engine_id": "other"}, {"role": "producer"}, {"role": "both"}], ids=str
)
def test_workers_of_another_engine_or_role_are_refused(change):
    shape = FakeEngine("d", attention_model(), tp_size=2)
    first, second = metadata_of(shape)
    with pytest.raises(ConfigError, match="another engine, or has another role") as refused:
        Scheduler(CONFIG, [first, structs.replace(second, **change)])
    assert refused.value.context["rank"] == "pp0tp1"


def test_workers_agree_on_the_number_of_optional_groups():
    first, second = metadata_of(FakeEngine("d", attention_model(), tp_size=2))
    with pytest.raises(GeometryError, match="different numbers of optional cache groups"):
        Scheduler(CONFIG, [first, structs.replace(second, num_optional=1)])


@pytest.mark.parametrize("missing", range(4))
def test_an_engine_without_one_of_its_ranks_is_refused(missing):
    workers = metadata_of(FakeEngine("d", attention_model(), tp_size=2, pp_size=2))
    del workers[missing]
    with pytest.raises(GeometryError, match=r"every \(pp_rank, tp_rank\)|a rank is missing"):
        Scheduler(CONFIG, workers)


def test_a_last_rank_that_is_missing_is_noticed_by_its_heads():
    workers = metadata_of(FakeEngine("d", attention_model(), tp_size=2))
    with pytest.raises(GeometryError, match="a rank is missing") as refused:
        Scheduler(CONFIG, workers[:1])
    assert refused.value.context["heads"] == [1]


@pytest.mark.parametrize(
    "change, text",
    [
        ({"blocks": [[1, -1]]}, "block ids"),
        ({"blocks": [[1, "2"]]}, "block ids"),
        ({"blocks": [[1]]}, "do not hold these tokens"),
        ({"first_blocks": [1]}, "do not hold these tokens"),
        ({"blocks": [[1, 1]]}, "name a block twice"),
        ({"blocks": [[1, 2], [3, 4]]}, "of each cache group"),
        ({"first_blocks": [0, 0]}, "of each cache group"),
        ({"blocks": [1]}, "a list of block ids for each cache group"),
        ({"blocks": None}, "a list of block ids for each cache group"),
        *(
            ({"num_tokens": each}, "num_tokens must be an integer")
            for each in (-1, "4", None, True)
        ),
        ({"num_encoder_tokens": 1 << 31}, "num_encoder_tokens must be an integer"),
        ({"first_blocks": ["x"]}, "first_block must be an integer"),
    ],
)
def test_an_offer_that_no_consumer_could_read_is_refused_at_the_call(producer, change, text):
    offer = {"blocks": [[1, 2]], "num_tokens": 8}
    with pytest.raises(BlockIdError, match=text):
        producer.offer("r", **{**offer, **change})
    assert not producer.held
    assert producer.build_step().orders == ()
    producer.offer("r", **offer)
    assert producer.held == {"r"}


@pytest.mark.parametrize("is_held", [False, True])
def test_an_offer_has_a_name_that_no_client_has_given_to_another_transfer(producer, is_held):
    """Workers would refuse the second of two leases of one name, and its request would have no reader."""
    offered = {"blocks": [[1, 2]], "num_tokens": 8}
    producer.on_new_request("streamed", {**STREAMED, "transfer_id": "r"})
    if is_held:
        producer.offer("streamed", **offered)
    params = producer.offer("r", **offered)
    names = {order.transfer_id for order in producer.build_step().orders if order.request_id == "r"}
    assert len(names) == 1
    assert "r" not in names
    assert params["remote_request_id"].startswith(f"{names.pop()}|")


def test_held_requests_are_a_view(producer):
    """It makes no copy: every step's report is compared with them, and thousands may be held."""
    held = producer.held
    producer.offer("r", blocks=[[1, 2]], num_tokens=8)
    assert held == {"r"}


@pytest.mark.parametrize("extra", [bytes(257), "token"])
def test_an_offer_with_more_for_its_consumers_than_a_message_takes_is_refused(producer, extra):
    with pytest.raises(LocalError, match="at most 256"):
        producer.offer("r", blocks=[[1]], num_tokens=3, extra=extra)
    assert producer.build_step().orders == ()
    producer.offer("r", blocks=[[1]], num_tokens=3, extra=bytes(256))
    assert producer.build_step().orders[0].extra == bytes(256)


@pytest.mark.parametrize(
    "change, text",
    [
        ({"blocks": [[1], [2]]}, "of each cache group"),
        ({"blocks": None}, "a list of block ids for each cache group"),
        ({"blocks": [3]}, "a list of block ids for each cache group"),
        ({"blocks": [[-1]]}, "block ids"),
        ({"num_tokens": "3"}, "num_tokens must be an integer"),
        ({"num_tokens": -1}, "num_tokens must be an integer"),
        ({"ahead_tokens": 2.5}, "ahead_tokens must be an integer"),
        # no message could carry them, and their consumer would end the connection
        ({"num_tokens": 1 << 31}, "num_tokens must be an integer"),
        ({"num_tokens": 5}, "do not hold these tokens"),
        ({"ahead_tokens": 5}, "do not hold these tokens"),
    ],
)
def test_a_step_that_no_consumer_could_read_is_refused_at_the_call(producer, change, text):
    producer.on_new_request("r", STREAMED)
    producer.build_step()
    grown = {"blocks": [[1]], "num_tokens": 2, "ahead_tokens": 4}
    with pytest.raises(BlockIdError, match=text):
        producer.grow("r", **{**grown, **change})
    assert producer.build_step().orders == ()
    producer.grow("r", **grown)
    (order,) = producer.build_step().orders
    assert (order.watermark.num_tokens, order.watermark.ahead_tokens) == (2, 4)


@pytest.mark.parametrize("lease_s", [-1, float("nan"), float("inf"), "9", None])
def test_a_lease_of_no_duration_is_refused(producer, lease_s):
    offer = {"blocks": [[1]], "num_tokens": 3}
    with pytest.raises(LocalError, match="lease_duration_s"):
        producer.offer("r", **offer, lease_duration_s=lease_s)
    producer.offer("r", **offer, lease_duration_s=9)


def test_a_request_is_offered_once_and_not_after_close(producer):
    producer.offer("r", blocks=[[1]], num_tokens=3)
    with pytest.raises(LocalError, match="already offered"):
        producer.offer("r", blocks=[[1]], num_tokens=3)
    producer.close()
    with pytest.raises(LocalError, match="is closed"):
        producer.offer("s", blocks=[[2]], num_tokens=3)


@pytest.mark.parametrize("num_blocks", [10, 30])
def test_each_rank_compares_what_is_offered_with_its_own_pool(producer, num_blocks):
    producer.offer("bad", blocks=[[1, 20]], num_tokens=8)
    producer.offer("good", blocks=[[2, 3]], num_tokens=8)
    step, outbox = producer.build_step(), Outbox()
    pools = Caches(Shape(block=4, blocks=num_blocks), seed=None).pools
    bad, good = orders = checked_orders(step, pools, "producer", outbox.note_contained)
    assert good.error is None
    outbox.expect(orders)
    if num_blocks == 30:
        assert bad.error is None
        return
    outbox.released("bad", "aborted")  # as the session does with a lease that was refused
    failed = outbox.take().failed_sending["bad"]
    assert failed.startswith("BlockIdError: the blocks of request bad are outside the pool")
    assert "highest=20, num_blocks=10" in failed


def test_an_offer_outside_the_pools_takes_none_of_their_room():
    config = structs.replace(PRODUCER, lease=LeaseConfig(reclaim_above=0.5))
    with Scheduler(config, metadata_of(role="producer")) as producer:
        producer.offer("wrong", blocks=[[1, 1000]], num_tokens=8)
        for number in range(3):
            producer.offer(f"r{number}", blocks=[range(10, 25)], num_tokens=60)
        assert not [
            each for each in producer.build_step().orders if isinstance(each, ReclaimRequest)
        ]
        producer.offer("last", blocks=[range(25, 32)], num_tokens=28)
        (first, *_) = [
            each.request_id
            for each in producer.build_step().orders
            if isinstance(each, ReclaimRequest)
        ]
        assert first == "wrong"


def test_an_offer_that_was_released_takes_no_room():
    config = structs.replace(PRODUCER, lease=LeaseConfig(reclaim_above=0.5))
    with Scheduler(config, metadata_of(role="producer")) as producer:
        for number in range(10):
            blocks = range(3 * number, 3 * number + 3)
            producer.offer(f"r{number}", blocks=[blocks], num_tokens=12)
            producer.update(WorkerOutput(finished_sending={f"r{number}"}))
        producer.offer("last", blocks=[[31]], num_tokens=4)
        assert not [
            each for each in producer.build_step().orders if isinstance(each, ReclaimRequest)
        ]


@pytest.mark.parametrize(
    "blocks, first_blocks, is_enough",
    [
        # 40 tokens in blocks of 4: the window sees tokens 31 to 39, the chunk tokens 32 to 39
        ([range(10), [7, 8, 9], [8, 9], [5]], [0, 7, 8, 39], True),
        ([range(10), [0, 0, 7, 8, 9], [8, 9], [5]], [0, 5, 8, 39], True),
        ([range(10), [8, 9], [8, 9], [5]], [0, 8, 8, 39], False),
        ([range(10), [7, 8, 9], [9], [5]], [0, 7, 9, 39], False),
        # a state of an earlier position, and one of a later position
        ([range(10), [7, 8, 9], [8, 9], [5]], [0, 7, 8, 20], True),
        ([range(10), [7, 8, 9], [8, 9], [5]], [0, 7, 8, 40], False),
    ],
)
def test_groups_that_keep_only_some_tokens_offer_these(blocks, first_blocks, is_enough):
    with hybrid(role="producer") as producer:
        refused = nullcontext() if is_enough else pytest.raises(BlockIdError, match="do not hold")
        with refused:
            producer.offer("r", blocks=blocks, first_blocks=first_blocks, num_tokens=40)


@pytest.mark.parametrize("name", ["", "x" * 513, "half a pair: \ud800"])
def test_an_id_that_no_message_can_carry_is_refused_and_leaves_nothing(producer, name):
    with pytest.raises(LocalError, match="a message cannot carry"):
        producer.offer(name, blocks=[[1, 2]], num_tokens=8)
    assert not producer.held
    assert producer.build_step().orders == ()
