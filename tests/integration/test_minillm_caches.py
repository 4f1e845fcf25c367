"""What the engines do with their caches: known beginnings are not moved again, full pools are swapped, windows and
states move as little as they are.

Real processes, real UCX. The completions must be those of a single-rank model that computes everything in this process.
"""

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
from minillm.config import Architecture, CacheConfig, ModelConfig, ParallelConfig
from minillm.demo import LOGPROB_TOLERANCE
from minillm.messages import SampledToken
from minillm.threaded import ShardedModel, token_ids

pytestmark = [pytest.mark.integration, pytest.mark.ucx, pytest.mark.timeout(120)]

TIMEOUT_S = 110.0
RELEASE_TIMEOUT_S = 20.0
MAX_TOKENS = 6
ITEM_BYTES = 4


@pytest.fixture(autouse=True)
def _private_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a killed process cannot remove goes with the test's own folder."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run one test's coroutine with a deadline."""
    asyncio.run(asyncio.wait_for(main, TIMEOUT_S))


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    """A random prompt."""
    rng = random.Random(f"{length} {seed}")
    return tuple(rng.randrange(ModelConfig().vocab_size) for _ in range(length))


@functools.cache
def expected_tokens(
    architecture: Architecture, prompt: tuple[int, ...], max_tokens: int = MAX_TOKENS
) -> list[SampledToken]:
    """What one rank computes in this process, without any engine around it."""
    config = ModelConfig(architecture=architecture)
    single = ShardedModel(config, ParallelConfig(), CacheConfig(), len(prompt) + max_tokens)
    return single.generate(list(prompt), max_tokens)


def check_tokens(
    architecture: Architecture, prompt: tuple[int, ...], max_tokens: int, result: Completion
) -> None:
    """Tokens exactly, log-probabilities within rounding."""
    expected = expected_tokens(architecture, prompt, max_tokens)
    assert result.token_ids == token_ids(expected)
    pairs = zip(result.logprobs, expected, strict=True)
    assert max(abs(a - b.logprob) for a, b in pairs) < LOGPROB_TOLERANCE


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


async def complete_on(
    cluster: Cluster, server: Server, prompt: tuple[int, ...], **fields: Any
) -> dict[str, Any]:
    """One completion's whole answer."""
    body = {"prompt": list(prompt), "return_token_ids": True, **fields}
    async with cluster.session.post(f"{server.url}/v1/completions", json=body) as response:
        answer: dict[str, Any] = await response.json()
    assert response.status == 200, answer
    return answer


def test_a_known_beginning_is_neither_computed_nor_moved_again(tmp_path: Path) -> None:
    """Blocks of 16 on P and of 6 on D (two ranks): what is missing starts anywhere in P's blocks."""
    model = ModelConfig()
    token_bytes = model.num_layers * 2 * model.num_kv_heads * model.head_dim * ITEM_BYTES
    first = prompt_of(150)
    shared = (149, 41, 5)
    prompts = [first, *(first[:length] + prompt_of(151 - length, length) for length in shared)]

    async def main() -> None:
        async with Cluster(tmp_path) as cluster:
            prefill = await cluster.start_engine("prefill", "prefill", ["--engine", "block=16"])
            shape = "tp=2,block=6,layout=NHD"
            decode = await cluster.start_engine("decode", "decode", ["--engine", shape])
            await cluster.wait_healthy(prefill, decode)
            for prompt, length in zip(prompts, (0, *shared), strict=True):
                offered = await complete_on(
                    cluster,
                    prefill,
                    prompt,
                    max_tokens=1,
                    kv_transfer_params={"do_remote_decode": True},
                )
                answer = await complete_on(
                    cluster,
                    decode,
                    prompt,
                    max_tokens=MAX_TOKENS,
                    kv_transfer_params=offered["kv_transfer_params"],
                )
                choice = answer["choices"][0]
                assert choice["token_ids"] == token_ids(expected_tokens("llama", prompt))
                reused = offered["usage"]["prompt_tokens_details"]["cached_tokens"]
                assert reused == length // 16 * 16
                stats, hit = answer["kv_transfer_stats"], length // 6 * 6
                missing = len(prompt) - 1 - hit
                assert (stats["cached_tokens"], stats["loaded_tokens"]) == (hit, missing)
                assert stats["bytes"] == missing * token_bytes
            assert (await metrics(cluster, prefill))["minillm_prefix_hit_rate"] > 0.2
            for engine in (prefill, decode):
                await wait_all_blocks_free(cluster, engine)

    run(main())


def test_a_prompt_that_is_here_already_moves_nothing(tmp_path: Path) -> None:
    """And its producer gets its blocks back at once."""
    prompt = prompt_of(33)

    async def main() -> None:
        async with Cluster(tmp_path) as cluster:
            prefill = await cluster.start_engine("prefill", "prefill", ["--engine", "block=8"])
            decode = await cluster.start_engine("decode", "decode", ["--engine", "block=16"])
            await cluster.wait_healthy(prefill, decode)
            router = await cluster.start_router("router", prefill, decode)
            await cluster.wait_healthy(router)
            moved = []
            for _ in range(2):
                result = await complete(cluster.session, router.url, prompt, MAX_TOKENS)
                check_tokens("llama", prompt, MAX_TOKENS, result)
                stats = result.kv_transfer_stats or {}
                moved.append((stats["bytes"] > 0, stats["loaded_tokens"], stats["cached_tokens"]))
            assert moved == [(True, 32, 0), (False, 0, 32)]
            for engine in (prefill, decode):
                await wait_all_blocks_free(cluster, engine)

    run(main())


