"""Prompts that the decode engine reads while the prefill engine computes them, a part in each step.

The tokens must be those of a single-rank model, with streaming, without, and switched from one request to the next.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from minillm.client import complete
from minillm.cluster import Cluster, Server
from minillm.config import ModelConfig
from minillm.metrics import read_metrics
from tests.integration import minillm_engines as me
from tests.support.local_engines import token_ids

pytestmark = [pytest.mark.integration, pytest.mark.ucx, pytest.mark.timeout(170)]

MAX_TOKENS = 5
STEP_TOKENS = "40"


@dataclass(frozen=True)
class Case:
    """Two engines and their model."""

    prefill: str
    decode: str
    connector: dict[str, Any]
    architecture: str = "llama"


CASES = {
    "one to one": Case("tp=1,block=16", "tp=1,block=16", me.DIRECT),
    "ranks to stages": Case("tp=2,block=16", "pp=2,block=6,layout=NHD", me.PACKED),
    "windows": Case("tp=1,block=8", "tp=2,block=16,layout=NHD", me.PACKED, "hybrid"),
    "states": Case("tp=1,block=16,states=16", "tp=1,block=8,states=16", me.DIRECT, "mamba"),
}


async def offered(
    cluster: Cluster, pair: tuple[Server, Server], prompt: tuple[int, ...]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """One engine after the other: the prefill engine's offer, and the decode engine's answer."""
    offer = await me.offer_of(cluster, pair[0], prompt)
    return offer, await me.decode_offered(cluster, pair[1], prompt, offer, MAX_TOKENS)


async def streamed(
    cluster: Cluster,
    pair: tuple[Server, Server],
    offer: dict[str, Any],
    prompt: tuple[int, ...],
    late_s: float = 0.0,
) -> dict[str, Any]:
    """Both at once, by a router that knows the prefill engine from an offer. The decode engine's answer."""
    prefill, decode = pair
    names = {"transfer_id": secrets.token_hex(8), "transfer_secret": secrets.token_hex(16)}
    address = {key: offer[key] for key in ("remote_engine_id", "remote_host", "remote_port")}
    theirs = {"do_remote_prefill": True, **address, **names}
    decoded = asyncio.create_task(me.decode_offered(cluster, decode, prompt, theirs, MAX_TOKENS))
    await asyncio.sleep(late_s)
    ours = {"do_remote_decode": True, **names}
    answer = await me.complete_on(cluster, prefill, prompt, max_tokens=1, kv_transfer_params=ours)
    # an engine that does not stream names the transfer itself
    assert answer["kv_transfer_params"]["remote_request_id"].startswith(names["transfer_id"])
    return await decoded


def checked(answer: dict[str, Any], model: ModelConfig, prompt: tuple[int, ...]) -> int:
    """Tokens of the prompt that the engine loaded; the others it knew."""
    expected = token_ids(me.expected_tokens(model, prompt, MAX_TOKENS))
    assert answer["choices"][0]["token_ids"] == expected
    stats = answer["kv_transfer_stats"]
    assert stats["cached_tokens"] + stats["loaded_tokens"] == len(prompt) - 1
    assert stats["bytes"] > 0
    return int(stats["loaded_tokens"])


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_streamed_prompts_decode_to_the_same_tokens(
    case: Case, run_cluster: me.RunCluster, tmp_path: Path
) -> None:
    """Prompts of one step and of many, one that both know the beginning of, and others in turn with offered ones."""
    model = ModelConfig(architecture=case.architecture)  # type: ignore[arg-type]
    common = me.engine_options(tmp_path, model, case.connector)
    common += ["--max-batched-tokens", STEP_TOKENS]

    async def main(cluster: Cluster) -> None:
        *pair, _ = await me.start_pair(
            cluster, [*common, "--engine", case.prefill], [*common, "--engine", case.decode]
        )
        servers = (pair[0], pair[1])
        first = me.prompt_of(20, 7)
        offer, answer = await offered(cluster, servers, first)
        checked(answer, model, first)
        prompts = [me.prompt_of(length, 7) for length in (5, 41, 170, 230)]
        answers = await asyncio.gather(
            *(
                streamed(cluster, servers, offer, prompt, late_s=0.1 * i)
                for i, prompt in enumerate(prompts)
            )
        )
        for answer, prompt in zip(answers, prompts, strict=True):
            assert checked(answer, model, prompt) == len(prompt) - 1
        begun = prompts[2] + me.prompt_of(90)
        answer = await streamed(cluster, servers, offer, begun)
        # windows and states are known behind fewer tokens than were loaded
        is_known = checked(answer, model, begun) < len(begun) - 1
        assert is_known or case.architecture != "llama"
        last = me.prompt_of(100, 8)
        checked((await offered(cluster, servers, last))[1], model, last)
        await me.wait_all_blocks_free(cluster, *pair)

    run_cluster(main)


