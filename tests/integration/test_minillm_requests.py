"""After failing requests and crowds of requests no engine keeps blocks, and clients get tokens or an error."""

import asyncio
import random

import pytest

from minillm.config import ModelConfig
from tests.integration.minillm_engines import (
    answered,
    complete_on,
    expected_tokens,
    offer_of,
    prompt_of,
    start_pair,
    wait_all_blocks_free,
)
from tests.support.local_engines import token_ids

pytestmark = [pytest.mark.integration, pytest.mark.ucx, pytest.mark.timeout(170)]

MAX_TOKENS = 6
NUM_REQUESTS = 15
PROMPT = prompt_of(40)


async def wrong_params(cluster, prefill, decode):
    """Send falsified parameters: they must neither give other tokens nor end the engine."""
    for change, status in (
        ({"transfer_secret": "0" * 32}, 200),
        ({"remote_block_ids": [[1 << 30] * 3]}, 200),
        ({"remote_num_tokens": 1 << 30}, 200),
        ({"tp_size": 7}, 200),
        ({"remote_block_ids": []}, 400),
        ({"remote_port": 0}, 400),
    ):
        params = await offer_of(cluster, prefill, PROMPT) | change
        request = {"max_tokens": MAX_TOKENS, "kv_transfer_params": params}
        answer = await complete_on(cluster, decode, PROMPT, status=status, **request)
        if status == 200:
            expected = token_ids(expected_tokens(ModelConfig(), PROMPT, MAX_TOKENS))
            assert answer["choices"][0]["token_ids"] == expected, change


def test_short_prompts_and_wrong_parameters(run_cluster):
    async def main(cluster):
        # without prefix hits, so that every prompt is loaded whole
        common = ["--engine", "block=16,prefix=off"]
        prefill, decode, router = await start_pair(cluster, common, common, is_routed=True)
        # a prompt of one token moves nothing, even before the two engines know each other
        for length in (1, 5, 1):
            await answered(cluster, router, prompt_of(length), MAX_TOKENS)
            await wait_all_blocks_free(cluster, prefill)
        await wrong_params(cluster, prefill, decode)
        await answered(cluster, router, prompt_of(6), MAX_TOKENS)

    run_cluster(main)


async def leave_after(cluster, url, length, delay_s):
    """Be a client that closes its connection, wherever its request is at that moment."""
    body = {"prompt": prompt_of(length), "max_tokens": 300, "stream": True}
    try:
        async with cluster.session.post(f"{url}/v1/completions", json=body) as response:
            await asyncio.wait_for(response.content.read(), delay_s)
    except TimeoutError:
        return


def test_a_crowd_in_small_caches_gets_its_tokens(run_cluster):
    """Both caches hold a fraction of the requests: they queue, are preempted, and some of their clients leave."""
    rng = random.Random(0)
    prompts = [prompt_of(rng.randrange(2, 200)) for _ in range(NUM_REQUESTS)]
    leavers = [(rng.randrange(2, 200), rng.random()) for _ in range(NUM_REQUESTS // 3)]

    async def main(cluster):
        producer, consumer, router = await start_pair(
            cluster,
            ["--engine", "tp=2,block=16,layout=HND,blocks=40"],
            ["--engine", "pp=2,block=24,layout=NHD,blocks=24"],
            is_routed=True,
        )
        left = [
            asyncio.ensure_future(leave_after(cluster, router.url, *leaver)) for leaver in leavers
        ]
        await asyncio.gather(*(answered(cluster, router, p, MAX_TOKENS) for p in prompts))
        await asyncio.gather(*left)
        await wait_all_blocks_free(cluster, producer, consumer)

    run_cluster(main)
