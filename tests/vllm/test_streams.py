"""A decode engine reads prompts while a prefill engine computes them, a part per step."""

from contextlib import closing, contextmanager
from cProfile import Profile
from functools import partial
from unittest.mock import patch

import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.request import RequestStatus

from kvconnector.errors import BlockIdError
from kvconnector.integrations.vllm.messages import WorkerReport
from kvconnector.session.orders import HoldRequest
from tests.vllm import scheduler_world as w
from tests.vllm import shared_tokens
from tests.vllm.cache_world import attention, one_group
from tests.vllm.shared_tokens import (
    NAMES,
    UNWRITTEN,
    Shape,
    SharedEngine,
    engines,
    prefilled,
    until,
)

pytestmark = pytest.mark.vllm

DECODE = w.REMOTE_DECODE | w.TRANSFER
CHUNKS = {"max_num_batched_tokens": 48}


DRAFTS = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
WINDOWED = [attention(), attention(SlidingWindowSpec, sliding_window=32)]


def holds(news):
    """Return a prefill engine's orders to its workers: tokens, blocks of each group, and True with the last one."""
    return [
        (
            hold.watermark.step_stop,
            *(len(blocks.block_ids) for blocks in hold.blocks),
            isinstance(hold, HoldRequest),
        )
        for hold in news.holds
    ]


IN_STEPS = [*[(0, 0, False), (48, 2, False), (96, 3, False), (100, 4, False)], (100, 4, True)]


@pytest.mark.parametrize(
    "num_tokens, expected, options",
    [
        (100, IN_STEPS, {}),
        (100, IN_STEPS, {"is_async": True}),
        # a draft model's layers come a step later
        (
            90,
            [(0, 0, False), (0, 1, False), (48, 2, False), (90, 3, True)],
            {"engine": {**CHUNKS, "speculative_config": DRAFTS}},
        ),
        # windows come when the prompt is done
        (
            91,
            [(0, 0, 0, False), (48, 2, 0, False), (90, 3, 0, False), (90, 3, 2, True)],
            {"specs": WINDOWED},
        ),
    ],
)
def test_each_step_orders_the_part_of_a_prompt_that_it_computes(
    world, num_tokens, expected, options
):
    engine = world(**{"role": "kv_producer", "engine": CHUNKS, **options})
    engine.add(num_tokens, dict(DECODE), max_tokens=1)
    orders, outputs = [], []
    while not (orders and orders[-1][-1]):
        news, finished = engine.step()
        orders += holds(news)
        outputs += finished
    assert orders == expected
    (params,) = [each.kv_transfer_params for each in outputs if each.finished]
    assert params["remote_request_id"].split("|")[:2] == ["t", w.SECRET]


def test_a_preempted_prompt_is_given_up(world):
    engine = world(role="kv_producer", engine=CHUNKS)
    engine.add(140, dict(DECODE), max_tokens=1)
    engine.step()
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    news, _ = engine.step()
    assert (news.withdrawn, holds(news)) == (["r1"], [])
    orders = [engine.step()[0] for _ in range(3)]
    # the workers know the request, and free the blocks at once
    assert [holds(news) for news in orders] == [[], [], [(140, 5, True)]]
    assert orders[-1].holds[0].transfer_id == "t"
    engine.step(finished_sending={"r1"})
    assert engine.used_blocks == 0


def test_blocks_that_cannot_be_ordered_end_one_stream_and_not_the_engine(world, caplog):
    engine = world(role="kv_producer", engine=CHUNKS)
    engine.add(140, dict(DECODE), max_tokens=1)
    scheduler = engine.connector._scheduler_half._scheduler
    with patch.object(scheduler, "grow", side_effect=BlockIdError("no such block")):
        assert engine.step()[0].withdrawn == ["r1"]
    assert "no such block" in caplog.text
    while not (finished := engine.step()[1]):
        pass
    assert finished[0].kv_transfer_params["remote_num_tokens"] == 140


def test_a_step_in_which_another_connector_loads_orders_nothing_of_a_prompt(world):
    """Workers take such a step's orders before its kernels: consumers would read what is not computed."""
    engine = world(role="kv_producer", engine=CHUNKS)
    engine.add(140, dict(DECODE), max_tokens=1)
    engine.step()
    build = engine.connector.build_connector_meta

    def beside_a_load(planned):
        planned.has_sync_kv_loads = True
        return build(planned)

    with patch.object(engine.connector, "build_connector_meta", beside_a_load):
        assert holds(engine.step()[0]) == []
    assert holds(engine.step()[0]) == [(140, 5, False)]


