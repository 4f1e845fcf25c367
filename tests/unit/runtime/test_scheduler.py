from dataclasses import replace

import pytest
from msgspec import structs

from kvconnector.config import ConnectorConfig
from kvconnector.errors import (
    BlockIdError,
    ConfigError,
    GeometryError,
    IncompatiblePeerError,
    LocalError,
    ProducerNotAllowedError,
    RemoteProtocolError,
    UnknownRequestError,
)
from kvconnector.planning import KeepsAll, KeepsChunk, KeepsEncoder, KeepsState, KeepsWindow
from kvconnector.runtime import Scheduler, TransferParams
from kvconnector.session import WorkerOutput
from kvconnector.session.orders import (
    DropRequest,
    GrowRequest,
    HoldRequest,
    LoadRequest,
    WantRequest,
    WithdrawRequest,
)
from tests.support.fakes import (
    FakeEngine,
    FakeGroup,
    FakeModel,
    FakePart,
    attention_model,
    metadata_of,
)

CONFIG = ConnectorConfig.from_mapping(
    {"engine_id": "d", "role": "consumer", "control": {"insecure": True}}
)
PARAMS = TransferParams(
    remote_engine_id="p",
    remote_request_id="r",
    remote_block_ids=[[1, 2]],
    remote_host="::1",
    remote_port=5,
    remote_num_tokens=8,
    transfer_secret="5" * 32,
).to_mapping()
DEADLINE_S = 30.0
STREAMED = {"do_remote_decode": True, "transfer_id": "t", "transfer_secret": "5" * 32}


def consumer_scheduler(shape=None, retentions=None):
    return Scheduler(CONFIG, metadata_of(shape), retentions=retentions)


@pytest.fixture
def scheduler():
    return consumer_scheduler()


@pytest.fixture
def producer():
    scheduler = Scheduler(structs.replace(CONFIG, role="producer"), metadata_of(role="producer"))
    yield scheduler
    scheduler.close()


def _orders(step, kind):
    return [order for order in step.orders if isinstance(order, kind)]


def _start(scheduler, name="w", computed=0):
    scheduler.on_new_request(name, PARAMS)
    count, is_async = scheduler.matched_tokens(name, 8, computed)
    assert is_async == (count > 0)
    scheduler.load(name, blocks=[[4, 5]], num_tokens=count)
    return count


def _done(*names):
    return WorkerOutput(finished_recving=frozenset(names))


def test_the_last_prompt_token_and_computed_tokens_are_not_loaded(scheduler):
    assert _start(scheduler, computed=3) == 4
    step = scheduler.build_step()
    assert step.engine is not None
    want, load = step.orders
    assert load.token_ranges == ((3, 7),)
    assert want.engine.address == "tcp://[::1]:5"
    assert scheduler.build_step().is_empty


def test_a_request_whose_tokens_are_all_cached_needs_none_of_its_blocks(scheduler):
    scheduler.on_new_request("w", PARAMS)
    scheduler.matched_tokens("w", 8, 7)
    scheduler.load("w", blocks=[[4]], num_tokens=0)
    assert scheduler.build_step().orders[-1] == DropRequest("w", needs_none=True)
    scheduler.abort("w")
    assert scheduler.build_step().is_empty


def test_a_name_is_free_again_once_its_load_has_ended(scheduler):
    _start(scheduler)
    scheduler.build_step()
    scheduler.abort("w")
    scheduler.abort("w")
    assert scheduler.is_loading("w")
    assert scheduler.build_step().orders == (DropRequest("w"),)
    with pytest.raises(LocalError, match="queued twice"):
        scheduler.on_new_request("w", PARAMS)
    scheduler.update(_done("w", "stranger"))
    assert not scheduler.is_loading("w")
    assert _start(scheduler) == 7


def test_an_offer_can_be_withdrawn(producer):
    """Whoever needs its blocks need not wait for the lease's end."""
    producer.offer("r", blocks=[[1, 2]], num_tokens=8)
    producer.finish("r")
    producer.build_step()
    producer.withdraw("r")
    assert producer.build_step().orders == (WithdrawRequest("r"),)
    assert "r" in producer.held
    producer.update(WorkerOutput(finished_sending={"r"}))
    assert "r" not in producer.held
    producer.withdraw("r")
    assert producer.build_step().is_empty


