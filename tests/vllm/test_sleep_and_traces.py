"""Transfers in vLLM's traces, and engines of vLLM 0.33 that sleep and wake up with transfers under way."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from vllm.distributed import parallel_state

from kvconnector.errors import LocalError, MemoryInUseError
from kvconnector.integrations.vllm import worker as worker_module
from kvconnector.integrations.vllm.connector import KVConnector
from kvconnector.integrations.vllm.placement import engine_groups
from kvconnector.runtime import Worker
from kvconnector.runtime.driver_thread import DriverThread
from tests.support.spans import HEADERS, SPAN_ID, TRACE_ID, record_spans
from tests.vllm.shared_tokens import UNWRITTEN, Shape, check_read, engines, prefilled, until

pytestmark = [pytest.mark.vllm, pytest.mark.ucx]


def sleep_and_wake(engine):
    """Sleep and wake up like vLLM's worker and engine core, making idempotent calls twice. The caches are lost."""
    assert KVConnector.supports_sleep_mode(engine.config.kv_transfer_config)
    for rank in engine.ranks:
        rank.connector.unregister_kv_caches()
        rank.connector.unregister_kv_caches()
        for layer in rank.layers:
            layer.fill_(UNWRITTEN)
        rank.connector.restore_kv_caches()
        rank.connector.restore_kv_caches()
    engine.world.connector.set_xfer_handshake_metadata_pp_aware(engine.handshakes())
    engine.world.scheduler.reset_prefix_cache()


@pytest.mark.parametrize("direct", ["auto", "never"])
@pytest.mark.parametrize("sleeper", ["prefill", "decode"])
def test_an_engine_that_slept_fails_loads_under_way_and_reads_later_ones(model, sleeper, direct):
    paths = {"direct": direct}
    with engines(model, Shape(), Shape(), paths=paths) as (producer, consumer):
        check_read(producer, consumer, 1, 90)
        _, params = prefilled(producer, 2, 90)
        producer.step()
        request = consumer.world.add(90, params, prompt=2)
        consumer.may_fail = True
        if sleeper == "prefill":
            sleep_and_wake(producer)
        else:
            planned = consumer.begin_step()
            sleep_and_wake(consumer)
            consumer.end_step(planned)
        until(request.is_finished, consumer, producer)
        assert request.status.name == "FINISHED_ERROR"
        consumer.may_fail = False
        check_read(producer, consumer, 3, 90)
        until(
            lambda: not (producer.world.used_blocks or consumer.world.used_blocks),
            producer,
            consumer,
        )


@pytest.mark.parametrize("takes_step", [True, False])
def test_a_request_to_a_sleeping_engine_fails_alone(model, monkeypatch, takes_step):
    with engines(model, Shape(), Shape()) as (producer, consumer):
        _, params = prefilled(producer, 1, 90)
        (rank,) = consumer.ranks
        rank.connector.unregister_kv_caches()
        consumer.may_fail = True
        request = consumer.world.add(90, params, prompt=1)
        with monkeypatch.context() as patch:
            if not takes_step:
                patch.setattr(Worker, "start_step", Mock(side_effect=LocalError("not now")))
            until(request.is_finished, consumer, producer)
        rank.connector.restore_kv_caches()
        consumer.may_fail = False
        check_read(producer, consumer, 2, 90)


@pytest.mark.parametrize(
    "whose, reason",
    [
        ("own", "a consumer has not unmapped the caches"),
        ("another rank's", "another rank of this engine cannot release its caches"),
        ("a silent rank's", "another rank of this engine did not say in time .*: no answer"),
    ],
)
def test_an_engine_that_could_not_sleep_goes_on(model, monkeypatch, whose, reason):
    """vLLM does not wake up an engine whose sleep has failed: it holds it for awake. So all ranks stay awake."""
    still = Mock(side_effect=MemoryInUseError("a consumer has not unmapped the caches"))
    with engines(model, Shape(), Shape()) as (producer, consumer):
        for sleeper in (producer, consumer):
            (rank,) = sleeper.ranks
            with monkeypatch.context() as patch:
                if whose == "own":
                    patch.setattr(DriverThread, "withdraw_pools", still)
                else:
                    silent = RuntimeError("no answer") if whose == "a silent rank's" else None
                    answer = Mock(side_effect=silent, return_value=True)
                    patch.setattr(worker_module, "is_any", answer)
                with pytest.raises(MemoryInUseError, match=reason):
                    rank.connector.unregister_kv_caches()
            check_read(producer, consumer, sleeper is producer, 90)


@pytest.mark.parametrize("joining", [(), ("tp",), ("pcp",), ("pp",), ("tp", "pcp", "pp")])
def test_the_ranks_that_agree_to_sleep_are_those_of_each_kind_of_parallelism(monkeypatch, joining):
    monkeypatch.setattr(parallel_state, "model_parallel_is_initialized", lambda: True)
    for kind in ("tp", "pcp", "pp"):
        group = SimpleNamespace(world_size=2 if kind in joining else 1, cpu_group=kind)
        monkeypatch.setattr(parallel_state, f"get_{kind}_group", lambda found=group: found)
    assert engine_groups() == list(joining)


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:4317", None])
def test_both_engines_transfers_are_in_the_traces_of_their_requests(model, monkeypatch, endpoint):
    spans = record_spans(monkeypatch)
    two, one = (Shape(traces_endpoint=endpoint, tp_size=n, kv_heads=4) for n in (2, 1))
    with engines(model, two, one) as (producer, consumer):
        request = {"prompt": 1, "trace_headers": HEADERS}
        held = producer.world.add(75, {"do_remote_decode": True}, max_tokens=1, **request)
        (output,) = producer.step()
        loaded = consumer.world.add(75, output.kv_transfer_params, **request)
        until(lambda: loaded.num_output_tokens > 0, producer, consumer)
        until(lambda: not producer.world.used_blocks, producer, consumer)
        if endpoint is None:
            assert (spans(), producer.num_traces, consumer.num_traces) == ((), 0, 0)
            return
        found = {
            (
                span.attributes["kvconnector.engine"],
                span.name,
                span.attributes["kvconnector.request"],
            )
            for span in spans()
            if span.parent and f"{span.parent.span_id:016x}" == SPAN_ID
        }
        assert found == {
            ("kv_producer", "kvconnector.hold", held.request_id),
            ("kv_consumer", "kvconnector.load", loaded.request_id),
        }
        assert {f"{span.context.trace_id:032x}" for span in spans()} == {TRACE_ID}
