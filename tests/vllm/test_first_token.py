"""The prefill engine's token is the decode engine's first one: vLLM's schedulers on both sides.

It comes with the offer, or for a streamed prompt with the end of its load.
"""

import logging
from functools import partial
from unittest.mock import MagicMock

import msgspec
import pytest
from vllm.lora.request import LoRARequest
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.request import RequestStatus

from kvconnector.errors import ConfigError
from kvconnector.integrations.identity import PromptEnd
from kvconnector.integrations.vllm import first_token, outputs
from kvconnector.integrations.vllm.answers import failure_params
from kvconnector.integrations.vllm.messages import WorkerReport
from kvconnector.integrations.vllm.params import CONTEXT, FIRST_TOKEN, TOKENS_DIGEST
from kvconnector.session.orders import HoldRequest
from tests.vllm import scheduler_world as w
from tests.vllm.cache_world import SIZE, attention

pytestmark = pytest.mark.vllm

TOKEN = 41
BOTH_WAYS = pytest.mark.parametrize("is_streamed", [False, True])
WINDOWED = attention(SlidingWindowSpec, sliding_window=48)


@pytest.fixture(autouse=True)
def vllm_is_left_as_it_was(monkeypatch):
    monkeypatch.setattr(Scheduler, "update_from_output", Scheduler.update_from_output)


def sampled(world, num_tokens, sampling=None, **options):
    """Return a prefill engine's offer of a prompt, with `TOKEN` in place of a token that it sampled and sends."""
    producer = world(role="kv_producer", **options)
    asked = {"max_tokens": 1, **(sampling or {})}
    producer.add(num_tokens, dict(w.REMOTE_DECODE), prompt=1, **asked)
    while not (outputs := producer.step()[1])[0].finished:
        pass
    params = outputs[0].kv_transfer_params
    if FIRST_TOKEN in params:
        params[FIRST_TOKEN][0] = TOKEN
    return params


def reported(world, num_tokens, sampling=None, **options):
    """Return the extra bytes that a prefill engine's workers send with the end of a streamed prompt."""
    producer = world(role="kv_producer", **options)
    asked = {"max_tokens": 1, **(sampling or {})}
    producer.add(num_tokens, w.REMOTE_DECODE | w.TRANSFER, prompt=1, **asked)
    orders = [each for _ in range(3) for each in producer.step()[0].holds]
    (hold,) = [each for each in orders if isinstance(each, HoldRequest)]
    return hold.extra


def of_token(extra, **changes):
    _, digest, num_tokens, identity, *_ = msgspec.msgpack.decode(extra)
    named = {"token": TOKEN, "digest": digest, "num_tokens": num_tokens, **changes}
    return msgspec.msgpack.encode([*named.values(), identity])


def followed(engine, num_tokens=100, **sampling):
    """Let a request for a streamed prompt begin to load. Returns it and that step's orders and outputs."""
    request = engine.add(num_tokens, dict(w.FOLLOWED), prompt=1, **sampling)
    engine.step()
    engine.step(kv_connector_worker_meta=WorkerReport({request.request_id}))
    return request, *engine.step()