def test_a_producer_says_where_it_is_found(producer, scheduler):
    params = producer.offer("r", blocks=[[1, 2]], num_tokens=8)
    assert producer.address == f"tcp://{params['remote_host']}:{params['remote_port']}"
    assert scheduler.address is None


@pytest.mark.parametrize("output", [None, {}, "output"])
def test_only_outputs_are_taken(scheduler, output):
    with pytest.raises(LocalError, match="update needs the output that the aggregator returned"):
        scheduler.update(output)


@pytest.mark.parametrize("ids", [[-1], [3, -(1 << 31)]])
def test_a_negative_block_id_is_named_as_it_is(producer, ids):
    with pytest.raises(BlockIdError, match=f"lowest={min(ids)}") as refused:
        producer.offer("r", blocks=[ids], num_tokens=4)
    assert "2147483648" not in str(refused.value).replace("-2147483648", "")


def test_loads_with_windows_say_so():
    for retentions, keeps_all in (([KeepsAll()], True), ([KeepsWindow(4)], False)):
        scheduler = consumer_scheduler(retentions=retentions)
        _start(scheduler)
        (load,) = _orders(scheduler.build_step(), LoadRequest)
        assert load.keeps_all is keeps_all


@pytest.mark.parametrize("workers", [None, metadata_of()[0], iter(metadata_of()), "workers"])
def test_a_scheduler_takes_a_list_of_handshakes(workers):
    with pytest.raises(ConfigError, match=r"the list of what each worker's handshake\(\) returned"):
        Scheduler(CONFIG, workers)


@pytest.mark.parametrize("counts", [(-5, 0), (33, -4), ("33", 0), (33, None), (3.5, 0)])
def test_a_prompt_of_a_negative_length_is_refused(scheduler, counts):
    scheduler.on_new_request("w", PARAMS)
    with pytest.raises(LocalError, match=r"num_\w+_tokens must be an integer from 0"):
        scheduler.matched_tokens("w", *counts)


@pytest.mark.parametrize("wanted", ["true", "yes", 1, 0])
def test_a_wish_that_is_neither_true_nor_false_is_not_taken_for_none(scheduler, wanted):
    with pytest.raises(RemoteProtocolError, match=f"must be true or false.*={wanted!r}"):
        scheduler.on_new_request("w", {**PARAMS, "do_remote_prefill": wanted})


@pytest.mark.parametrize("extra, length", [("text", "4"), (b"x" * 257, "257"), (5, "None")])
def test_an_offer_s_extra_is_a_few_bytes(producer, extra, length):
    with pytest.raises(LocalError, match=f"must be bytes, at most 256 .*length={length}"):
        producer.offer("r", blocks=[[1]], num_tokens=1, extra=extra)


def test_mistakes_are_refused_before_anything_changes(scheduler):
    scheduler.on_new_request("w", PARAMS)
    right = {"blocks": [[1, 2]], "num_tokens": 3}
    for wrong in (
        {"blocks": [[1], [2]], "first_blocks": [0]},
        {"blocks": [[-1]]},
        *({"num_tokens": each} for each in ("3", None, 1.5, -1, 1 << 31)),
        {"num_encoder_tokens": -1},
        *({"first_blocks": each} for each in ("x", [-1], [0, 0])),
        *({"computed_tokens": each} for each in (1, "x", [-1], [0, 0])),
    ):
        with pytest.raises(BlockIdError):
            scheduler.load("w", **{**right, **wrong})
    assert not _orders(scheduler.build_step(), LoadRequest)
    scheduler.load("w", blocks=[[1, 2]], num_tokens=3)
    with pytest.raises(UnknownRequestError):
        scheduler.load("w", blocks=[[1, 2]], num_tokens=3)


def test_offers_may_lack_optional_groups_or_have_more():
    part = (FakePart("k", 2, 4),)
    model = FakeModel(3, (FakeGroup((0, 1), part), FakeGroup((2,), part)))
    shape = FakeEngine("d", model, block_sizes=(4, 4), num_blocks=(32, 32), num_optional=1)
    assert metadata_of(shape)[0].geometry.groups[1].layers == (2,)
    for offered in ([[1, 2]], [[1, 2], [3, 4]], [[1, 2], [3, 4], [5]]):
        scheduler = consumer_scheduler(shape)
        assert scheduler.build_step().engine.num_optional == 1
        scheduler.on_new_request("w", {**PARAMS, "remote_block_ids": offered})
        assert scheduler.matched_tokens("w", 8, 0) == (7, True)
        scheduler.load("w", blocks=[[4, 5], [6, 7]], num_tokens=7)
        (order,) = _orders(scheduler.build_step(), LoadRequest)
        assert len(order.token_ranges) == len(order.local_blocks) == 2
        assert len(order.remote_blocks) == len(offered)
    scheduler = consumer_scheduler(replace(shape, num_optional=0))
    with pytest.raises(IncompatiblePeerError, match="a different number of cache groups"):
        scheduler.on_new_request("w", PARAMS)


