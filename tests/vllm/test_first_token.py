"""The prefill engine's token is the decode engine's first one: vLLM's schedulers on both sides."""

import logging

import pytest
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from kvconnector.errors import ConfigError
from kvconnector.integrations.vllm import first_token
from kvconnector.integrations.vllm.first_token import FIRST_TOKEN
from kvconnector.integrations.vllm.messages import WorkerReport
from tests.vllm import scheduler_world as w
from tests.vllm.cache_world import attention

pytestmark = pytest.mark.vllm

REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}
TOKEN = 41
WINDOW = 48


class OtherScheduler(Scheduler):  # type: ignore[misc]  # vLLM's are not typed here
    """An operator's own."""


@pytest.fixture(autouse=True)
def vllm_is_left_as_it_was(monkeypatch):
    monkeypatch.setattr(Scheduler, "update_from_output", Scheduler.update_from_output)


def sampled(world, num_tokens, sampling=None, **options):
    """What a prefill engine offers of a prompt, with the token that it sampled."""
    producer = world(role="kv_producer", **options)
    producer.add(num_tokens, dict(REMOTE_DECODE), prompt=1, **{"max_tokens": 1, **(sampling or {})})
    while not (outputs := producer.step()[1])[0].finished:
        pass
    return outputs[0].kv_transfer_params


def seeded(world, engine, sampling=None, num_tokens=100, **changes):
    """A request that waits for its load, whose producer sampled `TOKEN`."""
    of_router = {"max_tokens": 1} | ({"min_tokens": 1} if "min_tokens" in (sampling or {}) else {})
    params = sampled(world, num_tokens, {**(sampling or {}), **of_router})
    if FIRST_TOKEN in params:
        params[FIRST_TOKEN][0] = TOKEN
    request = engine.add(num_tokens, params | changes, prompt=1, **(sampling or {}))
    news, outputs = engine.step()
    assert outputs == []
    return request, news


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("beside", ["", "KeepingConnector"])
def test_the_token_is_emitted_when_the_load_has_ended_and_is_all_that_is_computed(
    world, is_async, beside
):
    engine = world(is_async=is_async, beside=beside)
    request, news = seeded(world, engine)
    prompt = list(request.prompt_token_ids)
    assert [load.token_ranges for load in news.loads] == [((0, 100),)]
    _, outputs = engine.step(finished_recving={"r1"})
    (first,) = outputs
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
def test_the_first_token_may_end_the_request(world, sampling, reason):
    engine = world()
    request, _ = seeded(world, engine, sampling)
    _, (output,) = engine.step(finished_recving={"r1"})
    assert output.new_token_ids == [TOKEN]
    assert str(output.finish_reason) == str(reason)
    if reason is None:
        assert request.sampling_params.min_tokens == max(0, sampling.get("min_tokens", 0) - 1)
        return
    assert output.stop_reason == (TOKEN if reason == "stop" else None)
    _, outputs = engine.step()
    assert (outputs, engine.used_blocks, engine.scheduler.requests) == ([], 0, {})
    assert repr(engine.connector._scheduler.first_tokens) == "<FirstTokens [], 0 loaded>"


def test_a_prompt_as_long_as_the_model_allows_ends_with_its_first_token(world):
    engine = world()
    seeded(world, engine, num_tokens=1023)
    _, (output,) = engine.step(finished_recving={"r1"})
    assert (output.new_token_ids, str(output.finish_reason)) == ([TOKEN], "length")