@pytest.mark.parametrize(
    "case",
    [
        Case("tp=2,block=16", "tp=1,block=6,layout=NHD", me.PACKED),
        Case("tp=1,block=8", "tp=2,block=16", me.DIRECT, "hybrid"),
    ],
    ids=["llama", "windows"],
)
def test_a_prompt_of_one_step_decodes_to_the_same_tokens(
    case: Case, run_cluster: me.RunCluster, tmp_path: Path
) -> None:
    """Long enough that its first layers are read while the others are computed."""
    model = ModelConfig(architecture=case.architecture)  # type: ignore[arg-type]
    common = me.engine_options(tmp_path, model, case.connector)
    common += ["--max-batched-tokens", "2048"]

    async def main(cluster: Cluster) -> None:
        *pair, _ = await me.start_pair(
            cluster, [*common, "--engine", case.prefill], [*common, "--engine", case.decode]
        )
        servers = (pair[0], pair[1])
        offer, _ = await offered(cluster, servers, me.prompt_of(20, 7))
        for seed, length in enumerate((1100, 1700)):
            prompt = me.prompt_of(length, seed)
            answer = await streamed(cluster, servers, offer, prompt)
            assert checked(answer, model, prompt) == length - 1
        await me.wait_all_blocks_free(cluster, *pair)

    run_cluster(main)


async def _step_count(cluster: Cluster, server: Server) -> float:
    return (await read_metrics(cluster.session, server.url))["minillm_steps"]


@pytest.mark.parametrize("stream", [(True, True), (True, False), (False, True)])
def test_the_router_streams_where_both_engines_do(
    stream: tuple[bool, bool], run_cluster: me.RunCluster
) -> None:
    """Several answers of one prompt, and clients that leave in mid-prompt."""
    step = ["--max-batched-tokens", STEP_TOKENS, "--failure-policy", "fail"]
    options = [[*step, "--connector", json.dumps({"stream": each})] for each in stream]

    async def main(cluster: Cluster) -> None:
        prefill, decode, router = await me.start_pair(cluster, *options)
        for seed in range(3):
            prompt = me.prompt_of(150, seed)
            result = await complete(cluster.session, router.url, prompt, MAX_TOKENS)
            expected = me.expected_tokens(ModelConfig(), prompt, MAX_TOKENS)
            assert result.token_ids == token_ids(expected)
        prompt = me.prompt_of(130, 9)
        several = await me.complete_on(cluster, router, prompt, max_tokens=MAX_TOKENS, n=2)
        first = next(choice for choice in several["choices"] if choice["index"] == 0)
        assert first["token_ids"] == token_ids(
            me.expected_tokens(ModelConfig(), prompt, MAX_TOKENS)
        )
        leaving = asyncio.create_task(
            me.complete_on(cluster, router, me.prompt_of(2500), max_tokens=MAX_TOKENS)
        )
        before = await _step_count(cluster, prefill)
        while await _step_count(cluster, prefill) < before + 5:
            await asyncio.sleep(0.01)
        leaving.cancel()
        await me.wait_all_blocks_free(cluster, prefill, decode)

    run_cluster(main)
