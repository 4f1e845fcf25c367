"""Encoders' outputs move between engines, by vLLM's own scheduler and the calls of its runner."""

import itertools
import logging
import time
from contextlib import ExitStack, closing
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip(
    "vllm.distributed.ec_transfer.ec_connector.encoder_output_width",
    reason="vLLM 0.31 does not measure an encoder's outputs",
    exc_type=ImportError,
)

from kvconnector.errors import ConfigError
from kvconnector.integrations.vllm.encoder import EncoderConnector, scheduler
from kvconnector.integrations.vllm.encoder.options import EncoderOptions
from kvconnector.integrations.vllm.encoder.scheduler import Copy, EncoderStep
from tests.vllm import scheduler_world
from tests.vllm.encoder_world import Engine, encoded, feature, run, vllm_config
from tests.vllm.harness.encoder import HIDDEN, IMAGE_TOKENS, make_image_model
from tests.vllm.test_client_params import junk, values

pytestmark = [pytest.mark.vllm, pytest.mark.ucx]


@pytest.fixture(scope="module")
def image_model(tmp_path_factory):
    return make_image_model(tmp_path_factory.mktemp("models") / "images")


@pytest.fixture
def engine(image_model):
    """Makes engines."""
    with ExitStack() as stack:

        def make(role, width=HIDDEN, **extra):
            made = Engine(image_model, f"ec_{role}", role, width, **extra)
            return stack.enter_context(closing(made))

        yield make


def offered(producer, *features):
    """Have a producer encode images. Returns its parameters."""
    request = producer.add(*features)
    run([producer], lambda: request in producer.params)
    return producer.params[request]