COMPRESSED = FakeEngine(
    "d",
    FakeModel(1, tuple(FakeGroup((0,), (FakePart("k", 2, 4),), m) for m in (1, 4, 128))),
    block_sizes=(4, 2, 1),
    num_blocks=(99, 99, 99),
)


def test_a_producer_names_the_blocks_of_rows_that_exist():
    def blocks(*counts):
        return [list(range(count)) for count in counts]

    config = structs.replace(CONFIG, role="producer")
    with Scheduler(config, metadata_of(COMPRESSED, "producer")) as producer:
        producer.on_new_request("r", STREAMED)
        # a block without rows tells consumers that the producer has started it
        for num_tokens, named in (
            (3, [1, 1, 1]),
            (4, [1, 1, 1]),
            (15, [4, 2, 1]),
            (260, [65, 33, 2]),
        ):
            producer.grow("r", blocks=blocks(66, 40, 3), num_tokens=num_tokens)
            *_, order = _orders(producer.build_step(), GrowRequest)
            assert [group.num_blocks for group in order.blocks] == named
            assert order.watermark.num_tokens == num_tokens
        for wrong in (blocks(66, 32, 2), blocks(66, 33, 1)):
            with pytest.raises(BlockIdError, match="do not hold these tokens"):
                producer.grow("r", blocks=wrong, num_tokens=263)
            with pytest.raises(BlockIdError, match="do not hold these tokens"):
                producer.offer("r", blocks=wrong, num_tokens=263)
        producer.offer("r", blocks=blocks(66, 33, 2), num_tokens=263)
        # a prompt without a whole row has no blocks of it
        producer.offer("s", blocks=blocks(1, 0, 0), num_tokens=3)


def test_groups_of_one_table_name_its_blocks_once():
    """Other groups with equal ids keep a list of their own: what an offer looks like never depends on its ids."""
    config = structs.replace(CONFIG, role="producer")
    metadata = metadata_of(COMPRESSED, "producer")
    long, equal = [1, 2, 3], [[1, 2, 3]] * 3
    for tables, sent, numbers in (
        (None, equal, ""),
        ([4, 5, 6], equal, ""),
        ([4, 4, 6], [long, long], "0,0,0,0,0,1"),
        ([7, 7, 7], [long], "0,0,0,0,0,0"),
    ):
        with Scheduler(config, metadata, tables=tables) as producer:
            params = producer.offer("r", blocks=equal, num_tokens=3)
            assert params["remote_block_ids"] == sent
            assert params["remote_request_id"].rpartition("|")[2] == numbers
            (hold,) = _orders(producer.build_step(), HoldRequest)
        consumer = consumer_scheduler(COMPRESSED)
        consumer.on_new_request("w", params)
        count, _ = consumer.matched_tokens("w", 4, 0)
        consumer.load("w", blocks=[[7], [8], [9]], num_tokens=count)
        (load,) = _orders(consumer.build_step(), LoadRequest)
        assert load.remote_blocks == hold.blocks


@pytest.mark.parametrize("tables", [[], [0], [0, 1, 2, 3], [0, 1, -1], [0, 1, "2"], [0, 1, 1.0]])
def test_tables_are_numbers_one_for_each_group(tables):
    with pytest.raises(GeometryError):
        Scheduler(CONFIG, metadata_of(COMPRESSED), tables=tables)


