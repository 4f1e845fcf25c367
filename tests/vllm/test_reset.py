"""New weights: `reset_prefix_cache(reset_connector=True)` ends what was computed with the old ones."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.kv_cache_interface import KVQuantMode

from kvconnector.integrations.vllm.messages import WorkerReport
from tests.vllm import scheduler_world as w
from tests.vllm.shared_tokens import NAMES, Shape, engines, prefilled, set_scales, until

pytestmark = pytest.mark.vllm

STREAMED = w.REMOTE_DECODE | w.TRANSFER


def reset(engine):
    return engine.scheduler.reset_prefix_cache(reset_connector=True)


@pytest.mark.parametrize("role, options", [("kv_producer", {}), ("kv_both", {})])
def test_what_an_engine_offers_is_taken_back(world, role, options):
    engine = world(role=role, **options)
    engine.add(100, dict(w.REMOTE_DECODE), max_tokens=1)
    engine.step()
    engine.step()
    assert not reset(engine)  # vLLM's own cache holds these blocks, too
    assert engine.step()[0].withdrawn == ["r1"]
    assert engine.step()[0].withdrawn == []
    engine.step(finished_sending={"r1"})
    assert engine.used_blocks == 0
    assert reset(engine)


def test_a_decode_engine_takes_back_what_it_keeps_for_the_next_turn(world):
    engine = world(bidirectional_kv_xfer=True)
    engine.add(40, {**w.offer(40), "do_remote_prefill": False}, max_tokens=2)
    for _ in range(3):
        engine.step()
    assert engine.scheduler.requests
    reset(engine)
    assert engine.step()[0].withdrawn == ["r1"]


def test_a_prompt_that_is_computed_is_followed_no_further(world):
    engine = world(role="kv_producer", engine={"max_num_batched_tokens": 48, "max_num_seqs": 1})
    engine.add(100, dict(STREAMED), max_tokens=1)
    engine.add(100, {**STREAMED, "transfer_id": "queued"}, max_tokens=1)
    engine.step()
    reset(engine)
    assert engine.step()[0].withdrawn == ["r1"]
    later = [engine.step()[0] for _ in range(4)]
    # nothing of the queued prompt was computed before
    assert [news.withdrawn for news in later] == [[]] * 4
    assert "queued" in {hold.transfer_id for news in later for hold in news.holds}


@pytest.mark.parametrize("is_followed", [True, False])
def test_queued_requests_are_computed_here(world, is_followed):
    engine = world()
    offer = dict(w.FOLLOWED) if is_followed else w.offer(100, remote_first_token=[8, "digest"])
    request = engine.add(100, offer)
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    engine.step()
    assert not engine.scheduler.has_requests()  # a paused engine plans no steps
    assert reset(engine)
    assert engine.scheduler.has_requests()
    assert engine.step()[0].dropped == ["r1"]
    assert not engine.scheduler.has_requests()
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    news, outputs = engine.step()
    assert (news.loads, [output.new_token_ids for output in outputs]) == ([], [[7]])
    assert request.num_computed_tokens == 100
    assert reset(engine) is False
    engine.abort("r1")
    assert engine.step()[0].dropped == []


def test_the_first_token_of_old_weights_is_not_emitted(world):
    engine = world()
    prefill = world(role="kv_producer")
    prefill.add(100, dict(w.REMOTE_DECODE), max_tokens=1, prompt=1)
    _, (output,) = prefill.step()
    engine.add(100, output.kv_transfer_params, prompt=1)
    assert "r1" in engine.connector._scheduler_half.first_tokens
    reset(engine)
    assert "r1" not in engine.connector._scheduler_half.first_tokens
    news, (output,) = engine.step()
    assert (news.loads, output.new_token_ids) == ([], [7])


def test_other_completions_of_a_queued_prompt_wait_no_longer(world):
    engine = world()
    for _ in range(2):
        engine.add(100, w.offer(100), prompt=1)
    reset(engine)
    news, outputs = engine.step()
    assert (news.loads, len(outputs)) == ([], 2)


def test_a_load_under_way_is_not_reset_and_goes_on(world, caplog):
    engine = world()
    request = engine.add(100, w.offer(100))
    assert len(engine.step()[0].loads) == 1
    assert engine.connector.reset_cache() is False
    assert "1 requests are being loaded" in caplog.text
    news, _ = engine.step()
    assert news.dropped == []
    engine.step(finished_recving={"r1"})
    engine.step()
    assert request.status.name == "RUNNING"


def test_an_engine_that_has_nothing_is_reset_at_once(world):
    engine = world(role="kv_both")
    assert reset(engine)
    assert not engine.scheduler.has_requests()
    engine.add(100, dict(w.FOLLOWED))
    engine.abort("r1")
    engine.step(kv_connector_worker_meta=WorkerReport({"r1"}))
    assert reset(engine)


def is_over(request):
    return request.num_output_tokens or request.is_finished()


@pytest.mark.ucx
@pytest.mark.parametrize("convert", ["auto", "never"])
@pytest.mark.parametrize("whose", ["prefill", "decode"])
def test_other_scales_than_those_stated_are_noticed(model, monkeypatch, caplog, whose, convert):
    spec_of = Shape.spec
    fp8 = {"dtype": torch.uint8, "kv_quant_mode": KVQuantMode.FP8_PER_TENSOR}
    monkeypatch.setattr(Shape, "spec", lambda shape: replace(spec_of(shape), **fp8))
    monkeypatch.setattr("tests.vllm.shared_tokens.UNWRITTEN", 0)
    shape = Shape(kv_heads=2)
    with engines(model, shape, shape, scales=0.5, convert=convert) as (producer, consumer):
        changed = producer if whose == "prefill" else consumer
        consumer.may_fail = True
        for number, scale in enumerate((0.5, 0.25, 0.5)):
            set_scales(changed.config.compilation_config.static_forward_context[NAMES[0]], scale)
            _, params = prefilled(producer, number, 90)
            request = consumer.world.add(90, params, prompt=number)
            until(partial(is_over, request), consumer, producer)
            is_right = scale == 0.5 or convert == "never"
            assert request.is_finished() is not is_right
            until(lambda: not producer.world.used_blocks, producer, consumer)
        assert ("new weights have changed the scales" in caplog.text) is (convert == "auto")
