"""A busy pair of engines: more requests than blocks, clients that leave, and a prefill engine that is restarted."""

from __future__ import annotations

import asyncio
import random

import pytest

from minillm.client import Completion, complete
from minillm.cluster import Cluster
from minillm.config import ModelConfig
from minillm.threaded import token_ids
from tests.integration.minillm_engines import (
    RunCluster,
    expected_tokens,
    prompt_of,
    start_pair,
    wait_all_blocks_free,
)

pytestmark = [pytest.mark.integration, pytest.mark.ucx, pytest.mark.timeout(170)]

MAX_TOKENS = 12
NUM_REQUESTS = 24


def expected(length: int) -> list[int]:
    """The tokens behind `prompt_of(length)`."""
    return token_ids(expected_tokens(ModelConfig(), prompt_of(length), MAX_TOKENS))


async def leave_early(cluster: Cluster, url: str, length: int, delay_s: float) -> None:
    """A client that closes its connection, wherever its request is by then."""
    body = {"prompt": prompt_of(length), "max_tokens": 300, "stream": True}
    try:
        async with cluster.session.post(f"{url}/v1/completions", json=body) as response:
            await asyncio.wait_for(response.content.read(), delay_s)
    except TimeoutError:
        return


def test_a_crowd_in_small_caches_gets_its_tokens(run_cluster: RunCluster) -> None:
    """Both caches hold a fraction of the requests: they queue, are preempted, and some of their clients leave."""
    rng = random.Random(0)
    lengths = [rng.randrange(2, 200) for _ in range(NUM_REQUESTS)]
    leavers = [(rng.randrange(2, 200), rng.random()) for _ in range(NUM_REQUESTS // 3)]

    async def main(cluster: Cluster) -> None:
        producer, consumer, router = await start_pair(
            cluster,
            ["--engine", "tp=2,block=16,layout=HND,blocks=40"],
            ["--engine", "pp=2,block=24,layout=NHD,blocks=24"],
        )
        leaving = [
            asyncio.ensure_future(leave_early(cluster, router.url, length, delay_s))
            for length, delay_s in leavers
        ]
        results: list[Completion] = await asyncio.gather(
            *(
                complete(cluster.session, router.url, prompt_of(length), MAX_TOKENS)
                for length in lengths
            )
        )
        await asyncio.gather(*leaving)
        for length, result in zip(lengths, results, strict=True):
            assert result.token_ids == expected(length)
            assert result.kv_transfer_stats is not None
            assert result.kv_transfer_stats["bytes"] > 0
        await wait_all_blocks_free(cluster, producer, consumer)

    run_cluster(main)


def test_a_restarted_prefill_engine_serves_again(run_cluster: RunCluster) -> None:
    """Same name, new process: the decode engine, which knew the old one, transfers from the new one at once."""

    async def main(cluster: Cluster) -> None:
        producer, consumer, router = await start_pair(
            cluster, ["--engine", "tp=1,block=16"], ["--engine", "tp=1,block=16,prefix=off"]
        )
        before = await complete(cluster.session, router.url, prompt_of(50), MAX_TOKENS)
        producer.child.process.kill()
        await producer.child.process.wait()
        await cluster.stop(["prefill", "router"])
        again = await cluster.start_engine("prefill", "prefill", ["--engine", "tp=2,block=8"])
        await cluster.wait_healthy(again)
        router = await cluster.start_router("router", again, consumer)
        await cluster.wait_healthy(router)
        after = await complete(cluster.session, router.url, prompt_of(50), MAX_TOKENS)
        assert before.token_ids == after.token_ids == expected(50)
        assert before.kv_transfer_stats is not None
        assert after.kv_transfer_stats is not None
        assert after.kv_transfer_stats["bytes"] == before.kv_transfer_stats["bytes"] > 0
        await wait_all_blocks_free(cluster, again, consumer)

    run_cluster(main)