@pytest.mark.parametrize(
    "cached, stop, ranges",
    [
        (0, 263, [(0, 263), (0, 65), (0, 2)]),
        (256, 263, [(256, 263), (64, 65), (2, 2)]),
        (255, 263, [(255, 263), (63, 65), (1, 2)]),
        (0, 3, [(0, 3), (0, 0), (0, 0)]),
    ],
)
def test_a_load_names_rows(cached, stop, ranges):
    scheduler = consumer_scheduler(COMPRESSED)
    offered = [list(range(count)) for count in (66, 33, 2)]
    params = {**PARAMS, "remote_block_ids": offered, "remote_num_tokens": 263}
    scheduler.on_new_request("w", params)
    assert scheduler.matched_tokens("w", stop + 1, cached) == (stop - cached, True)
    scheduler.load("w", blocks=offered, num_tokens=stop - cached)
    (order,) = _orders(scheduler.build_step(), LoadRequest)
    assert (list(order.token_ranges), order.token_stop) == (ranges, stop)


def test_whole_blocks_of_a_prefix_cache_are_whole_rows():
    scheduler = consumer_scheduler(COMPRESSED)
    offered = [list(range(count)) for count in (66, 33, 2)]
    params = {**PARAMS, "remote_block_ids": offered, "remote_num_tokens": 263}
    scheduler.on_new_request("w", params)
    scheduler.matched_tokens("w", 264, 142)
    with pytest.raises(BlockIdError, match="multiple of row_tokens"):
        scheduler.load("w", blocks=offered, num_tokens=121, cache_block_tokens=[4, 6, 128])
    loaded = scheduler.load("w", blocks=offered, num_tokens=121, cache_block_tokens=[4, 8, 256])
    assert loaded == ((140, 263), (34, 65), (0, 2))


def test_retentions_count_the_rows_of_their_groups():
    for wrong in (
        [KeepsAll(), KeepsAll(), KeepsAll(128)],
        [KeepsAll(), KeepsWindow(4), KeepsAll(128)],
    ):
        with pytest.raises(GeometryError, match="the same row_tokens"):
            consumer_scheduler(COMPRESSED, wrong)


@pytest.mark.parametrize("request_id", [7, b"r", "\ud800"], ids=ascii)
def test_an_id_that_no_order_can_carry_is_refused_alone(scheduler, producer, request_id):
    for half, params in ((scheduler, PARAMS), (producer, STREAMED)):
        with pytest.raises(LocalError, match="this request's id"):
            half.on_new_request(request_id, params)
        assert half.build_step().orders == ()


@pytest.mark.parametrize("character", "\r\n\0\x1b\u2028")
@pytest.mark.parametrize("name", ["remote_engine_id", "remote_request_id", "remote_host"])
def test_control_characters_of_a_client_reach_nobody(scheduler, name, character):
    """With them a server that takes lines of text could be made to obey, and lines of the log be forged."""
    wrong = PARAMS | {name: f"p{character}EHLO x{character}"}
    with pytest.raises(RemoteProtocolError, match="cannot be used") as refused:
        scheduler.on_new_request("w", wrong)
    assert character not in str(refused.value)
    assert not scheduler.build_step().orders


@pytest.mark.parametrize("listed", ["192.0.2.0/24", "[::1]:6", "localhost"])
def test_a_producer_that_is_not_listed_is_not_connected_to(listed):
    config = ConnectorConfig.from_mapping(
        {
            "engine_id": "d",
            "role": "consumer",
            "control": {"insecure": True, "allowed_producers": listed},
        }
    )
    with Scheduler(config, metadata_of()) as scheduler:
        with pytest.raises(ProducerNotAllowedError, match=r"host='::1', port=5"):
            scheduler.on_new_request("w", PARAMS)
        assert not scheduler.build_step().orders
        streamed = PARAMS | STREAMED | {"remote_block_ids": []}
        with pytest.raises(ProducerNotAllowedError):
            scheduler.on_new_request("w", streamed)
        assert scheduler.matched_tokens("w", 8, 0) == (0, False)


def test_a_listed_producer_is_connected_to():
    config = ConnectorConfig.from_mapping(
        {
            "engine_id": "d",
            "role": "consumer",
            "control": {"insecure": True, "allowed_producers": "::/64, [::1]:6"},
        }
    )
    with Scheduler(config, metadata_of()) as scheduler:
        scheduler.on_new_request("w", PARAMS)
        assert _orders(scheduler.build_step(), WantRequest)


