"""A busy pair of engines: more requests than blocks, clients that leave, and a prefill engine that is restarted."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from minillm.client import Completion, complete
from minillm.cluster import Cluster, Server
from minillm.config import CacheConfig, ModelConfig, ParallelConfig
from minillm.messages import SampledToken
from minillm.threaded import ShardedModel, token_ids

pytestmark = [pytest.mark.integration, pytest.mark.ucx, pytest.mark.timeout(170)]

TIMEOUT_S = 160.0
RELEASE_TIMEOUT_S = 20.0
MAX_TOKENS = 12
MODEL = ModelConfig()
NUM_REQUESTS = 24


@pytest.fixture(autouse=True)
def _private_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a killed process cannot remove goes with the test's own folder."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run one test's coroutine with a deadline."""
    asyncio.run(asyncio.wait_for(main, TIMEOUT_S))


def prompt_of(length: int) -> list[int]:
    """A prompt that depends on its length alone."""
    rng = random.Random(length)
    return [rng.randrange(MODEL.vocab_size) for _ in range(length)]


@functools.cache
def expected_tokens(length: int) -> list[int]:
    """What one rank computes in this process, without any engine around it."""
    single = ShardedModel(MODEL, ParallelConfig(), CacheConfig(), length + MAX_TOKENS)
    sampled: list[SampledToken] = single.generate(prompt_of(length), MAX_TOKENS)
    return token_ids(sampled)


async def metrics(cluster: Cluster, server: Server) -> dict[str, float]:
    """The engine's gauges."""
    async with cluster.session.get(f"{server.url}/metrics") as response:
        lines = (await response.text()).splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


async def wait_all_blocks_free(cluster: Cluster, server: Server) -> None:
    """The engine gets every block back once its requests are over."""
    deadline = asyncio.get_running_loop().time() + RELEASE_TIMEOUT_S
    while True:
        values = await metrics(cluster, server)
        if values["minillm_free_blocks"] == values["minillm_blocks"]:
            return
        assert asyncio.get_running_loop().time() < deadline, f"blocks are still held: {values}"
        await asyncio.sleep(0.05)


async def leave_early(cluster: Cluster, url: str, length: int, delay_s: float) -> None:
    """A client that closes its connection, wherever its request is by then."""
    body = {"prompt": prompt_of(length), "max_tokens": 300, "stream": True}
    try:
        async with cluster.session.post(f"{url}/v1/completions", json=body) as response:
            await asyncio.wait_for(response.content.read(), delay_s)
    except asyncio.TimeoutError:
        return


async def start_pair(cluster: Cluster, prefill: str, decode: str) -> tuple[Server, Server, Server]:
    """A prefill engine, a decode engine and their router, healthy."""
    producer = await cluster.start_engine("prefill", "prefill", ["--engine", prefill])
    consumer = await cluster.start_engine("decode", "decode", ["--engine", decode])
    await cluster.wait_healthy(producer, consumer)
    router = await cluster.start_router("router", producer, consumer)
    await cluster.wait_healthy(router)
    return producer, consumer, router


def test_a_crowd_in_small_caches_gets_its_tokens(tmp_path: Path) -> None:
    """Both caches hold a fraction of the requests: they queue, are preempted, and some of their clients leave."""
    rng = random.Random(0)
    lengths = [rng.randrange(2, 200) for _ in range(NUM_REQUESTS)]
    leavers = [(rng.randrange(2, 200), rng.random()) for _ in range(NUM_REQUESTS // 3)]

    async def main() -> None:
        async with Cluster(tmp_path) as cluster:
            producer, consumer, router = await start_pair(
                cluster, "tp=2,block=16,layout=HND,blocks=40", "pp=2,block=24,layout=NHD,blocks=24"
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
                assert result.token_ids == expected_tokens(length)
                assert result.kv_transfer_stats is not None
                assert result.kv_transfer_stats["bytes"] > 0
            for engine in (producer, consumer):
                await wait_all_blocks_free(cluster, engine)

    run(main())


def test_a_restarted_prefill_engine_serves_again(tmp_path: Path) -> None:
    """Same name, new process: the decode engine, which knew the old one, transfers from the new one at once."""

    async def main() -> None:
        async with Cluster(tmp_path) as cluster:
            producer, consumer, router = await start_pair(
                cluster, "tp=1,block=16", "tp=1,block=16,prefix=off"
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
            assert before.token_ids == after.token_ids == expected_tokens(50)
            assert before.kv_transfer_stats is not None
            assert after.kv_transfer_stats is not None
            assert after.kv_transfer_stats["bytes"] == before.kv_transfer_stats["bytes"] > 0
            for engine in (again, consumer):
                await wait_all_blocks_free(cluster, engine)

    run(main())