class Seeded:
    """A request that waits for its load, whose producer sampled `TOKEN`. `news`: the workers' orders."""

    def __init__(self, world, engine, sampling=None, num_tokens=100, *, is_streamed=False):
        sampling = sampling or {}
        of_router = {"max_tokens": 1} | ({"min_tokens": 1} if "min_tokens" in sampling else {})
        asked = world, num_tokens, sampling | of_router
        self.engine, self.extra = engine, None
        if is_streamed:
            self.extra = of_token(reported(*asked))
            self.request, self.news, _ = followed(engine, num_tokens, **sampling)
            return
        self.request = engine.add(num_tokens, sampled(*asked), prompt=1, **sampling)
        self.news, outputs = engine.step()
        assert outputs == []

    def end(self, **report):
        """End the load as the workers report it. Returns the requests' outputs."""
        if self.extra is not None:
            said = report.setdefault("kv_connector_worker_meta", WorkerReport())
            said.extras["r1"] = self.extra
        return self.engine.step(finished_recving={"r1"}, **report)[1]

    def check_computed(self, num_tokens):
        """Check that the engine computes `num_tokens` tokens of the prompt, and samples the first token itself."""
        planned = self.engine.scheduler.schedule()
        assert planned.num_scheduled_tokens == {"r1": num_tokens}
        assert self.engine.connector._scheduler._scheduler.num_loading == 0
        assert [output.new_token_ids for output in self.engine.complete(planned)] == [[7]]
        assert self.request.num_prompt_tokens == 100


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("way", ["offered", "beside another", "streamed", "streamed to several"])
def test_the_token_is_emitted_when_the_load_has_ended_and_is_all_that_is_computed(
    world, is_async, way
):
    engine = world(is_async=is_async, beside="KeepingConnector" if way == "beside another" else "")
    load = Seeded(world, engine, is_streamed="streamed" in way)
    prompt = list(load.request.prompt_token_ids)
    assert [each.token_ranges for each in load.news.loads] == [((0, 100),)]
    if way == "streamed to several":  # one worker is done before the others
        report = WorkerReport(extras={"r1": load.extra})
        assert engine.step(kv_connector_worker_meta=report)[1] == []
        load.extra = None
    (first,) = load.end()
    assert (first.new_token_ids, first.finished) == ([TOKEN], False)
    assert first.prefill_stats.num_computed_tokens == 0
    assert first.prefill_stats.num_external_cached_tokens == 100
    assert [event.type.name for event in first.events] == ["QUEUED", "SCHEDULED"]
    planned = engine.scheduler.schedule()
    (new,) = planned.scheduled_new_reqs
    assert planned.num_scheduled_tokens == {"r1": 1}
    assert (new.prompt_token_ids, new.num_computed_tokens) == ([*prompt, TOKEN], 100)
    outputs = [first, *engine.complete(planned)]
    while not outputs[-1].finished:
        outputs += engine.step()[1]
    assert [output.new_token_ids for output in outputs] == [[TOKEN], [7], [7], [7]]
    assert str(outputs[-1].finish_reason) == "length"
    assert outputs[1].prefill_stats is None


@BOTH_WAYS
@pytest.mark.parametrize(
    "sampling, reason",
    [
        ({"max_tokens": 1}, "length"),
        ({"stop_token_ids": [TOKEN]}, "stop"),
        ({"stop_token_ids": [5], "max_tokens": 924}, None),
        ({"max_tokens": 1, "min_tokens": 1}, "length"),
        ({"min_tokens": 3, "stop_token_ids": [7]}, None),
    ],
)
def test_the_first_token_may_end_the_request(world, sampling, reason, is_streamed):
    engine = world()
    load = Seeded(world, engine, sampling, is_streamed=is_streamed)
    (output,) = load.end()
    assert output.new_token_ids == [TOKEN]
    assert str(output.finish_reason) == str(reason)
    if reason is None:
        assert load.request.sampling_params.min_tokens == max(0, sampling.get("min_tokens", 0) - 1)
        return
    assert output.stop_reason == (TOKEN if reason == "stop" else None)
    _, outputs = engine.step()
    assert (outputs, engine.used_blocks, engine.scheduler.requests) == ([], 0, {})
    assert repr(engine.connector._scheduler.first_tokens) == "<FirstTokens [], 0 loaded>"


def test_a_request_that_its_first_token_ends_is_not_offered(world):
    """A decode engine that keeps conversations would hold its blocks for a reader that never learns of them."""
    engine = world(role="kv_both", bidirectional_kv_xfer=True)
    (output,) = Seeded(world, engine, {"max_tokens": 1}).end()
    assert (str(output.finish_reason), output.kv_transfer_params) == ("length", None)
    engine.step()
    assert (engine.used_blocks, engine.scheduler.requests) == (0, {})


@pytest.mark.parametrize(
    "change", [{"num_computed_tokens": 99}, {"status": RequestStatus.PREEMPTED}]
)
def test_a_request_that_is_not_just_loaded_whole_emits_nothing(world, change):
    load = Seeded(world, world())
    first_tokens = load.engine.connector._scheduler.first_tokens
    first_tokens.loaded({"r1"})
    for name, value in change.items():
        setattr(load.request, name, value)
    outputs = {}
    first_tokens.emit(load.engine.scheduler, outputs)
    assert (outputs, load.request.num_prompt_tokens) == ({}, 100)


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"watermark_config": object()}, "watermarks"),
        ({"model_config.return_sampling_mask": True}, "sampling masks"),
        ({"model_config.logits_processors": ["mine"]}, "custom logits processors"),
    ],
)
def test_engines_that_add_to_sampled_tokens_compute_them(model, monkeypatch, change, reason):
    config = w.vllm_config(model)
    assert first_token.engine_obstacle(config) == ""
    for name, value in change.items():
        owner, _, attribute = name.rpartition(".")
        object.__setattr__(getattr(config, owner) if owner else config, attribute, value)
    assert first_token.engine_obstacle(config) == reason


