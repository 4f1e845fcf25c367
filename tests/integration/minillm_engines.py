"""Prompts, the reference tokens and engine gauges for tests of minillm's servers."""

import asyncio
import functools
import random

from minillm.client import complete
from minillm.config import ModelConfig
from minillm.demo import LOGPROB_TOLERANCE
from tests.support.local_engines import generate, token_ids

RELEASE_TIMEOUT_S = 20.0
DIRECT = {"paths": {"direct": "always"}}
PACKED = {"paths": {"direct": "never"}}


def prompt_of(length, seed=0):
    """Return a random prompt whose beginning no other prompt shares."""
    rng = random.Random(f"{length} {seed}")
    return tuple(rng.randrange(ModelConfig().vocab_size) for _ in range(length))


@functools.cache
def expected_tokens(model, prompt, max_tokens):
    """Return the tokens that one rank computes in this process, without a connector."""
    return generate(model, list(prompt), max_tokens)


async def answered(cluster, router, prompt, max_tokens):
    """Check a completion of the default model: exact tokens, log-probabilities within rounding, and a transferred
    cache, unless the prompt has only one token.
    """
    result = await complete(cluster.session, router.url, prompt, max_tokens)
    expected = expected_tokens(ModelConfig(), prompt, max_tokens)
    assert result.token_ids == token_ids(expected)
    pairs = zip(result.logprobs, expected, strict=True)
    assert max(abs(a - b.logprob) for a, b in pairs) < LOGPROB_TOLERANCE
    assert (result.kv_transfer_stats["bytes"] > 0) == (len(prompt) > 1)


async def start_pair(cluster, prefill, decode, *, is_routed=False):
    """Start a prefill and a decode engine with these options, and on request their router, until all are healthy."""
    producer = await cluster.start_engine("prefill", "prefill", prefill)
    consumer = await cluster.start_engine("decode", "decode", decode)
    await cluster.wait_healthy(producer, consumer)
    if not is_routed:
        return producer, consumer
    router = await cluster.start_router("router", producer, consumer)
    await cluster.wait_healthy(router)
    return producer, consumer, router


async def wait_all_blocks_free(cluster, *servers, timeout_s=RELEASE_TIMEOUT_S):
    """Wait until every engine has all its blocks back."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    for server in servers:
        while True:
            values = await server.metrics(cluster.session)
            if values["minillm_free_blocks"] == values["minillm_blocks"]:
                break
            late = asyncio.get_running_loop().time() >= deadline
            assert not late, f"blocks are still held: {values}"
            await asyncio.sleep(0.05)


async def complete_on(cluster, server, prompt, *, status=200, **fields):
    """Request a completion, which must have this status. Returns the whole answer."""
    body = {"prompt": list(prompt), "return_token_ids": True, **fields}
    async with cluster.session.post(f"{server.url}/v1/completions", json=body) as response:
        answer = await response.json()
    assert response.status == status, answer
    return answer


async def offer_of(cluster, producer, prompt, **fields):
    """Request one token from the producer, as a router does first. Returns its parameters."""
    asked = {"do_remote_decode": True}
    answer = await complete_on(
        cluster, producer, prompt, max_tokens=1, kv_transfer_params=asked, **fields
    )
    return answer["kv_transfer_params"]
