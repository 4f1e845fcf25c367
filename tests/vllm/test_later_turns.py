"""A later turn of a chat: the prefill engine reads the earlier ones from the decode engine, if its prompt begins with
their tokens.
"""

import pytest

from tests.vllm import scheduler_world as w

pytestmark = pytest.mark.vllm


def test_a_prefill_engine_computes_few_tokens_itself(world):
    prefill = world(role="kv_producer", bidirectional_kv_xfer=True, kv_recompute_threshold=64)
    prefill.add(200, w.offer(63, **w.REMOTE_DECODE))
    news, outputs = prefill.step()
    assert news.loads == []
    assert len(outputs) == 1


@pytest.mark.parametrize("kept", [slice(104), slice(103), slice(1, None)])
@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_no_prompt_is_continued_from_the_cache_of_other_tokens(world, role, kept, caplog):
    """Templates leave reasoning out of earlier answers, and routers may confuse requests: lengths do not show it."""
    caplog.set_level("INFO", "kvconnector")
    first = world(bidirectional_kv_xfer=True, role="kv_both")
    earlier = first.add(100, dict(w.REMOTE_DECODE), max_tokens=5)
    outputs = []
    while not earlier.is_finished():
        outputs += first.step()[1]
    params = {**outputs[-1].kv_transfer_params, **w.REMOTE_DECODE}
    if role == "kv_consumer":
        params["do_remote_prefill"], params["do_remote_decode"] = True, False
    second = world(role=role, bidirectional_kv_xfer=True)
    tokens = list(earlier.all_token_ids)[kept]
    second.add(0, params, forms={"prompt_token_ids": tokens + [8] * (150 - len(tokens))})
    news, outputs = second.step()
    assert bool(news.loads) is (kept == slice(104))
    assert bool(outputs) is not bool(news.loads)
    assert news.dropped == ([] if news.loads else ["r1"])
    assert ("does not offer the first tokens" in caplog.text) is not bool(news.loads)