def test_a_name_that_is_used_again_within_a_step_belongs_to_the_new_request(scheduler):
    """The old request's end comes before the new one's beginning, even if the workers have had no order for either."""
    scheduler.on_new_request("w", PARAMS)
    scheduler.build_step()
    scheduler.finish("w")
    _start(scheduler)
    kinds = [type(order) for order in scheduler.build_step().orders]
    assert kinds == [DropRequest, WantRequest, LoadRequest]
    scheduler.update(_done("w"))
    scheduler.finish("w")
    scheduler.on_new_request("w", PARAMS)
    scheduler.finish("w")
    _start(scheduler)
    kinds = [type(order) for order in scheduler.build_step().orders]
    assert kinds == [WantRequest, DropRequest, WantRequest, LoadRequest]


def test_steps_carry_the_engine_until_a_load_has_succeeded(scheduler):
    """A step may be lost on its way to a worker, which can do nothing without the engine."""
    assert scheduler.build_step().engine is not None
    assert scheduler.build_step().is_empty
    _start(scheduler)
    assert scheduler.build_step().engine is not None
    scheduler.update(WorkerOutput(finished_recving=frozenset("w"), failed_recving={"w": "lost"}))
    scheduler.finish("w")
    _start(scheduler)
    assert scheduler.build_step().engine is not None
    scheduler.update(_done("w"))
    scheduler.finish("w")
    _start(scheduler)
    assert scheduler.build_step().engine is None


def test_a_failed_request_and_a_burst_of_them_are_one_log_line(scheduler, caplog):
    lost = "PeerLostError: peer closed the connection [engine='p', rank='pp0tp0']; prefill anew"
    failed = {f"r{number}": lost for number in range(1000)}
    aborted = {"gone": "TransferAbortedError: the request was aborted"}
    late = {
        "late": "TransferTimeoutError: no chunk came [state='reading']; look for a stuck engine"
    }
    expired = {"held": "LeaseExpiredError: the lease ended"}
    scheduler.update(
        WorkerOutput(failed_recving={**failed, **aborted, **late}, failed_sending=expired)
    )
    assert [record.getMessage() for record in caplog.records] == [
        f"d: load of r0, r1, r2, r3, r4 and 995 more failed: {lost}",
        f"d: load of late failed: {late['late']}",
        "d: lease of held failed: LeaseExpiredError: the lease ended",
    ]
    for number in range(100):
        scheduler.update(WorkerOutput(failed_recving={f"s{number}": lost}))
    assert len(caplog.records) < 20


def test_retentions_fit_the_groups():
    for retentions, text in (
        ([KeepsAll(), KeepsWindow(4)], "one retention per cache group"),
        ([KeepsState()], "a block holds one state"),
        ([], "one retention per cache group"),
        (["window"], "a retention must be one of"),
    ):
        with pytest.raises(GeometryError, match=text):
            Scheduler(CONFIG, metadata_of(), retentions=retentions)


def test_ranks_share_the_tokens_of_full_attention_alone():
    shape = FakeEngine("d", attention_model(), tp_size=2, dcp_size=2)
    for retention in (KeepsWindow(4), KeepsChunk(4)):
        with pytest.raises(GeometryError, match="only in groups that keep all tokens") as refused:
            Scheduler(CONFIG, metadata_of(shape), retentions=[retention])
        assert refused.value.context["retention"] == retention
    assert _start(Scheduler(CONFIG, metadata_of(shape), retentions=[KeepsAll()])) == 7


def test_each_role_refuses_the_other_s_requests(scheduler, producer):
    with pytest.raises(LocalError, match="role consumer cannot offer"):
        scheduler.offer("w", blocks=[[1]], num_tokens=3)
    with pytest.raises(LocalError, match="role producer cannot load"):
        producer.on_new_request("w", PARAMS)
    producer.on_new_request("w", {"do_remote_decode": True})


@pytest.mark.parametrize("ending", ["finish", "abort", "withdraw", "grow"])
def test_followers_of_an_aborted_prompt_are_notified(producer, ending):
    producer.on_new_request("r", STREAMED)
    producer.grow("r", blocks=[[3]], num_tokens=3)
    # tokens that must be computed again never counted as valid
    arguments = {"blocks": [[3]], "num_tokens": 2} if ending == "grow" else {}
    for _ in range(2):
        getattr(producer, ending)("r", **arguments)
    producer.grow("r", blocks=[[3]], num_tokens=4)
    orders = _orders(producer.build_step(), GrowRequest | WithdrawRequest)
    assert orders[2:] == [WithdrawRequest("r")]


