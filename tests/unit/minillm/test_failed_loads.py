"""A decode engine whose load fails computes what did not arrive, and keeps what it had before."""

import pytest
from msgspec.structs import replace

from minillm.request import Request
from tests.support.local_engines import encoder_prompt_of, prompt_of
from tests.unit.minillm.seed_cases import (
    MAX_TOKENS,
    config_of,
    consumer_answers,
    engines,
    expected,
    model_of,
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
        encoder_prompt = encoder_prompt_of(model_of(architecture), prompt)
        first = Request("first", prompt[:49], 1, encoder_prompt=encoder_prompt)
        consumer.run(first)
        offer = Request("offer", prompt, 1, encoder_prompt=encoder_prompt)
        offer.kv_transfer_params = {"do_remote_decode": True}
        producer.run(offer)
        refused = {**producer.params["offer"], "transfer_secret": "0" * 32}
        load = Request("load", prompt, MAX_TOKENS, encoder_prompt=encoder_prompt)
        load.kv_transfer_params = refused
        (answer,) = consumer_answers(producer, consumer, load)
        assert answer == expected(architecture, prompt)
        stats = consumer.transfer.stats["load"]
        assert (stats.cached_tokens, stats.loaded_tokens) == (num_kept, 0)