OBSTACLES = [
    ({"logprobs": 0}, "logprobs"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ({"presence_penalty": 0.5}, "presence_penalty"),
    ({"frequency_penalty": 0.5}, "frequency_penalty"),
    ({"temperature": 1.0, "seed": 3}, "a seed"),
    ({"thinking_token_budget": 3}, "thinking_token_budget"),
    ({"bad_words": ["one"]}, "bad_words"),
    ({"structured_outputs": StructuredOutputsParams(regex="a+")}, "structured_outputs"),
    ({"extra_args": {"mine": 1}}, "mine"),
]


@pytest.mark.parametrize("sampling, obstacle", OBSTACLES)
def test_a_request_that_must_know_what_was_sampled_has_an_obstacle(world, sampling, obstacle):
    request = world().add(10, **sampling)
    assert first_token.request_obstacle(request) == obstacle
    greedy = world().add(10, temperature=0.0, seed=3, min_tokens=2, stop_token_ids=[1])
    assert first_token.request_obstacle(greedy) == ""


def _computed_here(engine, params, caplog, reason, **sampling):
    caplog.set_level(logging.INFO, "kvconnector")
    for number in range(2):
        name = params["remote_request_id"].replace("r1|", f"x{number}|")
        request = engine.add(100, {**params, "remote_request_id": name}, **sampling)
        news, _ = engine.step()
        assert [load.token_ranges for load in news.loads] == [((0, 99),)]
        _, outputs = engine.step(finished_recving={request.request_id})
        assert request.request_id not in [output.request_id for output in outputs]
        _, outputs = engine.step()
        assert request.num_prompt_tokens == 100
        assert request.output_token_ids[0] == 7
    # once, however many requests there are
    assert caplog.text.count(f"compute first tokens for requests with {reason}") == 1


@pytest.mark.parametrize(
    "sampling, reason",
    [
        ({"logprobs": 1}, "logprobs"),
        ({"temperature": 0.5}, "sampling parameters"),
        ({"min_tokens": 2}, "sampling parameters"),
        ({"repetition_penalty": 1.5}, "sampling parameters"),
    ],
)
def test_a_token_that_was_drawn_otherwise_is_not_taken(world, caplog, sampling, reason):
    _computed_here(world(), sampled(world, 100), caplog, reason, **sampling)


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({FIRST_TOKEN: None}, "a producer"),
        ({FIRST_TOKEN: "5"}, "a malformed"),
        ({FIRST_TOKEN: [-1, ""]}, "a malformed"),
        ({FIRST_TOKEN: [1 << 40, ""]}, "a malformed"),
        ({FIRST_TOKEN: [5]}, "a malformed"),
        ({FIRST_TOKEN: [5, "0"]}, "sampling parameters"),
        ({"remote_num_tokens": 101, "remote_block_ids": [[1, 2, 3, 4]]}, "prompts of another"),
    ],
)
def test_a_token_that_came_wrong_is_not_taken(world, caplog, changes, reason):
    _computed_here(world(), sampled(world, 100) | changes, caplog, reason)


@pytest.mark.parametrize("sampling", [{"logprobs": 1}, {"temperature": 1.0, "seed": 1}])
def test_a_producer_sends_no_token_that_nobody_can_take(world, sampling):
    assert FIRST_TOKEN not in sampled(world, 100, sampling)
    assert FIRST_TOKEN not in sampled(world, 100, {"max_tokens": 2}, bidirectional_kv_xfer=True)
    assert FIRST_TOKEN not in sampled(world, 100, first_token="never")


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("is_partly_filled", [False, True])
def test_after_a_failed_load_the_token_is_computed_here(world, policy, is_partly_filled):
    engine = world(policy=policy)
    request, _ = seeded(world, engine)
    (ids,) = engine.scheduler.kv_cache_manager.get_block_ids("r1")
    failure = {"failed_recving": {"r1"}}
    if is_partly_filled:
        report = WorkerReport(failed={"r1": "PeerLostError: gone"})
        failure = {"invalid_block_ids": {ids[2]}, "kv_connector_worker_meta": report}
    _, outputs = engine.step(finished_recving={"r1"}, **failure)
    if policy == "fail":
        assert [str(output.finish_reason) for output in outputs] == ["error"]
        return
    assert outputs == []
    planned = engine.scheduler.schedule()
    assert planned.num_scheduled_tokens == {"r1": 36 if is_partly_filled else 100}
    assert [output.new_token_ids for output in engine.complete(planned)] == [[7]]
    assert request.num_prompt_tokens == 100


def test_an_aborted_request_emits_nothing(world):
    engine = world()
    seeded(world, engine)
    engine.abort("r1")
    _, outputs = engine.step(finished_recving={"r1"})
    assert (outputs, engine.used_blocks, engine.scheduler.requests) == ([], 0, {})


def test_a_preempted_request_goes_on_where_it_was(world):
    engine = world()
    request, _ = seeded(world, engine)
    engine.step(finished_recving={"r1"})
    engine.step()
    before = list(request.all_token_ids)
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    news, (output,) = engine.step()
    assert (news.loads, output.new_token_ids) == ([], [7])
    assert list(request.all_token_ids) == [*before, 7]
    assert request.num_computed_tokens == 102