def test_layers_are_reported_alone_where_each_is_written_once_and_in_place(model, monkeypatch):
    """Not where batches are split in two, and not of a mirror, which gets a step's blocks at its end."""

    def registered():
        options = {"policy": "recompute"}
        with closing(SharedEngine(model, "kv_consumer", Shape(kv_heads=4), **options)) as engine:
            half = engine.ranks[0].connector._worker_half
            return set(half._layers), half._parts is not None

    assert registered() == (set(NAMES), True)

    def split_in_two(*arguments, **options):
        config = w.vllm_config(*arguments, **options)
        config.parallel_config.enable_dbo = True
        return config

    with monkeypatch.context() as patched:
        patched.setattr(shared_tokens, "vllm_config", split_in_two)
        assert registered() == (set(), True)

    def on_device(*arguments):
        config, caches = one_group(*arguments)
        return config, {name: cache.to("meta") for name, cache in caches.items()}

    monkeypatch.setattr(shared_tokens, "one_group", on_device)
    assert registered() == (set(), False)


def test_prompts_that_are_queued_cost_a_step_nothing(world):
    counts = []
    for num_queued in (0, 50):
        engine = world(role="kv_producer", engine={**CHUNKS, "max_num_seqs": 1})
        for number in range(1 + num_queued):
            engine.add(140, {**DECODE, "transfer_id": f"t{number}"}, max_tokens=1)
        engine.step()
        profile, build = Profile(), engine.connector.build_connector_meta
        profiled = partial(profile.runcall, build)
        with patch.object(engine.connector, "build_connector_meta", profiled):
            assert holds(engine.step()[0]) == [(96, 3, False)]
        counts.append(sum(each.callcount for each in profile.getstats()))
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    "names,stream", [({"transfer_secret": "no"}, True), ({"transfer_id": 5}, True), ({}, False)]
)
def test_a_prompt_is_offered_at_the_end_without_usable_names_or_streams(world, names, stream):
    engine = world(role="kv_producer", stream=stream)
    engine.add(40, {**DECODE, **names}, max_tokens=1)
    news, (output,) = engine.step()
    assert holds(news) == []
    assert output.kv_transfer_params["remote_request_id"].startswith("r1|")


@pytest.mark.parametrize("is_followed", [True, False])
def test_a_request_that_is_aborted_while_it_waits_leaves_nothing(world, is_followed):
    """The producer is notified even if no step has scheduled the request."""
    engine = world()
    request = engine.add(100, dict(w.FOLLOWED) if is_followed else w.offer(100))
    if is_followed:
        engine.step()
    engine.abort(request.request_id)
    news, _ = engine.step()
    assert [want.request_id for want in news.wants] == ["r1"] * (not is_followed)
    assert news.dropped == ["r1"]
    engine.step(kv_connector_worker_meta=WorkerReport({"r1"}))
    assert engine.scheduler.requests == {}


# -- both engines, and our workers between them --

LENGTH = 150


@contextmanager
def acquainted(model, prefill=None, decode=None, policy="fail", **options):
    """A prefill engine that computes 48 tokens per step, and a decode engine that knows it."""
    shape = Shape(step_tokens=48, kv_heads=4)
    with engines(model, prefill or shape, decode or shape, policy, **options) as both:
        producer, consumer = both
        _, params = prefilled(producer, 9, 40)
        request = consumer.world.add(40, params, max_tokens=1, prompt=9)
        until(request.is_finished, consumer, producer)
        yield producer, consumer, {key: params[key] for key in w.ADDRESS}


def begin(producer, consumer, address, number=1):
    names = {**w.TRANSFER, "transfer_id": f"t{number}"}
    ours = {**DECODE, **names}
    theirs = {"do_remote_prefill": True, **address, **names}
    prompt = producer.world.add(LENGTH, ours, max_tokens=1, prompt=number)
    return prompt, consumer.world.add(LENGTH, theirs, max_tokens=4, prompt=number)