def test_a_prompt_as_long_as_the_model_allows_ends_with_its_first_token(world):
    (output,) = Seeded(world, world(), num_tokens=1023).end()
    assert (output.new_token_ids, str(output.finish_reason)) == ([TOKEN], "length")


@pytest.mark.parametrize(
    "sampling, obstacle",
    [
        ({"logprobs": 0}, "logprobs"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"temperature": 1.0, "seed": 3}, "a seed"),
        ({"thinking_token_budget": 3}, "thinking_token_budget"),
        ({"bad_words": ["one"]}, "bad_words"),
        ({"structured_outputs": StructuredOutputsParams(regex="a+")}, "structured_outputs"),
        ({"extra_args": {"mine": 1}}, "extra_args"),
    ],
)
def test_a_request_that_must_compute_its_first_token_has_an_obstacle(world, sampling, obstacle):
    request = world().add(10, **sampling)
    assert first_token.request_obstacle(request) == obstacle
    greedy = world().add(10, temperature=0.0, seed=3, min_tokens=2, stop_token_ids=[1])
    assert first_token.request_obstacle(greedy) == ""


def test_names_that_clients_choose_are_neither_logged_nor_kept(world, caplog):
    """A client's `vllm_xargs` come as `extra_args`: any names, of any length."""
    caplog.set_level(logging.INFO, "kvconnector")
    engine, params = world(), sampled(world, 100) | {TOKENS_DIGEST: None}
    for number in range(3):
        name = params["remote_request_id"].replace("r1|", f"x{number}|")
        own = {**params, "remote_request_id": name}
        engine.add(100, own, extra_args={"kv_transfer_params": own, f"line\n{number}": 1})
        engine.step()
    assert caplog.text.count("compute first tokens for requests with extra_args") == 1
    assert "line" not in caplog.text


@pytest.mark.parametrize(
    "sampling, changes, reason",
    [
        ({"logprobs": 1}, {}, "logprobs"),
        ({"temperature": 0.5}, {}, "sampling parameters"),
        ({"min_tokens": 2}, {}, "sampling parameters"),
        ({"repetition_penalty": 1.5}, {}, "sampling parameters"),
        ({"logit_bias": {3: 1.0}}, {}, "sampling parameters"),
        ({"allowed_token_ids": [7]}, {}, "sampling parameters"),
        ({"lora_request": LoRARequest("A", 1, "/nowhere")}, {CONTEXT: None}, "sampling parameters"),
        ({}, {FIRST_TOKEN: None}, "a producer"),
        ({}, {FIRST_TOKEN: "5"}, "a malformed"),
        ({}, {FIRST_TOKEN: [-1, ""]}, "a malformed"),
        ({}, {FIRST_TOKEN: [1 << 40, ""]}, "a malformed"),
        ({}, {FIRST_TOKEN: [5]}, "a malformed"),
        ({}, {FIRST_TOKEN: [5, "0"]}, "sampling parameters"),
        (
            {},
            {"remote_num_tokens": 101, "remote_block_ids": [[1, 2, 3, 4]]},
            "prompts of another",
        ),
    ],
)
def test_a_token_that_was_sampled_differently_or_is_malformed_is_not_taken(
    world, caplog, sampling, changes, reason
):
    caplog.set_level(logging.INFO, "kvconnector")
    engine, params = world(), sampled(world, 100) | {TOKENS_DIGEST: None} | changes
    for number in range(2):
        name = params["remote_request_id"].replace("r1|", f"x{number}|")
        request = engine.add(100, {**params, "remote_request_id": name}, **sampling)
        news, _ = engine.step()
        assert [load.token_ranges for load in news.loads] == [((0, 99),)]
        _, outputs = engine.step(finished_recving={request.request_id})
        assert request.request_id not in [output.request_id for output in outputs]
        engine.step()
        assert request.num_prompt_tokens == 100
        assert request.output_token_ids[0] == 7
    # once, no matter how many requests there are
    assert caplog.text.count(f"compute first tokens for requests with {reason}") == 1


@pytest.mark.parametrize(
    "came, reason",
    [
        (None, "a producer that sends none"),
        (b"", "a producer that sends none"),
        (b"\xc1", "a malformed"),
        (b"\xa1\xff", "a malformed"),
        (b"\x90", "a producer that sends none"),
        (b"\x92\x05\x64", "a malformed"),
        ({"token": 1 << 40}, "a malformed"),
        ({"digest": "0"}, "sampling parameters"),
        ({"num_tokens": 101}, "prompts of another"),
    ],
)
def test_without_a_token_at_the_end_of_a_stream_the_last_one_of_the_prompt_is_computed(
    world, caplog, came, reason
):
    caplog.set_level(logging.INFO, "kvconnector")
    load = Seeded(world, world(), is_streamed=True)
    load.extra = of_token(load.extra, **came) if isinstance(came, dict) else came
    assert load.end() == []
    load.check_computed(1)
    assert caplog.text.count(f"compute first tokens for requests with {reason}") == 1


