"""Prefill on one engine, decode on another, over every kind of difference between the two.

Real processes, real UCX. The completions must be those of a single-rank model that computes everything in this process.
The cases cover every pair of: P's parallelism, D's parallelism, D's block size relative to P's, direction of layout.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from minillm.client import Completion, complete
from minillm.cluster import Cluster, Server
from minillm.config import ModelConfig
from minillm.messages import SampledToken
from minillm.threaded import token_ids
from tests.integration.minillm_engines import (
    RunCluster,
    check_completion,
    complete_on,
    expected_tokens,
    prompt_of,
    start_pair,
    wait_all_blocks_free,
)

pytestmark = [pytest.mark.integration, pytest.mark.ucx, pytest.mark.timeout(170)]

MAX_TOKENS = 6
# inside a block, a block and a bit, many blocks
PROMPT_LENGTHS = (5, 17, 150)

LLAMA = ModelConfig()
MLA = ModelConfig(architecture="mla")
ONE_KV_HEAD = ModelConfig(num_kv_heads=1)


@dataclass(frozen=True)
class Case:
    """One prefill engine and the decode engines that read from it."""

    name: str
    prefill: str
    decodes: tuple[str, ...]
    model: ModelConfig = LLAMA


CASES = (
    Case(
        "tp1-hnd",
        "tp=1,block=16,layout=HND",
        ("tp=2,block=64,layout=NHD", "pp=2,block=6,layout=NHD"),
    ),
    Case("tp1-nhd", "tp=1,block=16,layout=NHD", ("tp=1,block=16,layout=HND",)),
    Case(
        "tp2-hnd",
        "tp=2,block=16,layout=HND",
        ("tp=1,block=48,layout=NHD", "pp=2,block=16,layout=NHD"),
    ),
    Case("tp2-nhd", "tp=2,block=16,layout=NHD", ("tp=2,block=4,layout=HND",)),
    Case(
        "tp2pp2-hnd",
        "tp=2,pp=2,layers=5+3,block=16,layout=HND",
        ("tp=1,block=8,layout=NHD", "tp=2,block=16,layout=NHD"),
    ),
    Case("tp2pp2-nhd", "tp=2,pp=2,block=16,layout=NHD", ("pp=2,layers=2+6,block=64,layout=HND",)),
    Case(
        "mla",
        "tp=2,block=16,layout=HND",
        ("pp=2,block=64,layout=NHD", "tp=2,block=5,layout=HDN"),
        MLA,
    ),
    Case(
        "transposed-k-replicated-head",
        "tp=2,block=16,layout=HDN",
        ("tp=1,block=32,layout=NHD", "tp=2,block=12,layout=HDN"),
        ONE_KV_HEAD,
    ),
)


def expected(model: ModelConfig, length: int) -> list[SampledToken]:
    """What follows `prompt_of(length)`."""
    return expected_tokens(model, prompt_of(length), MAX_TOKENS)


def expected_bytes(model: ModelConfig, shape: str, length: int) -> int:
    """Every rank of D loads its share once: all but the last prompt token; MLA's latent is on every tensor rank."""
    parts = 1 if model.architecture == "mla" else 2
    tp_size = 2 if "tp=2" in shape else 1
    copies = max(1, tp_size // model.cache_heads)
    token_bytes = model.num_layers * parts * model.cache_heads * model.cache_dim * 4
    return (length - 1) * token_bytes * copies


def check(model: ModelConfig, shape: str, length: int, result: Completion) -> None:
    """What one rank computes, and the bytes that had to move."""
    check_completion(result, expected(model, length))
    moved = (result.kv_transfer_stats or {}).get("bytes", 0)
    assert moved == expected_bytes(model, shape, length)


def model_arguments(model: ModelConfig, folder: Path) -> list[str]:
    """Options that give a server this model."""
    path = folder / "model.json"
    path.write_bytes(msgspec.json.encode(model))
    return ["--model-config", str(path)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_decode_continues_what_another_engine_prefilled(
    case: Case, run_cluster: RunCluster, tmp_path: Path
) -> None:
    async def main(cluster: Cluster) -> None:
        common = model_arguments(case.model, tmp_path)
        prefill = await cluster.start_engine(
            "prefill", "prefill", [*common, "--engine", case.prefill]
        )
        decodes = [
            await cluster.start_engine(f"decode{index}", "decode", [*common, "--engine", shape])
            for index, shape in enumerate(case.decodes)
        ]
        await cluster.wait_healthy(prefill, *decodes)
        for index, (shape, decode) in enumerate(zip(case.decodes, decodes, strict=True)):
            router = await cluster.start_router(f"router{index}", prefill, decode)
            await cluster.wait_healthy(router)
            results = await asyncio.gather(
                *(
                    complete(cluster.session, router.url, prompt_of(length), MAX_TOKENS)
                    for length in PROMPT_LENGTHS
                )
            )
            for length, result in zip(PROMPT_LENGTHS, results, strict=True):
                check(case.model, shape, length, result)
        for engine in (prefill, *decodes):
            await wait_all_blocks_free(cluster, engine)

    run_cluster(main)


async def prefill_params(cluster: Cluster, server: Server, length: int) -> dict[str, Any]:
    """What a router would do first: one token from the prefill engine, and its params."""
    answer = await complete_on(
        cluster,
        server,
        prompt_of(length),
        max_tokens=1,
        kv_transfer_params={"do_remote_decode": True},
    )
    params: dict[str, Any] = answer["kv_transfer_params"]
    return params


async def decode(
    cluster: Cluster, server: Server, length: int, params: dict[str, Any]
) -> tuple[int, dict[str, Any]]:
    """What a router would do next. Returns status and body."""
    body = {
        "prompt": prompt_of(length),
        "max_tokens": MAX_TOKENS,
        "return_token_ids": True,
        "kv_transfer_params": params,
    }
    async with cluster.session.post(f"{server.url}/v1/completions", json=body) as response:
        return response.status, json.loads(await response.text())


def test_a_prompt_of_one_token_moves_nothing_and_is_released_at_once(
    run_cluster: RunCluster,
) -> None:
    """Also as the very first request, while the two engines do not know each other yet."""

    async def main(cluster: Cluster) -> None:
        common = ["--engine", "block=16"]
        prefill, _, router = await start_pair(cluster, common, common)
        for length in (1, 5, 1):
            prompt = prompt_of(length)
            result = await complete(cluster.session, router.url, prompt, MAX_TOKENS)
            check(LLAMA, "tp=1", length, result)
            await wait_all_blocks_free(cluster, prefill)

    run_cluster(main)


def test_a_lost_producer_is_recomputed_or_fails_by_policy(run_cluster: RunCluster) -> None:
    connector = {"peer": {"hello_timeout_s": 3, "heartbeat_interval_s": 0.5, "timeout_s": 3}}
    common = ["--engine", "block=16", "--connector", json.dumps(connector)]

    async def main(cluster: Cluster) -> None:
        prefill = await cluster.start_engine("prefill", "prefill", common)
        recompute = await cluster.start_engine("recompute", "decode", common)
        fail = await cluster.start_engine("fail", "decode", [*common, "--failure-policy", "fail"])
        await cluster.wait_healthy(prefill, recompute, fail)
        first = await prefill_params(cluster, prefill, 40)
        second = await prefill_params(cluster, prefill, 40)
        prefill.child.process.kill()
        await prefill.child.process.wait()
        status, answer = await decode(cluster, recompute, 40, first)
        assert status == 200
        tokens = token_ids(expected(LLAMA, 40))
        assert answer["choices"][0]["token_ids"] == tokens
        status, answer = await decode(cluster, fail, 40, second)
        assert status == 502
        assert answer["error"]["type"] == "server_error"
        for engine in (recompute, fail):
            await wait_all_blocks_free(cluster, engine)

    run_cluster(main)


def test_forged_params_harm_only_their_own_request(run_cluster: RunCluster) -> None:
    """What a client may send in place of a producer's params: never other tokens, never the engine's end."""

    async def main(cluster: Cluster) -> None:
        # without hits, so that every prompt is asked for as a whole
        common = ["--engine", "block=16,prefix=off"]
        prefill = await cluster.start_engine("prefill", "prefill", common)
        target = await cluster.start_engine("decode", "decode", common)
        await cluster.wait_healthy(prefill, target)
        tokens = token_ids(expected(LLAMA, 40))
        for change in (
            {"transfer_secret": "0" * 32},
            {"remote_request_id": "no-such-request"},
            {"remote_engine_id": "no-such-engine"},
            {"remote_block_ids": [[0]]},
            {"remote_block_ids": [[1 << 30] * 3]},
            {"remote_num_tokens": 1 << 30},
            {"tp_size": 7},
        ):
            params = await prefill_params(cluster, prefill, 40)
            status, answer = await decode(cluster, target, 40, {**params, **change})
            assert status == 200, (change, answer)
            assert answer["choices"][0]["token_ids"] == tokens, change
        refusals: tuple[dict[str, Any], ...] = (
            {"remote_block_ids": []},
            {"remote_port": 0},
            {"transfer_secret": "x"},
        )
        for refused in refusals:
            params = await prefill_params(cluster, prefill, 40)
            status, answer = await decode(cluster, target, 40, {**params, **refused})
            assert status == 400, (refused, answer)
        params = await prefill_params(cluster, prefill, 40)
        status, answer = await decode(cluster, target, 40, params)
        assert answer["choices"][0]["token_ids"] == tokens
        assert answer["kv_transfer_stats"]["bytes"] == expected_bytes(LLAMA, "tp=1", 40)

    run_cluster(main)


def test_blocks_that_nobody_reads_are_free_after_the_lease(run_cluster: RunCluster) -> None:
    connector = {
        "lease": {"duration_s": 2},
        "peer": {"heartbeat_interval_s": 0.5, "timeout_s": 3},
    }
    common = ["--engine", "block=16", "--connector", json.dumps(connector)]

    async def main(cluster: Cluster) -> None:
        prefill = await cluster.start_engine("prefill", "prefill", common)
        late = await cluster.start_engine("late", "decode", common)
        await cluster.wait_healthy(prefill, late)
        params = await prefill_params(cluster, prefill, 40)
        await wait_all_blocks_free(cluster, prefill)
        status, answer = await decode(cluster, late, 40, params)
        assert status == 200
        tokens = token_ids(expected(LLAMA, 40))
        assert answer["choices"][0]["token_ids"] == tokens
        await wait_all_blocks_free(cluster, late)

    run_cluster(main)


def test_a_client_that_leaves_during_the_decode_frees_both_engines(run_cluster: RunCluster) -> None:
    async def main(cluster: Cluster) -> None:
        common = ["--engine", "block=16"]
        prefill, target, router = await start_pair(cluster, common, common)
        body = {"prompt": prompt_of(150), "max_tokens": 3000, "stream": True}
        async with cluster.session.post(f"{router.url}/v1/completions", json=body) as response:
            assert (await response.content.readline()).startswith(b"data: ")
            response.close()
        for engine in (prefill, target):
            await wait_all_blocks_free(cluster, engine)
        result = await complete(cluster.session, router.url, prompt_of(5), MAX_TOKENS)
        assert result.token_ids == token_ids(expected(LLAMA, 5))

    run_cluster(main)
