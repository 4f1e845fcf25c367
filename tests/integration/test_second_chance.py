"""Engines that are killed: what a decode engine has taken and lost, and what a prefill engine takes with it.

Real processes, real UCX. The completions must be those of a single-rank model that computes everything in this process.
"""

import asyncio
import json
import os
import signal

import aiohttp
import pytest

from minillm.config import ModelConfig
from tests.integration.lost_prefill import MAX_TOKENS, kill, lose_in_mid_prompt, ranks, start
from tests.integration.minillm_engines import (
    complete_on,
    expected_tokens,
    offer_of,
    prompt_of,
    wait_all_blocks_free,
)
from tests.support.local_engines import token_ids

pytestmark = [pytest.mark.integration, pytest.mark.ucx, pytest.mark.timeout(170)]

FAIL = ["--failure-policy", "fail"]
PACKED_IN_PIECES = {
    "paths": {"direct": "never"},
    "staging": {"chunk_bytes": 4096, "budget_bytes": 65536},
}
"""A read has many more chunks than are under way at once."""


def signal_ranks(server, number):
    for pid in ranks(server):
        os.kill(pid, number)


def expected(prompt):
    return token_ids(expected_tokens(ModelConfig(), prompt, MAX_TOKENS))


async def computed(cluster, server):
    return (await server.metrics(cluster.session))["minillm_computed_tokens"]


async def until_loading(cluster, server):
    """Wait until an engine has asked for a prompt."""
    while True:
        async with cluster.session.get(f"{server.url}/transfers") as answer:
            if await answer.json():
                return
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("when", ["in mid read", "before it has asked"])
def test_what_one_decode_engine_has_lost_another_one_decodes(when, run_cluster):
    """The first engine is killed while the prefill engine sends to it, or is gone before it has started."""
    prompt = prompt_of(1500)
    options = [*FAIL, "--connector", json.dumps(PACKED_IN_PIECES)]

    async def main(cluster):
        prefill = await cluster.start_engine("prefill", "prefill", options)
        decodes = [await cluster.start_engine(name, "decode", options) for name in ("d1", "d2")]
        await cluster.wait_healthy(prefill, *decodes)
        first, second = decodes
        for each in decodes:  # they know each other
            known = prompt_of(20)
            params = await offer_of(cluster, prefill, known)
            await complete_on(cluster, each, known, max_tokens=1, kv_transfer_params=params)
        params = await offer_of(cluster, prefill, prompt)
        signal_ranks(prefill, signal.SIGSTOP)
        taken = asyncio.create_task(
            complete_on(cluster, first, prompt, max_tokens=1, kv_transfer_params=params)
        )
        if when == "in mid read":
            await until_loading(cluster, first)
            # it has asked and takes no more, so the read cannot end
            signal_ranks(first, signal.SIGSTOP)
        else:
            kill(first)
        signal_ranks(prefill, signal.SIGCONT)
        await offer_of(cluster, prefill, prompt_of(30))  # the prefill engine has gone on
        if when == "in mid read":
            kill(first)
        (lost,) = await asyncio.gather(taken, return_exceptions=True)
        assert isinstance(lost, OSError | aiohttp.ClientError), lost
        before = await computed(cluster, prefill)
        answer = await complete_on(
            cluster, second, prompt, max_tokens=MAX_TOKENS, kv_transfer_params=params
        )
        assert answer["choices"][0]["token_ids"] == expected(prompt)
        # all of it came from the prefill engine, which did not compute it again
        assert answer["kv_transfer_stats"]["loaded_tokens"] == len(prompt) - 1
        assert await computed(cluster, prefill) == before

    run_cluster(main)


def test_a_failure_says_where_to_try_again(run_cluster):
    """The answers of a decode engine whose producer does not know a request, or is gone."""
    prompt = prompt_of(60)
    # a direct reader would find the blocks without the secret
    options = {"paths": {"direct": "never"}}

    async def main(cluster):
        prefill = await cluster.start_engine("prefill", "prefill", FAIL)
        decode = await cluster.start_engine(
            "decode", "decode", [*FAIL, "--connector", json.dumps(options)]
        )
        await cluster.wait_healthy(prefill, decode)

        async def error_of(params, status=502):
            answer = await complete_on(
                cluster, decode, prompt, status=status, kv_transfer_params=params
            )
            return answer["error"]["cause"], answer["error"]["retry"]

        params = await offer_of(cluster, prefill, prompt)
        name, _, *rest = params["remote_request_id"].split("|")
        unknown = {**params, "remote_request_id": "|".join([name, "0" * 32, *rest])}
        assert await error_of(unknown) == ("UnknownTransferError", "same")
        kill(prefill)
        cause, retry = await error_of(params)
        assert cause in ("PeerLostError", "PeerUnreachableError")
        assert retry == "other"

    run_cluster(main)


def test_another_prefill_engine_takes_over_in_mid_prompt(run_cluster):
    """The client's request goes on by itself; `lost_prefill` measures how long it takes."""

    async def main(cluster):
        pairs, router = await start(cluster)
        for seed in range(2):  # each engine streams, and the router knows it
            await complete_on(cluster, router, prompt_of(30, seed), max_tokens=1)
        prompt = prompt_of(300)
        result, _ = await lose_in_mid_prompt(cluster, pairs[0], router, prompt)
        assert result.token_ids == expected(prompt)
        assert result.kv_transfer_stats["bytes"] > 0
        await wait_all_blocks_free(cluster, *pairs[2:])

    run_cluster(main)