def arrived(consumer, request):
    """Return the number of a request's leading tokens that are right in the decode engine's blocks."""
    if not consumer.world.scheduler.kv_cache_manager.get_block_ids(request.request_id)[0]:
        return 0
    right = set(range(LENGTH))
    for rank in consumer.ranks:
        prompt = list(request.all_token_ids)[:LENGTH]
        right &= rank.right_tokens(prompt, consumer.block_ids(request.request_id))
    return next((token for token in range(LENGTH) if token not in right), LENGTH)


def has_read(consumer, request):
    """Returns True once something was written to the first block of a request."""
    blocks = consumer.block_ids(request.request_id)
    return bool(blocks) and bool((consumer.ranks[0].layers[-1][blocks[0]] != UNWRITTEN).all())


def leave_nothing(*both):
    until(lambda: not any(engine.world.used_blocks for engine in both), *both)
    assert not any(engine.world.scheduler.requests for engine in both)


SHAPES = {
    "one to one": (Shape(step_tokens=48, kv_heads=4), Shape(kv_heads=4)),
    "two to one, other blocks": (
        Shape(step_tokens=48, kv_heads=4, tp_size=2),
        Shape(kv_heads=4, block_size=32),
    ),
}


@pytest.mark.ucx
@pytest.mark.parametrize("direct", ["auto", "never"])
@pytest.mark.parametrize("name", SHAPES)
def test_parts_arrive_before_the_prompt_is_computed(model, name, direct):
    with acquainted(model, *SHAPES[name], paths={"direct": direct}) as acquaintance:
        producer, consumer, address = acquaintance
        prompt, request = begin(producer, consumer, address)
        for computed in (48, 96, 144):
            producer.step()
            until(lambda: arrived(consumer, request) >= computed, consumer)  # noqa: B023
            assert prompt.num_computed_tokens == computed
            assert arrived(consumer, request) == computed
            assert request.num_output_tokens == 0
        until(lambda: request.num_output_tokens > 0, producer, consumer)
        assert arrived(consumer, request) == LENGTH
        until(request.is_finished, consumer, producer)
        # it computes nothing of the prompt: the first token is the producer's
        assert consumer.num_computed[request.request_id] == 3
        leave_nothing(producer, consumer)


@pytest.mark.ucx
def test_both_engines_know_the_beginning_of_a_prompt(model):
    with acquainted(model) as (producer, consumer, address):
        for engine, known in ((producer, 70), (consumer, 40)):
            request = engine.world.add(known, max_tokens=1, prompt=1)
            until(request.is_finished, engine)
        prompt, request = begin(producer, consumer, address)
        producer.step()
        assert prompt.num_computed_tokens == 64 + 48
        until(lambda: arrived(consumer, request) == 64 + 48, consumer)
        until(lambda: request.num_output_tokens > 0, producer, consumer)
        assert arrived(consumer, request) == LENGTH
        assert consumer.loads[-1].token_ranges == ((32, LENGTH),)


@pytest.mark.ucx
@pytest.mark.parametrize("stream", [(False, True), (True, False)])
def test_engines_that_do_not_stream_move_a_prompt_when_it_is_done(model, stream):
    """Here the prefill engine names the transfer, and the router passes its answer to the decode engine."""
    with (
        closing(
            SharedEngine(model, "kv_producer", Shape(step_tokens=48), stream=stream[0])
        ) as producer,
        closing(SharedEngine(model, "kv_consumer", Shape(), stream=stream[1])) as consumer,
    ):
        _, params = prefilled(producer, 9, 40)
        address = {key: params[key] for key in w.ADDRESS}
        ours = {**DECODE, **w.TRANSFER}
        prompt = producer.world.add(LENGTH, ours, max_tokens=1, prompt=1)
        theirs = {"do_remote_prefill": True, **address, **w.TRANSFER}
        if not stream[0]:
            outputs = []
            while not outputs:
                outputs = producer.step()
            theirs = outputs[0].kv_transfer_params
        request = consumer.world.add(LENGTH, theirs, max_tokens=4, prompt=1)
        for _ in range(0 if prompt.is_finished() else 3):
            producer.step()
            consumer.step()
            assert not consumer.loads
        until(lambda: request.num_output_tokens > 0, producer, consumer)
        assert arrived(consumer, request) == LENGTH


