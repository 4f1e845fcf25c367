"""The output of a request whose load failed says why: vLLM's scheduler with our connector, alone and beside another."""

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiKVConnectorWorkerMetadata,
)

from kvconnector.integrations.vllm.answers import failure_params
from kvconnector.integrations.vllm.messages import WorkerReport
from tests.vllm import scheduler_world as w

pytestmark = pytest.mark.vllm

LOST = "PeerLostError: gone"


def ended(engine, *names, reason=LOST, beside=""):
    """End loads, the first of them failed. Returns the step's outputs, by request."""
    report = WorkerReport(failed={names[0]: reason} if reason else {})
    if beside:
        report = MultiKVConnectorWorkerMetadata((None, report))
    failed, received = {names[0]}, set(names)
    _, outputs = engine.step(
        kv_connector_worker_meta=report, finished_recving=received, failed_recving=failed
    )
    return {output.request_id: output for output in outputs}


def loading(world, count=1, **options):
    engine = world(policy="fail", **options)
    offers = [w.offer(100, remote_request_id=f"there{number}") for number in range(count)]
    names = [engine.add(100, offer).request_id for offer in offers]
    engine.step()
    return engine, names


@pytest.mark.parametrize("beside", ["", "KeepingConnector"])
@pytest.mark.parametrize("reason", [LOST, "LeaseExpiredError: late", ""])
@pytest.mark.parametrize("first_token", ["auto", "never"])
def test_a_failed_request_says_why(world, beside, reason, first_token):
    engine, names = loading(world, beside=beside, first_token=first_token)
    (output,) = ended(engine, *names, reason=reason, beside=beside).values()
    assert str(output.finish_reason) == "error"
    assert output.kv_transfer_params == failure_params(reason)
    retries = {LOST: "other", "LeaseExpiredError: late": "same", "": "other"}
    assert output.kv_transfer_params["retry"] == retries[reason]


def test_other_requests_of_the_step_say_nothing(world):
    engine, names = loading(world, 3)
    running = engine.add(40, max_tokens=2)
    outputs = ended(engine, *names)
    assert set(outputs) == {names[0], running.request_id}
    assert outputs[running.request_id].kv_transfer_params is None
    _, later = engine.step()
    assert {each.request_id for each in later} == {*names[1:], running.request_id}
    assert all(each.kv_transfer_params is None for each in later)


def test_a_request_that_is_computed_after_all_says_nothing(world):
    engine = world(policy="recompute")
    name = engine.add(100, w.offer(100), max_tokens=1).request_id
    engine.step()
    assert ended(engine, name) == {}
    _, (output,) = engine.step()
    assert (str(output.finish_reason), output.kv_transfer_params) == ("length", None)


def test_a_request_that_was_aborted_before_has_no_output(world):
    engine, (name,) = loading(world)
    engine.abort(name)
    engine.step()
    assert ended(engine, name) == {}