@pytest.mark.parametrize(
    "embeddings, width", [(32, HIDDEN), (7, 3 * HIDDEN // 2), (1, HIDDEN), (100, 4 * HIDDEN)]
)
def test_an_output_is_encoded_once_and_loaded_elsewhere(engine, embeddings, width):
    """Also one that is wider than the model, as DeepStack's, and no whole number of rows."""
    producer, consumer = engine("producer", width), engine("consumer", width)
    params = offered(producer, feature("a", embeddings))
    assert producer.encodes == ["a"]
    request = consumer.add(feature("a", embeddings, has_media=False), params=params)
    run([consumer], lambda: "a" in consumer.cache)
    assert torch.equal(consumer.cache["a"], encoded("a", embeddings, width))
    run([producer, consumer], lambda: request in consumer.params and not producer.half._offers)
    assert consumer.encodes == consumer.errors == []


def test_a_prompt_of_several_images_waits_for_all(engine):
    producer, consumer = engine("producer"), engine("consumer")
    features = [feature(name, 32, offset=32 * number) for number, name in enumerate("abc")]
    params = offered(producer, *features)
    request = consumer.add(*features, params=params)
    run([consumer], lambda: request in consumer.params)
    assert consumer.encodes == []
    for name in "abc":
        assert torch.equal(consumer.cache[name], encoded(name, 32, HIDDEN))


def test_what_two_requests_share_is_fetched_once(engine):
    """The second one's offer is declined, so that the producer does not keep it until its lease ends."""
    producer, consumer = engine("producer"), engine("consumer")
    asked = [offered(producer, feature("a")) for _ in range(2)]
    assert producer.encodes == ["a"]
    assert asked[0]["a"]["remote_request_id"] != asked[1]["a"]["remote_request_id"]
    requests = [consumer.add(feature("a"), params=params) for params in asked]
    run([producer, consumer], lambda: all(each in consumer.params for each in requests))
    run([producer, consumer], lambda: not producer.half._offers)
    assert consumer.encodes == consumer.errors == []


def test_a_request_that_is_aborted_in_the_queue_declines_its_offers(engine):
    producer, consumer = engine("producer"), engine("consumer")
    params = offered(producer, feature("a"))
    consumer.abort(consumer.add(feature("a"), params=params))
    run([producer, consumer], lambda: not producer.half._offers)


def test_a_request_that_is_aborted_during_the_fetch_leaves_nothing(engine):
    producer, consumer = engine("producer"), engine("consumer")
    params = offered(producer, feature("a"))
    request = consumer.add(feature("a"), params=params)
    consumer.step()
    assert consumer.half._fetches
    consumer.abort(request)
    other = consumer.add(feature("b"))
    run([producer, consumer], lambda: other in consumer.params and not consumer.half._fetches)
    # what came is kept for others
    assert consumer.half._outputs.get("a").is_ready
    run([producer, consumer], lambda: not producer.half._offers)


@pytest.mark.parametrize("has_media", [True, False])
@pytest.mark.parametrize(
    "loss",
    [
        "its lease ended",
        "another output's",
        "another output's by a second name",
        "a different length",
        "another width",
        "another width in the name too",
    ],
)
def test_an_output_that_cannot_be_had_is_encoded_or_fails_its_request(
    engine, has_media, loss, caplog
):
    extra = {"lease": {"duration_s": 6.0}, "peer": {"heartbeat_interval_s": 0.5}}
    producer, consumer = engine("producer", **extra), engine("consumer", **extra)
    params = offered(producer, feature("a"))
    if loss == "another output's":
        params = {"a": offered(producer, feature("b"))["b"]}
    elif loss == "another output's by a second name":
        name, secret, *_ = offered(producer, feature("b"))["b"]["remote_request_id"].split("|")
        params["a"] |= {"transfer_id": name, "transfer_secret": secret, "remote_block_ids": []}
    elif loss == "a different length":
        params["a"]["shape"] = [31, HIDDEN]
    elif loss.startswith("another width"):
        params["a"]["shape"] = [32, HIDDEN // 2]
        if "name" in loss:
            name = params["a"]["remote_request_id"]
            params["a"]["remote_request_id"] = name.replace(f"x{HIDDEN}", f"x{HIDDEN // 2}")
    else:
        run([producer], lambda: not producer.half._offers)
    request = consumer.add(feature("a", has_media=has_media), params=params)
    with caplog.at_level(logging.WARNING):
        run([producer, consumer], lambda: request in consumer.params)
    assert (consumer.encodes, consumer.errors) == ((["a"], []) if has_media else ([], [request]))
    assert f"request {request}" in caplog.text
    assert consumer.half._outputs.get("a") is None  # its room is free, and others may fetch it


@pytest.mark.parametrize(
    "reason",
    ["no room in time", "larger than the pool", "a different length", "no image of the prompt"],
)
def test_an_offer_that_is_not_asked_for_is_declined(engine, reason):
    """Whatever kept it from being read: its producer does not hold the output until the lease ends."""
    producer = engine("producer")
    block_bytes = 16 * HIDDEN * 4
    sizes = {"no room in time": 2 * block_bytes, "larger than the pool": block_bytes}
    consumer = engine("consumer", ec_cpu_bytes=sizes.get(reason, 1 << 20), wait_s=0.2)
    images = [feature("a")]
    params = offered(producer, *images)
    if reason == "no room in time":
        assert consumer.half._outputs.add("another", 2, (32, HIDDEN))
    elif reason == "a different length":
        params["a"]["shape"] = [31, HIDDEN]
    elif reason == "no image of the prompt":
        images = [feature("b")]
    request = consumer.add(*images, params=params)
    run([producer, consumer], lambda: request in consumer.params)
    run([producer, consumer], lambda: not producer.half._offers)
    assert (consumer.encodes, consumer.errors) == ([images[0].identifier], [])


def test_a_request_declines_no_more_offers_than_its_prompt_may_have(engine, monkeypatch):
    """A client may name any number; the others end with their leases."""
    monkeypatch.setattr(scheduler, "MAX_DECLINED", 2)
    producer, consumer = engine("producer"), engine("consumer")
    params = {}
    for name in "abcd":
        params |= offered(producer, feature(name))
    request = consumer.add(feature("e"), params=params)
    run([producer, consumer], lambda: request in consumer.params)
    run([producer, consumer], lambda: len(producer.half._offers) <= 2)
    for _ in range(20):
        producer.step()
        consumer.step()
    assert len(producer.half._offers) == 2


def test_a_sibling_that_leaves_takes_no_offer_from_the_one_that_reads_it(engine):
    """Several completions of one prompt come with one offer."""
    producer, consumer = engine("producer"), engine("consumer")
    params = offered(producer, feature("a"))
    first, second = (consumer.add(feature("a", has_media=False), params=params) for _ in range(2))
    consumer.step()
    assert consumer.half._fetches
    consumer.abort(second)
    run([producer, consumer], lambda: first in consumer.params)
    assert consumer.errors == []
    run([producer, consumer], lambda: not producer.half._offers)


def test_an_output_gives_its_room_once_all_of_its_tokens_are_computed(engine):
    """Also if that takes several steps, and its request then generates for long."""
    producer = engine("producer")
    consumer = engine("consumer", ec_cpu_bytes=2 * 16 * HIDDEN * 4)
    params = offered(producer, feature("a"))
    consumer.scheduler.max_num_scheduled_tokens = 16
    request = consumer.add(feature("a"), params=params, max_tokens=900)
    asked = consumer.scheduler.requests[request]
    run([producer, consumer], lambda: asked.num_output_tokens > 1)
    assert consumer.half._outputs.add("b", 2, (32, HIDDEN))


@pytest.mark.parametrize("has_media", [True, False])
def test_a_request_does_not_wait_for_an_output_that_has_left(engine, has_media):
    """It is computed again after its output has made room for another one."""
    producer = engine("producer")
    consumer = engine("consumer", ec_cpu_bytes=2 * 16 * HIDDEN * 4)
    params = offered(producer, feature("a"))
    consumer.scheduler.max_num_scheduled_tokens = 32
    request = consumer.add(feature("a", has_media=has_media), params=params, tokens=900)
    asked = consumer.scheduler.requests[request]
    run([producer, consumer], lambda: asked.num_computed_tokens > 64)
    assert consumer.half._outputs.add("b", 2, (32, HIDDEN))
    assert consumer.scheduler.reset_prefix_cache(reset_running_requests=True)
    consumer.scheduler.reset_encoder_cache()
    consumer.cache.clear()
    run([producer, consumer], lambda: request in consumer.params)
    assert (consumer.encodes, consumer.errors) == ((["a"], []) if has_media else ([], [request]))


def test_the_log_says_once_that_an_output_is_encoded_after_all(engine, caplog):
    """Each step of its prompt asks again whether the output is there."""
    producer, consumer = engine("producer"), engine("consumer")
    params = offered(producer, feature("a"))
    params["a"]["shape"] = [31, HIDDEN]
    consumer.scheduler.max_num_scheduled_tokens = 8
    request = consumer.add(feature("a"), params=params)
    run([producer, consumer], lambda: request in consumer.params)
    assert (consumer.encodes, consumer.errors) == (["a"], [])
    assert caplog.text.count(f"request {request}:") == 1


def test_a_request_that_is_computed_again_waits_as_long_as_the_first_time(engine, monkeypatch):
    """Another request had fetched its output, which has left since: now it fetches that by its own offer."""
    producer = engine("producer")
    consumer = engine("consumer", ec_cpu_bytes=2 * 16 * HIDDEN * 4, wait_s=20.0)
    asked = [offered(producer, feature("a")) for _ in range(2)]
    consumer.add(feature("a"), params=asked[0])
    consumer.scheduler.max_num_scheduled_tokens = 64
    # at another place: otherwise it would find these tokens in the prefix cache
    second = consumer.add(feature("a", offset=16, has_media=False), params=asked[1], tokens=900)
    computed = consumer.scheduler.requests[second]
    run([producer, consumer], lambda: computed.num_computed_tokens > 64)
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 20.0)
    monkeypatch.setattr(scheduler, "time", clock)
    assert consumer.half._outputs.add("b", 2, (32, HIDDEN))
    consumer.half._outputs.drop("b")
    assert consumer.scheduler.reset_prefix_cache(reset_running_requests=True)
    consumer.scheduler.reset_encoder_cache()
    consumer.cache.clear()
    run([producer, consumer], lambda: second in consumer.params)
    assert (consumer.encodes, consumer.errors) == ([], [])


def test_an_output_that_is_never_encoded_is_fetched_for_those_who_wait(engine):
    """The request that would have encoded it is aborted, and the other one has no media."""
    producer, both = engine("producer"), engine("both")
    params = offered(producer, feature("a"))
    first = both.add(feature("a"), max_tokens=50)
    both.step(encodes=False)
    # at another place: otherwise it would find these tokens in the prefix cache
    second = both.add(feature("a", offset=16, has_media=False), params=params)
    both.step(encodes=False)
    assert second in both.half._outputs.get("a").uses
    both.abort(first)
    run([producer, both], lambda: second in both.params)
    assert (both.encodes, both.errors) == ([], [])


@pytest.mark.parametrize(
    "found",
    [
        None,
        5,
        "a",
        [],
        {"remote_request_id": 5},
        {"remote_request_id": "x", "shape": [32, HIDDEN]},
        {"remote_request_id": "x", "shape": "ab"},
        {"remote_request_id": "x", "shape": [32, 0]},
        {"remote_request_id": "x", "shape": [32, 1 << 40]},
        {"remote_request_id": "x", "shape": [True, True]},
        {"shape": [32, HIDDEN]},
    ],
)
def test_whatever_a_client_writes_the_engine_goes_on(engine, found):
    consumer = engine("consumer")
    for params in (found, {"a": found}):
        request = consumer.add(feature("a"), params=params)
        run([consumer], lambda request=request: request in consumer.params)
    assert consumer.errors == []
    assert consumer.encodes


KEYS = [
    *("remote_engine_id", "remote_request_id", "remote_block_ids", "remote_host", "remote_port"),
    *("remote_num_tokens", "do_remote_prefill", "do_remote_decode", "tp_size", "pp_size", "shape"),
    *("transfer_id", "transfer_secret", "remote_first_blocks", "metadata", "item_indices"),
]


@pytest.mark.parametrize("role", ["consumer", "both"])
def test_of_a_changed_offer_an_output_comes_whole_or_not_at_all(engine, role):
    """Whatever changes it on the way: its request is computed, and no other one notices."""
    producer, reader = engine("producer"), engine(role, wait_s=0.2)
    numbers = itertools.count()

    @given(
        left_out=st.lists(st.sampled_from(KEYS), max_size=2),
        changed=st.dictionaries(st.sampled_from(KEYS), values, max_size=2),
        others=st.dictionaries(st.text(max_size=3), junk, max_size=2),
    )
    def check(left_out, changed, others):
        name = f"image {next(numbers)}"
        offer = offered(producer, feature(name))[name]
        offer = {key: offer[key] for key in offer.keys() - left_out} | changed
        requests = [
            reader.add(feature(name), params={**others, name: offer}),
            reader.add(feature(f"another {name}")),
        ]
        run([producer, reader], lambda: reader.params.keys() >= {*requests})
        assert reader.errors == []
        assert torch.equal(reader.cache[name], encoded(name, 32, HIDDEN))
        assert reader.half._wanted == {}

    check()
    run([producer, reader], lambda: not reader.half._fetches)


def test_an_offer_s_name_says_whose_it_is_but_not_how_large(engine):
    """A size that the pool cannot hold, under the right name."""
    producer, consumer = engine("producer"), engine("consumer")
    params = offered(producer, feature("a"))
    params["a"]["shape"] = [32, 1 << 40]
    request = consumer.add(feature("a"), params=params)
    run([producer, consumer], lambda: request in consumer.params)
    assert consumer.encodes == ["a"]


def test_requests_wait_for_room_and_then_go_on(engine):
    """A consumer's pool has room for two images; four requests need one each."""
    producer = engine("producer")
    consumer = engine("consumer", ec_cpu_bytes=4 * 16 * HIDDEN * 4)
    names = "abcd"
    params = [offered(producer, feature(name)) for name in names]
    requests = [
        consumer.add(feature(name), params=each) for name, each in zip(names, params, strict=True)
    ]
    run([producer, consumer], lambda: all(each in consumer.params for each in requests))
    assert consumer.encodes == consumer.errors == []


def test_a_request_that_left_gives_its_room_to_one_that_waits(engine):
    """Also if no step in between reaches vLLM's workers, since none computes a token."""
    producer = engine("producer")
    consumer = engine("consumer", ec_cpu_bytes=2 * 16 * HIDDEN * 4)
    params = [offered(producer, feature(name)) for name in "ab"]
    first = consumer.add(feature("a"), params=params[0])
    consumer.step()
    second = consumer.add(feature("b"), params=params[1])
    consumer.abort(first)
    run([producer, consumer], lambda: second in consumer.params)
    assert consumer.encodes == consumer.errors == []


def test_of_a_kind_that_vllm_has_not_measured_nothing_is_offered(engine, caplog):
    producer = engine("producer")
    audio = feature("a")
    audio.modality = "audio"
    params = offered(producer, audio)
    assert "remote_request_id" not in params["a"]
    assert "no output of audio is offered" in caplog.text


def test_an_output_of_another_shape_is_not_offered(engine, caplog):
    producer = engine("producer")
    producer.half._vllm_config.ec_transfer_config.mm_encoder_output_widths["image"] = HIDDEN + 1
    params = offered(producer, feature("a"))
    assert "remote_request_id" not in params["a"]
    assert "the output a is not offered" in caplog.text
    logged = len(caplog.records)
    pool = producer.half._shape
    step = EncoderStep(9, producer.half._memory.path, pool, {"a": Copy(9, [0], (32, HIDDEN + 1))})
    for _ in range(50):  # as many steps as a request may take here
        producer._worker._copies.save(step, "a", encoded("a", 32, HIDDEN))
    assert len(caplog.records) == logged


def test_an_output_that_is_never_encoded_leaves_its_room(engine):
    """Its request is aborted when the order to save it is already on the way."""
    producer = engine("producer")
    room = len(producer.half._outputs._free)
    request = producer.add(feature("a"))
    producer.step(encodes=False)
    assert len(producer.half._outputs._free) < room
    producer.abort(request)
    for name in "bc":
        offered(producer, feature(name))
    assert producer.half._outputs.get("a") is None
    assert "a" not in producer.half._saves


def test_a_full_producer_offers_what_it_has_and_leaves_media_to_the_others(engine):
    producer = engine("producer", ec_cpu_bytes=2 * 16 * HIDDEN * 4)
    first = offered(producer, feature("a"))
    second = offered(producer, feature("b"))
    assert "remote_request_id" in first["a"]
    assert second["b"]["metadata"] == {}
    assert "remote_request_id" not in second["b"]


def test_offers_that_nobody_reads_do_not_fill_the_pool(engine):
    """Room for four images: the offers of two are kept."""
    producer = engine(
        "producer", ec_cpu_bytes=8 * 16 * HIDDEN * 4, peer={"heartbeat_interval_s": 0.05}
    )
    for name in "abcdefgh":
        params = {}
        while "remote_request_id" not in params:
            params = offered(producer, feature(name))[name]
    assert len(producer.half._offers) <= 4


def test_an_engine_that_prefills_fetches_outputs_and_offers_the_cache(engine):
    """With both connectors in one engine, an answer has the parameters of both."""
    encoder, prefill = engine("producer"), engine("consumer", kv_role="kv_producer")
    params = offered(encoder, feature("a"))
    kv_params = {"do_remote_decode": True}
    request = prefill.add(feature("a", has_media=False), params=params, kv_params=kv_params)
    run([encoder, prefill], lambda: request in prefill.kv_params and not encoder.half._offers)
    assert torch.equal(prefill.cache["a"], encoded("a", IMAGE_TOKENS, HIDDEN))
    assert prefill.kv_params[request]["remote_block_ids"]
    assert request in prefill.scheduler.requests
    prefill.step(finished_sending={request})
    assert not prefill.scheduler.requests


@pytest.mark.parametrize("is_lost", [False, True])
def test_an_engine_that_decodes_fetches_outputs_only_for_what_it_computes(engine, is_lost):
    encoder, decode = engine("producer"), engine("consumer", kv_role="kv_consumer")
    params = offered(encoder, feature("a"))
    image = feature("a", has_media=False)
    request = decode.add(image, params=params, kv_params=scheduler_world.offer(IMAGE_TOKENS + 5))
    decode.step()
    assert decode.scheduler.requests[request].status.name == "WAITING_FOR_REMOTE_KVS"
    ended = {"finished_recving": {request}}
    decode.step(**ended, **({"failed_recving": {request}} if is_lost else {}))
    run([encoder, decode], lambda: request in decode.params and not encoder.half._offers)
    assert ("a" in decode.cache) == is_lost
    assert decode.encodes == decode.errors == []


def test_an_engine_of_both_roles_loads_its_own(engine):
    both = engine("both")
    offered(both, feature("a"))
    both.cache.clear()
    both.scheduler.reset_encoder_cache()
    request = both.add(feature("a"))
    run([both], lambda: request in both.params)
    assert both.encodes == ["a"]


def test_an_engine_of_both_roles_fetches_what_another_has(engine):
    producer, both = engine("producer"), engine("both")
    params = offered(producer, feature("a"))
    request = both.add(feature("a"), params=params)
    run([producer, both], lambda: request in both.params)
    assert both.encodes == both.errors == []
    assert torch.equal(both.cache["a"], encoded("a", 32, HIDDEN))
    assert "remote_request_id" in both.params[request]["a"]  # it is offered on


def test_settings_are_the_encoder_connectors_own(image_model):
    config = vllm_config(image_model, "ec_producer", wait_s="5", peer={"timeout_s": 20.0})
    environ = {"KVCONNECTOR_CONTROL_PORT": "7", "KVCONNECTOR_PEER_IDLE_TIMEOUT_S": "50"}
    options = EncoderOptions.of(config, {**environ, "VLLM_EC_SIDE_CHANNEL_PORT": "12345"})
    assert options.wait_s == 5.0
    assert options.config.role == "producer"
    assert options.config.control.port == 12345
    assert options.config.peer.timeout_s == 20.0
    assert options.config.peer.idle_timeout_s == 50.0
    assert options.config.lease.duration_s == 120.0
    assert options.config.lease.reclaim_above == 0.5
    for extra, word in (
        ({"ec_cpu_byts": 5}, "ec_cpu_byts"),
        ({"ec_cpu_bytes": "many"}, "ec_connector_extra_config.ec_cpu_bytes"),
        ({"ec_cpu_bytes": 0}, "ec_connector_extra_config.ec_cpu_bytes"),
    ):
        with pytest.raises(ConfigError, match=word):
            EncoderOptions.of(vllm_config(image_model, "ec_producer", **extra), {})


def test_a_pool_that_holds_nothing_is_refused(image_model):
    from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole

    config = vllm_config(image_model, "ec_producer", ec_cpu_bytes=100)
    with pytest.raises(ConfigError, match="ec_cpu_bytes"):
        EncoderConnector(config, ECConnectorRole.SCHEDULER)