def test_a_step_without_new_tokens_reports_nothing(producer):
    producer.on_new_request("r", STREAMED)
    producer.grow("r", blocks=[[3]], num_tokens=3)
    producer.build_step()
    producer.grow("r", blocks=[[3]], num_tokens=3)
    assert producer.build_step().orders == ()


def test_with_stream_off_a_prompt_is_offered_when_it_is_done():
    config = structs.replace(CONFIG, role="producer", stream=False)
    with Scheduler(config, metadata_of(role="producer")) as producer:
        producer.on_new_request("r", STREAMED)
        producer.grow("r", blocks=[[3]], num_tokens=4)
        assert producer.build_step().orders == ()


def test_a_name_of_a_transfer_is_used_once_at_a_time(producer):
    producer.on_new_request("r", STREAMED)
    with pytest.raises(RemoteProtocolError, match="in use"):
        producer.on_new_request("s", STREAMED)
    producer.offer("r", blocks=[[3]], num_tokens=1)
    producer.finish("r")
    with pytest.raises(RemoteProtocolError, match="in use"):
        producer.on_new_request("s", STREAMED)
    producer.update(WorkerOutput(finished_sending=frozenset("r")))
    producer.on_new_request("s", STREAMED)


def test_a_request_that_is_not_over_is_not_streamed_anew(producer):
    """Workers have one lease per request: they would never end a second one, nor free its blocks."""
    other = {**STREAMED, "transfer_id": "u"}
    producer.on_new_request("r", STREAMED)
    for _ in ("computed", "held"):
        producer.build_step()
        with pytest.raises(LocalError, match="queued twice"):
            producer.on_new_request("r", other)
        assert producer.build_step().orders == ()
        if not producer.held:
            producer.grow("r", blocks=[[3]], num_tokens=1)
            producer.offer("r", blocks=[[3]], num_tokens=1)
    producer.update(WorkerOutput(finished_sending=frozenset("r")))
    producer.on_new_request("r", other)
    producer.finish("r")
    producer.on_new_request("r", STREAMED)


def test_a_mistake_in_a_load_opens_no_stream():
    config = structs.replace(CONFIG, role="both")
    with Scheduler(config, metadata_of(role="both")) as scheduler:
        with pytest.raises(RemoteProtocolError):
            scheduler.on_new_request("r", {**STREAMED, "do_remote_prefill": True})
        scheduler.on_new_request("r", STREAMED)


def test_a_scheduler_that_is_collected_stops_its_directory_service():
    scheduler = Scheduler(structs.replace(CONFIG, role="producer"), metadata_of(role="producer"))
    thread = scheduler._service._thread
    with pytest.warns(ResourceWarning, match="was not closed"):
        del scheduler
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


# full attention, a window of 10 tokens, chunks of 16 tokens, a state
RETENTIONS = (KeepsAll(), KeepsWindow(10), KeepsChunk(16), KeepsState())
STATE_GROUP = 3
NUM_PROMPT = 41
STOP = NUM_PROMPT - 1


def hybrid(retentions=RETENTIONS, role="consumer"):
    """Make a scheduler of an engine with one cache group of one layer per retention."""
    model = FakeModel(
        len(retentions),
        tuple(FakeGroup((layer,), (FakePart("k", 2, 8),)) for layer in range(len(retentions))),
    )
    sizes = tuple(1 if isinstance(each, KeepsState) else 4 for each in retentions)
    shape = FakeEngine("d", model, block_sizes=sizes, num_blocks=(64,) * len(retentions))
    config = structs.replace(CONFIG, role=role)
    return Scheduler(config, metadata_of(shape, role), retentions=retentions)


def _offer(state_position=STOP, num_tokens=NUM_PROMPT, window_blocks=3):
    window = list(range(5, 5 + window_blocks))
    return {
        **PARAMS,
        "remote_block_ids": [list(range(11)), window, list(range(11)), [9]],
        "remote_first_blocks": [0, 7, 0, state_position - 1],
        "remote_num_tokens": num_tokens,
    }