@pytest.mark.ucx
@pytest.mark.parametrize("policy,direct", [("fail", "auto"), ("recompute", "never")])
@pytest.mark.parametrize("end", ["abort", "preempt", "sleep", "close", "close before the token"])
def test_a_prefill_engine_gives_up_a_prompt(model, end, direct, policy):
    """The decode engine's request fails, or the engine computes it. An engine that slept offers the prompt, and the
    lease ends unread.
    """
    options = {"paths": {"direct": direct}, "lease": {"duration_s": 6}}
    with acquainted(model, policy=policy, **options) as acquaintance:
        producer, consumer, address = acquaintance
        prompt, request = begin(producer, consumer, address)
        # each part is requested once the previous one is in place
        for computed in (48, 96, 144, LENGTH)[: 4 if end == "close before the token" else 2]:
            producer.step()
            until(lambda: arrived(consumer, request) == computed, consumer)  # noqa: B023
        assert request.num_output_tokens == 0
        consumer.may_fail = True
        both = [consumer]
        if end == "abort":
            producer.world.abort(prompt.request_id)
        elif end == "preempt":
            producer.world.scheduler.reset_prefix_cache(reset_running_requests=True)
        elif end == "sleep":
            for rank in producer.ranks:
                rank.connector.unregister_kv_caches()
                rank.connector.restore_kv_caches()
        else:
            producer.close()
        if "close" not in end:
            both.append(producer)
        until(request.is_finished, *both)
        assert (request.status.name == "FINISHED_ERROR") == (policy == "fail")
        assert request.num_output_tokens == (0 if policy == "fail" else 4)
        leave_nothing(*both)


@pytest.mark.ucx
@pytest.mark.parametrize("is_lost", [False, True])
@pytest.mark.parametrize("direct", ["auto", "never"])
def test_blocks_that_are_filled_anew_do_not_count(model, direct, is_lost):
    """vLLM gives an aborted prompt's blocks to another request. Its workers take orders after that request's kernels,
    or the prefill engine is lost before.
    """
    with acquainted(model, policy="recompute", paths={"direct": direct}) as acquaintance:
        producer, consumer, address = acquaintance
        producer.world.scheduler.scheduler_reserve_full_isl = False
        producer.world.add(35 * 16, max_tokens=64)  # few blocks are left
        for _ in range(12):
            producer.step()
        prompt, request = begin(producer, consumer, address)
        producer.step()
        blocks = producer.block_ids(prompt.request_id)
        producer.world.abort(prompt.request_id)
        other = producer.world.add(47, max_tokens=1)
        take_orders = producer.ranks[0].after_forward

        def after_a_read():
            assert set(producer.block_ids(other.request_id)) & set(blocks)
            until(lambda: has_read(consumer, request), consumer)
            for _ in range(20):  # a read would end meanwhile
                if not request.num_output_tokens:
                    consumer.step()
            if is_lost:
                producer.close()
            else:
                take_orders()

        consumer.may_fail = True
        with patch.object(producer.ranks[0], "after_forward", after_a_read):
            planned = producer.begin_step()
        if not is_lost:
            producer.end_step(planned)
        until(lambda: request.num_output_tokens > 0, consumer, *[producer] * (not is_lost))
        assert arrived(consumer, request) == LENGTH


@pytest.mark.ucx
def test_a_decode_engine_gives_up_a_prompt(model):
    with acquainted(model) as (producer, consumer, address):
        prompt, request = begin(producer, consumer, address)
        producer.step()
        until(lambda: arrived(consumer, request) == 48, consumer)
        consumer.world.abort(request.request_id)
        consumer.may_fail = True
        until(prompt.is_finished, producer, consumer)
        leave_nothing(producer, consumer)
        consumer.may_fail = False
        prompt, request = begin(producer, consumer, address, 2)
        until(lambda: request.num_output_tokens > 0, producer, consumer)
        assert arrived(consumer, request) == LENGTH


@pytest.mark.ucx
def test_a_decode_engine_that_asks_late_reads_all_at_once(model):
    with acquainted(model) as (producer, consumer, address):
        prompt, request = begin(producer, consumer, address)
        until(prompt.is_finished, producer)
        until(lambda: request.num_output_tokens > 0, consumer, producer)
        assert arrived(consumer, request) == LENGTH


