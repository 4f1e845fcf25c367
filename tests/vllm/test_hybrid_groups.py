"""Groups that keep only some of a sequence: windows and recurrent states."""

import pytest

from kvconnector.runtime import TransferParams
from tests.vllm import scheduler_world as w

pytestmark = pytest.mark.vllm

REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}
WINDOW = 48


def _hybrid(world, role):
    specs = [w.attention_spec(), w.attention_spec("SlidingWindowSpec", sliding_window=WINDOW)]
    return world(role=role, specs=specs)


def test_of_a_sliding_window_only_the_end_is_offered_and_loaded(world):
    producer = _hybrid(world, "kv_producer")
    producer.add(200, dict(REMOTE_DECODE), max_tokens=1)
    _, (output,) = producer.step()
    params = output.kv_transfer_params
    # one token less: the decode engine computes the last one, and must see its whole window
    assert params["remote_num_tokens"] == 199
    full, window = params["remote_block_ids"]
    other, first = TransferParams.from_mapping(params).remote_first_blocks
    assert (len(full), other) == (7, 0)
    assert first * w.BLOCK_SIZE <= 199 - WINDOW + 1 < (first + 1) * w.BLOCK_SIZE
    assert len(window) == 7 - first
    consumer = _hybrid(world, "kv_consumer")
    consumer.add(200, params)
    (load,) = consumer.step()[0].loads
    assert load.token_ranges == ((0, 199), (199 - WINDOW + 1, 199))


def test_a_state_that_a_step_in_flight_has_moved_on_is_not_offered(world):
    """Only the stop token's step is known when the request ends; the next has been planned, and the state with it."""
    specs = [w.attention_spec(), w.state_spec()]
    for is_async in (False, True):
        engine = world(
            role="kv_both",
            specs=specs,
            is_async=is_async,
            engine={"enable_prefix_caching": False},
            bidirectional_kv_xfer=True,
        )
        engine.add(50, w.offer(1, remote_block_ids=[]), max_tokens=8, stop_token=7)
        planned = engine.scheduler.schedule()
        if is_async:
            assert engine.scheduler.schedule().num_scheduled_tokens == {"r1": 1}
        (output,) = engine.complete(planned)
        assert str(output.finish_reason) == "stop"
        assert (output.kv_transfer_params is None) == is_async