NOBODYS = [{"logprobs": 1}, {"temperature": 1.0, "seed": 1}]
FORGETS = {"specs": [attention(), WINDOWED], "first_token": "always"}


@pytest.mark.parametrize(
    "sampling, options",
    [*((each, {}) for each in NOBODYS), ({}, {"first_token": "never"}), ({}, FORGETS)],
)
def test_no_token_is_sent_or_expected_that_no_engine_can_take(world, sampling, options):
    """A model that forgets tokens sends one with its offer, see below, but none with a stream."""
    if "specs" not in options:
        assert FIRST_TOKEN not in sampled(world, 100, sampling, **options)
    assert FIRST_TOKEN not in sampled(world, 100, {"max_tokens": 2}, bidirectional_kv_xfer=True)
    assert PromptEnd.decode(reported(world, 100, sampling, **options)).token is None
    (load,) = followed(world(**options), **sampling)[1].loads
    assert load.token_ranges[0] == (0, 99)


@BOTH_WAYS
@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("is_partly_filled", [False, True])
def test_a_failed_load_is_logged_and_the_token_computed_here(
    world, caplog, policy, is_partly_filled, is_streamed
):
    engine = world(policy=policy)
    load = Seeded(world, engine, is_streamed=is_streamed)
    (ids,) = engine.scheduler.kv_cache_manager.get_block_ids("r1")
    report = WorkerReport(failed={"r1": "PeerLostError: gone"})
    failure = {"invalid_block_ids": {ids[2]}} if is_partly_filled else {"failed_recving": {"r1"}}
    outputs = load.end(kv_connector_worker_meta=report, **failure)
    assert "e: load of r1 failed: PeerLostError: gone" in caplog.messages
    if policy == "fail":
        (output,) = outputs
        assert str(output.finish_reason) == "error"
        assert output.kv_transfer_params == failure_params("PeerLostError: gone")
        return
    assert outputs == []
    load.check_computed(36 if is_partly_filled else 100)


@BOTH_WAYS
def test_an_aborted_request_emits_nothing_and_keeps_its_blocks_for_a_while(world, is_streamed):
    engine = world()
    load = Seeded(world, engine, is_streamed=is_streamed)
    engine.abort("r1")
    assert engine.step()[0].dropped == ["r1"]
    assert engine.used_blocks == 4
    assert load.end(failed_recving={"r1"} if is_streamed else set()) == []
    assert (engine.used_blocks, engine.scheduler.requests) == (0, {})
    assert repr(engine.connector._scheduler.first_tokens) == "<FirstTokens [], 0 loaded>"


def test_a_preempted_request_goes_on_where_it_was(world):
    engine = world()
    load = Seeded(world, engine)
    load.end()
    engine.step()
    before = list(load.request.all_token_ids)
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    news, (output,) = engine.step()
    assert (news.loads, output.new_token_ids) == ([], [7])
    assert list(load.request.all_token_ids) == [*before, 7]
    assert load.request.num_computed_tokens == 102


def test_a_decode_engine_that_lacks_only_the_last_token_does_not_wait_for_it(world):
    engine = world()
    engine.add(64, max_tokens=1, prompt=1)
    engine.step()
    _, news, (output,) = followed(engine, 65)
    assert (news.loads, news.dropped, output.new_token_ids) == ([], ["r2"], [7])


@pytest.mark.parametrize("is_hit", [False, True])
def test_a_prefix_of_the_decode_engine_is_not_loaded(world, is_hit):
    engine = world()
    engine.add(64, max_tokens=1, prompt=1)
    engine.step()
    params = sampled(world, 64 + 33 * (not is_hit))
    engine.add(params["remote_num_tokens"], params, prompt=1)
    news, _ = engine.step()
    assert [load.token_ranges for load in news.loads] == [((32, 64) if is_hit else (64, 97),)]
    _, (output,) = engine.step(finished_recving={"r2"})
    assert output.new_token_ids == [TOKEN]
    _, (output,) = engine.step()
    assert output.new_token_ids == [7]


