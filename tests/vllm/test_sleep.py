"""Engines of vLLM 0.33 that sleep and wake up with transfers under way; the model alone is left out."""

import pytest

from kvconnector.integrations.vllm.connector import KVConnector
from tests.vllm.shared_tokens import UNWRITTEN, Shape, check_read, engines, prefilled, until

pytestmark = [pytest.mark.vllm, pytest.mark.ucx]


def sleep_and_wake(engine):
    """As vLLM's worker and engine core do it, and twice: the calls are idempotent. The caches lose what they held."""
    assert KVConnector.supports_sleep_mode(engine.config.kv_transfer_config)
    for rank in engine.ranks:
        rank.connector.unregister_kv_caches()
        rank.connector.unregister_kv_caches()
        for layer in rank.layers:
            layer.fill_(UNWRITTEN)
        rank.connector.restore_kv_caches()
        rank.connector.restore_kv_caches()
    shakes = {
        (0, rank.placement.rank.tp_rank): rank.connector.get_handshake_metadata()
        for rank in engine.ranks
    }
    engine.world.connector.set_xfer_handshake_metadata_pp_aware(shakes)
    engine.world.scheduler.reset_prefix_cache()


@pytest.mark.parametrize("direct", ["auto", "never"])
@pytest.mark.parametrize("sleeper", ["prefill", "decode"])
def test_an_engine_that_slept_fails_what_was_under_way_and_reads_what_comes_next(
    model, sleeper, direct
):
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


def test_what_is_asked_of_a_sleeping_engine_fails_alone(model):
    with engines(model, Shape(), Shape()) as (producer, consumer):
        _, params = prefilled(producer, 1, 90)
        (rank,) = consumer.ranks
        rank.connector.unregister_kv_caches()
        consumer.may_fail = True
        request = consumer.world.add(90, params, prompt=1)
        until(request.is_finished, consumer, producer)
        rank.connector.restore_kv_caches()
        consumer.may_fail = False
        check_read(producer, consumer, 2, 90)