def _load(scheduler, engine_computed, computed_tokens=None, cache_block_tokens=(), **offer):
    """Return the load of a request whose window and chunk have no early blocks."""
    scheduler.on_new_request("w", _offer(**offer))
    count, _ = scheduler.matched_tokens("w", NUM_PROMPT, engine_computed)
    loaded = scheduler.load(
        "w",
        blocks=[list(range(20, 31)), [31, 32, 33, 34], [35, 36, 37], [38]],
        first_blocks=[0, 7, 8, 0],
        num_tokens=count,
        computed_tokens=computed_tokens,
        cache_block_tokens=cache_block_tokens,
    )
    loads = _orders(scheduler.build_step(), LoadRequest)
    assert loaded == (loads[0].token_ranges if loads else ())
    return loads[0] if loads else None


@pytest.mark.parametrize(
    "computed_tokens, ranges",
    [
        ((32, 0, 0, 0), ((32, 40), (31, 40), (32, 40), (39, 40))),
        # everything but the window is loaded, so nothing for the others
        ((40, 8, 40, 40), ((40, 40), (31, 40), (40, 40), (40, 40))),
    ],
)
def test_groups_that_found_a_different_number_of_tokens_load_what_each_lacks(
    computed_tokens, ranges
):
    assert _load(hybrid(), 8, computed_tokens).token_ranges == ranges


@pytest.mark.parametrize(
    "cache_block_tokens, num_blocks, first",
    # our blocks are cached; larger ones, of which the producer lacks the beginning; its blocks have another size
    [(4, 3, 28), (8, 3, 31), (4, 4, 31)],
)
def test_a_window_s_first_block_is_loaded_whole_if_the_producer_is_known_to_have_it(
    cache_block_tokens, num_blocks, first
):
    load = _load(hybrid(), 0, cache_block_tokens=[cache_block_tokens] * 4, window_blocks=num_blocks)
    assert load.token_ranges == ((0, 40), (first, 40), (32, 40), (39, 40))


@pytest.mark.parametrize("wrong", [[4] * 3, [4, 4, 0, 4], [4, 4, -4, 4], [4, 4, "4", 4], "4444"])
def test_a_prefix_cache_has_blocks_of_tokens_in_each_group(wrong):
    with pytest.raises(BlockIdError, match=r"prefix cache|cache_block_tokens must be an integer"):
        _load(hybrid(), 0, cache_block_tokens=wrong)


def test_block_lists_begin_where_the_engine_says_and_a_state_s_at_its_token():
    load = _load(hybrid(), 0)
    assert [blocks.first_block for blocks in load.local_blocks] == [0, 7, 8, 39]
    assert [blocks.first_block for blocks in load.remote_blocks] == [0, 7, 0, 39]
    assert load.local_blocks[STATE_GROUP].block_ids.tolist() == [38]


@pytest.mark.parametrize(
    "state_position, engine_computed, stop",
    # before the last token; earlier; after this prompt's end; no further than here
    [(40, 0, 40), (24, 8, 24), (41, 0, None), (24, 24, None)],
)
def test_a_request_goes_on_where_the_producer_s_state_is(state_position, engine_computed, stop):
    load = _load(hybrid(), engine_computed, state_position=state_position)
    assert (load and load.token_ranges[0]) == (stop and (engine_computed, stop))


def test_the_encoder_s_input_is_loaded_as_a_whole_and_offered_beside_fewer_tokens():
    retentions = (KeepsAll(), KeepsEncoder())
    scheduler = hybrid(retentions)
    blocks = [[3, 4], [5, 6, 7, 8, 9]]
    scheduler.on_new_request("w", {**PARAMS, "remote_block_ids": blocks, "remote_num_tokens": 7})
    assert scheduler.matched_tokens("w", 7, 0) == (6, True)
    scheduler.load("w", blocks=blocks, num_tokens=6, num_encoder_tokens=18)
    (load,) = _orders(scheduler.build_step(), LoadRequest)
    assert load.token_ranges == ((0, 6), (0, 18))
    with hybrid(retentions, role="producer") as producer:
        offer = producer.offer("r", blocks=blocks, num_tokens=7, num_encoder_tokens=18)
        (hold,) = _orders(producer.build_step(), HoldRequest)
    assert (offer["remote_num_tokens"], hold.num_tokens) == (7, 18)


def test_states_of_different_positions_are_not_loaded():
    scheduler = hybrid((KeepsState(), KeepsState()))
    offer = {**PARAMS, "remote_block_ids": [[1], [1]], "remote_first_blocks": [5, 6]}
    scheduler.on_new_request("w", offer)
    assert scheduler.matched_tokens("w", 8, 0) == (0, False)
