"""A decode engine whose load fails computes the tokens that did not arrive, and keeps those that it had before."""

import pytest
from msgspec.structs import replace

from tests.support.local_engines import prompt_of
from tests.unit.minillm.seed_cases import (
    MAX_TOKENS,
    config_of,
    consumer_answers,
    engines,
    expected,
    offered_by,
    request_of,
)

pytestmark = [pytest.mark.integration, pytest.mark.ucx, pytest.mark.timeout(120)]


@pytest.mark.parametrize(
    "architecture, num_kept",
    [("llama", 48), ("hybrid", 48), ("mamba", 48), ("mla", 48), ("encoder-decoder", 0)],
)
def test_a_refused_load_is_computed_from_its_first_block_on(tmp_path, architecture, num_kept):
    prefill = config_of(architecture, "prefill", block_size=16)
    decode = config_of(architecture, "decode", block_size=8, state_interval=8)
    with engines(tmp_path, prefill, replace(decode, failure_policy="recompute")) as pair:
        producer, consumer = pair
        prompt = prompt_of(75)
        consumer.run(request_of(architecture, "first", prompt[:49], 1))
        params = offered_by(producer, architecture, "offer", prompt)
        refused = {**params, "transfer_secret": "0" * 32}
        load = request_of(architecture, "load", prompt, MAX_TOKENS, refused)
        (answer,) = consumer_answers(producer, consumer, load)
        assert answer == expected(architecture, prompt)
        stats = consumer.transfer.stats["load"]
        assert (stats.cached_tokens, stats.loaded_tokens) == (num_kept, 0)