@pytest.mark.ucx
def test_a_request_for_a_missing_prefill_engine_ends(model):
    with acquainted(model, policy="recompute") as (producer, consumer, address):
        producer.close()
        theirs = {"do_remote_prefill": True, **address, **w.TRANSFER}
        consumer.may_fail = True
        request = consumer.world.add(LENGTH, theirs, max_tokens=4, prompt=1)
        until(request.is_finished, consumer)
        assert request.num_output_tokens == 4


def other_tokens(prompt):
    return [*prompt[:-1], prompt[-1] + 1]


WRONG = {
    "other tokens": ({}, {"tokens": other_tokens}, "tokens"),
    "a shorter prompt": (
        {},
        {"tokens": lambda prompt: prompt[:-9]},
        "a prompt of a different length",
    ),
    "another cache salt": ({"cache_salt": "a"}, {"cache_salt": "b"}, "cache salt"),
    "another adapter": (
        {"lora_request": LoRARequest("A", 1, "/nowhere")},
        {"lora_request": LoRARequest("B", 1, "/nowhere")},
        "adapter",
    ),
}


@pytest.mark.ucx
@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("name", WRONG)
def test_a_streamed_prompt_of_another_request_is_not_used(model, name, policy, caplog):
    """As if a router had given both engines the same name of a transfer, but two requests."""
    theirs, ours, differs = WRONG[name]
    change = ours.get("tokens", list)
    ours = {key: value for key, value in ours.items() if key != "tokens"}
    with acquainted(model, policy=policy) as (producer, consumer, address):
        consumer.may_fail = True
        prompt = producer.world.add_with(
            LENGTH, DECODE | w.TRANSFER, max_tokens=1, prompt=1, **theirs
        )
        tokens = list(prompt.prompt_token_ids)
        forms = {"prompt_token_ids": change(tokens)}
        named = {"do_remote_prefill": True, **address, **w.TRANSFER}
        request = consumer.world.add_with(0, named, max_tokens=4, forms=forms, **ours)
        until(request.is_finished, producer, consumer)
        assert "OtherPromptError" in caplog.text
        assert differs in caplog.text
        assert request.num_output_tokens == (0 if policy == "fail" else 4)
        if policy == "recompute":
            assert consumer.num_computed[request.request_id] == len(forms["prompt_token_ids"]) + 3
        leave_nothing(producer, consumer)


@pytest.mark.ucx
@pytest.mark.parametrize("num_steps", [2, 4])
def test_what_has_arrived_of_another_prompt_is_not_kept(model, num_steps):
    """Which prompt a stream was shows only at its end. Here its prefill engine is lost before."""
    with acquainted(model, policy="recompute") as (producer, consumer, address):
        consumer.may_fail = True
        producer.world.add(LENGTH, DECODE | w.TRANSFER, max_tokens=1, prompt=2)
        named = {"do_remote_prefill": True, **address, **w.TRANSFER}
        request = consumer.world.add(LENGTH, named, max_tokens=4, prompt=1)
        for _ in range(num_steps):
            producer.step()
            until(lambda: has_read(consumer, request), consumer)
        for _ in range(20):
            consumer.step()
        assert arrived(consumer, request) == 0
        producer.close()
        until(lambda: request.num_output_tokens > 0, consumer)
        assert arrived(consumer, request) == LENGTH
        assert consumer.num_computed[request.request_id] == LENGTH


def fail_once(engine):
    """Plan a step in whose forward pass every rank fails."""
    planned = engine.world.scheduler.schedule()
    for rank in engine.ranks:
        rank.before_forward(planned)
    engine.world.complete(planned)


@pytest.mark.ucx
def test_orders_of_a_step_that_failed_are_carried_out_later(model):
    """With its fault tolerance, vLLM aborts all requests then and goes on. No block stays with a transfer for ever."""
    with acquainted(model) as (producer, consumer, _):
        _, params = prefilled(producer, 1, 40)
        fail_once(producer)  # its ranks do not get the lease
        request = consumer.world.add(40, params, prompt=1)
        until(lambda: request.num_output_tokens > 0, consumer, producer)
        assert arrived(consumer, request) >= 40  # a first token may follow
        _, params = prefilled(producer, 2, 40)
        request = consumer.world.add(40, params, prompt=2)
        fail_once(consumer)  # nor the order to load
        consumer.world.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        consumer.may_fail = True
        leave_nothing(producer, consumer)