SMALL_POOL = "block=8,layout=NHD,blocks=28,host=64"
PROMPTS_TO_SWAP = [prompt_of(30 + index, index) for index in range(6)]
TOKENS_TO_SWAP = 40


async def check_swapping(
    cluster: Cluster, architecture: Architecture, url: str, engine: Server, num_prefilled: int
) -> None:
    """Six requests that grow to twice the engine's pool get their tokens, and none is computed twice.

    The engine computes `num_prefilled` prompt tokens in all.
    """
    results: list[Completion] = await asyncio.gather(
        *(complete(cluster.session, url, prompt, TOKENS_TO_SWAP) for prompt in PROMPTS_TO_SWAP)
    )
    for prompt, result in zip(PROMPTS_TO_SWAP, results, strict=True):
        check_tokens(architecture, prompt, TOKENS_TO_SWAP, result)
    values = await metrics(cluster, engine)
    assert values["minillm_swapped_blocks"] > 0
    decoded = len(PROMPTS_TO_SWAP) * (TOKENS_TO_SWAP - 1)
    assert values["minillm_computed_tokens"] == num_prefilled + decoded
    await wait_all_blocks_free(cluster, engine)


def test_requests_that_do_not_fit_into_a_decode_engine_are_swapped(tmp_path: Path) -> None:
    async def main() -> None:
        async with Cluster(tmp_path) as cluster:
            prefill = await cluster.start_engine("prefill", "prefill", ["--engine", "block=16"])
            shape = ["--engine", f"pp=2,{SMALL_POOL}", "--failure-policy", "fail"]
            decode = await cluster.start_engine("decode", "decode", shape)
            await cluster.wait_healthy(prefill, decode)
            router = await cluster.start_router("router", prefill, decode)
            await cluster.wait_healthy(router)
            # of each prompt all but the last token come from the other engine
            await check_swapping(cluster, "llama", router.url, decode, len(PROMPTS_TO_SWAP))
            await wait_all_blocks_free(cluster, prefill)

    run(main())


def test_windows_and_states_are_swapped_too(tmp_path: Path) -> None:
    async def main() -> None:
        async with Cluster(tmp_path) as cluster:
            engines: dict[Architecture, Server] = {}
            for name in ("hybrid", "mamba"):
                options = ["--model", name, "--engine", SMALL_POOL]
                engines[name] = await cluster.start_engine(name, "mono", options)
            await cluster.wait_healthy(*engines.values())
            for architecture, engine in engines.items():
                num_prefilled = sum(map(len, PROMPTS_TO_SWAP))
                await check_swapping(cluster, architecture, engine.url, engine, num_prefilled)

    run(main())


def moved_bytes(model: ModelConfig, length: int) -> int:
    """What all ranks of a decode engine load of a prompt of `length` tokens, without replicated heads."""
    tokens = length - 1
    head_bytes = model.head_dim * ITEM_BYTES
    by_kind = {
        "full": tokens * 2 * model.num_kv_heads * head_bytes,
        "window": min(tokens, model.mixer.sliding_window - 1) * 2 * model.num_kv_heads * head_bytes,
        # the convolution's last inputs, and the state
        "state": model.num_heads
        * (model.mixer.conv_width - 1 + model.mixer.state_dim)
        * head_bytes,
    }
    return sum(by_kind[kind] for kind in model.layer_kinds) if tokens else 0


@pytest.mark.parametrize("architecture", ["hybrid", "mamba"])
def test_a_window_or_a_state_moves_alone(architecture: Architecture, tmp_path: Path) -> None:
    """Two cache groups, two engine shapes; one stage of a decode engine has layers of one group only."""
    model = ModelConfig(architecture=architecture)
    shapes = ("tp=2,block=24,layout=NHD", "pp=2,layers=7+1,block=6,layout=HDN")
    # inside a window, exactly a window, beyond it; more than one prefill step takes, whose ring of blocks goes around
    long = 2100 if architecture == "hybrid" else 300
    lengths = ((1, 17, 64, long), (2, 65, 150))

    async def main() -> None:
        async with Cluster(tmp_path) as cluster:
            common = ["--model", architecture, "--failure-policy", "fail"]
            prefill = await cluster.start_engine(
                "prefill", "prefill", [*common, "--engine", "tp=2,pp=2,layers=3+5,block=16"]
            )
            decodes = [
                await cluster.start_engine(f"decode{index}", "decode", [*common, "--engine", shape])
                for index, shape in enumerate(shapes)
            ]
            await cluster.wait_healthy(prefill, *decodes)
            for index, decode in enumerate(decodes):
                router = await cluster.start_router(f"router{index}", prefill, decode)
                await cluster.wait_healthy(router)
                for length in lengths[index]:
                    prompt = prompt_of(length)
                    result = await complete(cluster.session, router.url, prompt, MAX_TOKENS)
                    check_tokens(architecture, prompt, MAX_TOKENS, result)
                    stats = result.kv_transfer_stats or {}
                    assert stats["bytes"] == moved_bytes(model, length)
            for engine in (prefill, *decodes):
                await wait_all_blocks_free(cluster, engine)

    run(main())