@pytest.mark.parametrize("is_hit", [False, True])
def test_a_prefix_of_the_decode_engine_is_not_loaded(world, is_hit):
    engine = world()
    engine.add(64, max_tokens=1, prompt=1)
    engine.step()
    params = sampled(world, 64 + 33 * (not is_hit))
    params[FIRST_TOKEN][0] = TOKEN
    engine.add(params["remote_num_tokens"], params, prompt=1)
    news, _ = engine.step()
    assert [load.token_ranges for load in news.loads] == [((32, 64) if is_hit else (64, 97),)]
    _, (output,) = engine.step(finished_recving={"r2"})
    assert output.new_token_ids == [TOKEN]
    _, (output,) = engine.step()
    assert output.new_token_ids == [7]


def test_of_several_completions_one_takes_the_token_and_the_others_draw_their_own(world):
    engine = world()
    params = sampled(world, 100)
    params[FIRST_TOKEN][0] = TOKEN
    requests = [engine.add(100, params, prompt=1) for _ in range(3)]
    engine.step()
    engine.step(finished_recving={"r1"})
    engine.step()
    tokens = [list(request.all_token_ids)[100:] for request in requests]
    assert tokens == [[TOKEN, 7], [7], [7]]


def _hybrid(world, role, specs, **options):
    uncached = {"engine": {"enable_prefix_caching": False}}
    return world(role=role, specs=[attention(), specs], first_token="always", **uncached, **options)


@pytest.mark.parametrize("kind", ["window", "state"])
def test_a_model_that_forgets_hands_over_whole_prompts_where_both_engines_always_take_tokens(
    world, kind
):
    spec = attention(SlidingWindowSpec, sliding_window=WINDOW) if kind == "window" else None
    spec = spec or w.state_spec()
    producer = _hybrid(world, "kv_producer", spec)
    producer.add(200, dict(REMOTE_DECODE), max_tokens=1, prompt=1)
    producer.add(200, dict(REMOTE_DECODE), max_tokens=1, logprobs=1)
    _, outputs = producer.step()
    whole, shortened = (output.kv_transfer_params for output in outputs)
    assert (whole["remote_num_tokens"], shortened["remote_num_tokens"]) == (200, 199)
    assert (whole[FIRST_TOKEN][0], FIRST_TOKEN in shortened) == (7, False)
    consumer = _hybrid(world, "kv_consumer", spec)
    request = consumer.add(200, whole, prompt=1)
    (load,) = consumer.step()[0].loads
    first = 200 - WINDOW + 1 if kind == "window" else 199
    assert load.token_ranges == ((0, 200), (first, 200))
    _, (output,) = consumer.step(finished_recving={"r1"})
    assert output.new_token_ids == [7]
    planned = consumer.scheduler.schedule()
    assert planned.num_scheduled_tokens == {"r1": 1}
    consumer.complete(planned)
    assert request.num_output_tokens == 1


@pytest.mark.parametrize(
    "break_it, reason",
    [
        ({"scheduler_cls": OtherScheduler}, "the scheduler OtherScheduler"),
        ({"source": "x"}, "another check_stop"),
        ({"plugins": ["mine"]}, "custom logits processors"),
    ],
)
def test_an_engine_that_is_not_the_one_known_computes_first_tokens(
    world, monkeypatch, caplog, break_it, reason
):
    engine = {key: value for key, value in break_it.items() if key == "scheduler_cls"}
    unwrapped = getattr(Scheduler.update_from_output, "__wrapped__", Scheduler.update_from_output)
    monkeypatch.setattr(Scheduler, "update_from_output", unwrapped)
    params = sampled(world, 100)
    if "source" in break_it:
        monkeypatch.setitem(first_token._USED, first_token.check_stop, ("x",))
    if "plugins" in break_it:
        monkeypatch.setattr("importlib.metadata.entry_points", lambda group: ["mine"])
    with pytest.raises(ConfigError, match=reason):
        world(engine=engine, first_token="always")
    consumer = world(engine=engine)
    assert reason in caplog.text
    assert Scheduler.update_from_output is unwrapped
    monkeypatch.undo()
    consumer.add(100, params)
    (load,) = consumer.step()[0].loads
    assert load.token_ranges == ((0, 99),)
