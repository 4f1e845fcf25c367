"""First tokens of streamed prompts, which come when their load has ended: vLLM's schedulers on both sides."""

import logging

import msgspec
import pytest
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from kvconnector.integrations.vllm.messages import WorkerReport
from kvconnector.session.orders import HoldRequest
from tests.vllm import scheduler_world as w
from tests.vllm.cache_world import attention

pytestmark = pytest.mark.vllm

NAMES = {"transfer_id": "t", "transfer_secret": w.SECRET}
DECODE = {"do_remote_decode": True, "do_remote_prefill": False, **NAMES}
ADDRESS = {"remote_engine_id": "p", "remote_host": "127.0.0.1", "remote_port": 9}
PREFILL = {"do_remote_prefill": True, **ADDRESS, **NAMES}
TOKEN = 41


@pytest.fixture(autouse=True)
def vllm_is_left_as_it_was(monkeypatch):
    monkeypatch.setattr(Scheduler, "update_from_output", Scheduler.update_from_output)


def reported(world, num_tokens=100, **options):
    """What the workers of a prefill engine report with the end of a prompt."""
    sampling = options.pop("sampling", {})
    producer = world(role="kv_producer", **options)
    producer.add(num_tokens, dict(DECODE), max_tokens=1, prompt=1, **sampling)
    orders = [each for _ in range(3) for each in producer.step()[0].holds]
    (hold,) = [each for each in orders if isinstance(each, HoldRequest)]
    return hold.extra


def followed(world, num_tokens=100, *, of_engine=None, **sampling):
    """A decode engine whose load of a streamed prompt has been asked for, and what was."""
    engine = world(**(of_engine or {}))
    request = engine.add(num_tokens, dict(PREFILL), prompt=1, **sampling)
    engine.step()
    engine.step(kv_connector_worker_meta=WorkerReport({request.request_id}))
    news, _ = engine.step()
    return engine, request, [load.token_ranges for load in news.loads]


def of_token(extra, **changes):
    _, digest, num_tokens = msgspec.msgpack.decode(extra)
    named = {"token": TOKEN, "digest": digest, "num_tokens": num_tokens, **changes}
    return msgspec.msgpack.encode([*named.values()])


def end(engine, extra, **failure):
    report = WorkerReport(extras={"r1": extra} if extra is not None else {})
    return engine.step(finished_recving={"r1"}, kv_connector_worker_meta=report, **failure)[1]


@pytest.mark.parametrize("is_earlier", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
def test_the_token_comes_with_the_end_of_the_load_and_is_all_that_is_computed(
    world, is_async, is_earlier
):
    extra = of_token(reported(world))
    engine, _, loads = followed(world, of_engine={"is_async": is_async})
    assert loads == [((0, 100),)]
    if is_earlier:  # of several workers one was done before the others
        report = WorkerReport(extras={"r1": extra})
        assert engine.step(kv_connector_worker_meta=report)[1] == []
        extra = None
    (first,) = end(engine, extra)
    assert (first.new_token_ids, first.finished) == ([TOKEN], False)
    assert first.prefill_stats.num_external_cached_tokens == 100
    planned = engine.scheduler.schedule()
    (new,) = planned.scheduled_new_reqs
    assert planned.num_scheduled_tokens == {"r1": 1}
    assert (new.prompt_token_ids[-1], new.num_computed_tokens) == (TOKEN, 100)
    (second,) = engine.complete(planned)
    assert second.new_token_ids == [7]


@pytest.mark.parametrize(
    "sampling, reason", [({"max_tokens": 1}, "length"), ({"stop_token_ids": [TOKEN]}, "stop")]
)
def test_the_token_may_end_the_request(world, sampling, reason):
    extra = of_token(reported(world))
    engine, _, _ = followed(world, **sampling)
    (output,) = end(engine, extra)
    assert (output.new_token_ids, str(output.finish_reason)) == ([TOKEN], reason)
    _, outputs = engine.step()
    assert (outputs, engine.used_blocks, engine.scheduler.requests) == ([], 0, {})


@pytest.mark.parametrize(
    "came, reason",
    [
        (None, "a producer that sends none"),
        (b"", "a malformed"),
        (b"\xc1", "a malformed"),
        (b"\xa1\xff", "a malformed"),
        (b"\x90", "a malformed"),
        (b"\x92\x05\x64", "a malformed"),
        ({"token": 1 << 40}, "a malformed"),
        ({"digest": "0"}, "sampling parameters"),
        ({"num_tokens": 101}, "prompts of another"),
    ],
)
def test_without_a_token_that_can_be_taken_the_last_one_of_the_prompt_is_computed(
    world, caplog, came, reason
):
    caplog.set_level(logging.INFO, "kvconnector")
    extra = of_token(reported(world), **came) if isinstance(came, dict) else came
    engine, request, _ = followed(world)
    assert end(engine, extra) == []
    planned = engine.scheduler.schedule()
    assert planned.num_scheduled_tokens == {"r1": 1}
    assert [output.new_token_ids for output in engine.complete(planned)] == [[7]]
    assert request.num_prompt_tokens == 100
    assert caplog.text.count(f"compute first tokens for requests with {reason}") == 1


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_after_a_failed_load_the_token_is_computed_here(world, policy):
    extra = of_token(reported(world))
    engine, _, _ = followed(world, of_engine={"policy": policy})
    outputs = end(engine, extra, failed_recving={"r1"})
    if policy == "fail":
        assert [str(output.finish_reason) for output in outputs] == ["error"]
        return
    assert outputs == []
    planned = engine.scheduler.schedule()
    assert planned.num_scheduled_tokens == {"r1": 100}
    assert [output.new_token_ids for output in engine.complete(planned)] == [[7]]


def test_an_aborted_request_emits_nothing(world):
    extra = of_token(reported(world))
    engine, _, _ = followed(world)
    engine.abort("r1")
    assert end(engine, extra) == []
    assert (engine.used_blocks, engine.scheduler.requests) == (0, {})
    assert repr(engine.connector._scheduler.first_tokens) == "<FirstTokens [], 0 loaded>"


def test_a_decode_engine_that_lacks_only_the_last_token_does_not_wait_for_it(world):
    engine = world()
    engine.add(64, max_tokens=1, prompt=1)
    engine.step()
    request = engine.add(65, dict(PREFILL), prompt=1)
    engine.step()
    engine.step(kv_connector_worker_meta=WorkerReport({request.request_id}))
    news, (output,) = engine.step()
    assert (news.loads, news.dropped, output.new_token_ids) == ([], ["r2"], [7])


@pytest.mark.parametrize("sampling", [{"logprobs": 1}, {"temperature": 1.0, "seed": 1}])
def test_nothing_is_sent_or_awaited_that_cannot_be_taken(world, sampling):
    assert reported(world, sampling=sampling) == b""
    assert followed(world, **sampling)[2] == [((0, 99),)]


def test_models_that_forget_and_engines_that_never_take_tokens_leave_the_last_one(world):
    specs = [attention(), attention(SlidingWindowSpec, sliding_window=48)]
    for options in ({"specs": specs, "first_token": "always"}, {"first_token": "never"}):
        assert reported(world, **options) == b""
        assert followed(world, of_engine=options)[2][0][0] == (0, 99)