def test_one_of_several_completions_takes_the_token_and_the_others_sample_their_own(world):
    engine, params = world(), sampled(world, 100)
    requests = [engine.add(100, params, prompt=1) for _ in range(3)]
    engine.step()
    engine.step(finished_recving={"r1"})
    engine.step()
    tokens = [list(request.all_token_ids)[100:] for request in requests]
    assert tokens == [[TOKEN, 7], [7], [7]]


def test_a_prompt_that_skips_the_prefix_cache_is_computed_to_its_end(world):
    """Its log probabilities are the answer, so none of its tokens is left to the decode engine."""
    producer = world(role="kv_producer", specs=[attention(), WINDOWED])
    for asked in ({}, {"prompt_logprobs": 1}):
        producer.add(200, dict(w.REMOTE_DECODE), max_tokens=1, **asked)
    _, outputs = producer.step()
    assert [each.kv_transfer_params["remote_num_tokens"] for each in outputs] == [199, 200]


@pytest.mark.parametrize("kind", ["window", "state"])
def test_a_model_that_forgets_offers_whole_prompts_if_both_engines_always_use_first_tokens(
    world, kind
):
    specs = [attention(), WINDOWED if kind == "window" else w.state_spec()]
    uncached = {"engine": {"enable_prefix_caching": False}}
    hybrid = partial(world, specs=specs, first_token="always", **uncached)
    producer = hybrid(role="kv_producer")
    producer.add(200, dict(w.REMOTE_DECODE), max_tokens=1, prompt=1)
    producer.add(200, dict(w.REMOTE_DECODE), max_tokens=1, logprobs=1)
    _, outputs = producer.step()
    whole, shortened = (output.kv_transfer_params for output in outputs)
    assert (whole["remote_num_tokens"], shortened["remote_num_tokens"]) == (200, 199)
    assert (whole[FIRST_TOKEN][0], FIRST_TOKEN in shortened) == (7, False)
    consumer = hybrid()
    request = consumer.add(200, whole, prompt=1)
    (load,) = consumer.step()[0].loads
    window = 200 - WINDOWED.sliding_window + 1
    first = window // SIZE * SIZE if kind == "window" else 199
    assert load.token_ranges == ((0, 200), (first, 200))
    _, (output,) = consumer.step(finished_recving={"r1"})
    assert output.new_token_ids == [7]
    planned = consumer.scheduler.schedule()
    assert planned.num_scheduled_tokens == {"r1": 1}
    consumer.complete(planned)
    assert request.num_output_tokens == 1


@pytest.mark.parametrize(
    "engine, used, plugins, reason, is_wrapped",
    [
        ({"scheduler_cls": type("Own", (Scheduler,), {})}, {}, [], "the scheduler Own", False),
        ({}, {check_stop: ("x",)}, [], "another check_stop", False),
        ({}, {}, ["mine"], "custom logits processors", True),
    ],
)
def test_an_engine_that_is_not_the_one_known_computes_first_tokens(
    *, world, monkeypatch, caplog, engine, used, plugins, reason, is_wrapped
):
    unwrapped = getattr(Scheduler.update_from_output, "__wrapped__", Scheduler.update_from_output)
    monkeypatch.setattr(Scheduler, "update_from_output", unwrapped)
    params = sampled(world, 100)
    monkeypatch.setattr(outputs, "_USED", outputs._USED | used)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: plugins)
    with pytest.raises(ConfigError, match=reason):
        world(engine=engine, first_token="always")
    consumer = world(engine=engine)
    assert reason in caplog.text
    assert (Scheduler.update_from_output is not unwrapped) == is_wrapped
    monkeypatch.undo()
    consumer.add(100, params)
    (load,) = consumer.step()[0].loads
    assert load.token_ranges == ((0, 99),)


@pytest.mark.parametrize("is_several", [False, True])
def test_other_connectors_in_the_process_are_left_alone(world, is_several):
    """A stand-in, as in vLLM's own tests, has any attribute that it is asked for."""
    world()  # wraps vLLM's scheduler
    engine = world(role="kv_producer", beside="KeepingConnector" if is_several else "")
    engine.add(40, max_tokens=1)
    planned = engine.scheduler.schedule()
    stand_in = MagicMock(get_kv_connector_stats=lambda: None, take_events=lambda: ())
    stand_in.request_finished.return_value = (False, None)
    stand_in.request_finished_all_groups.return_value = (False, None)
    stand_in.register_finished_partial_tail.return_value = False
    if is_several:
        engine.scheduler.connector._connectors[0] = stand_in
    else:
        engine.scheduler.connector = stand_in
    (output,) = engine.complete(planned)
    assert output.new_token_ids == [7]
    stand_in.add_to_outputs.assert_not_called()
