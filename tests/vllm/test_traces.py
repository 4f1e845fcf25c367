"""Transfers in vLLM's traces."""

import pytest

from tests.support.spans import HEADERS, SPAN_ID, TRACE_ID, record_spans
from tests.vllm.shared_tokens import Shape, engines, until

pytestmark = [pytest.mark.vllm, pytest.mark.ucx]

ENDPOINT = "http://127.0.0.1:4317"


@pytest.fixture
def spans(monkeypatch):
    return record_spans(monkeypatch)


@pytest.mark.parametrize("endpoint", [ENDPOINT, None])
def test_both_engines_transfers_are_in_the_traces_of_their_requests(model, spans, endpoint):
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
