"""`python -m tests.integration.lost_prefill [RUNS]`: from the death of a prefill engine to the client's first token.

Two prefill and two decode engines, as processes of their own, behind minillm's router. In each run the engine that
computes the client's prompt is killed, and the router sends the prompt to the other one. The undisturbed time is that
of the same prompt's length without a loss.
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import sys
import time

from minillm.client import complete
from minillm.cluster import Cluster
from tests.hosts.network import descendants
from tests.integration.minillm_engines import prompt_of
from tests.support.forked import forked_by

MAX_TOKENS = 6
PROMPT_TOKENS = 300
STEP_TOKENS = 16
"""A prompt is computed in many steps, so that its engine is lost in the middle of them."""


def kill(server):
    """Kill a server and its ranks."""
    for pid in [*ranks(server), server.child.process.pid]:
        os.kill(pid, signal.SIGKILL)


def ranks(server):
    """Return the process ids of a server's ranks, which it has started or had forked."""
    pid = server.child.process.pid
    return [*descendants(pid), *forked_by(pid)]


async def start(cluster):
    """Start two pairs of engines and a router. Returns the pairs and the router, which has answered for each."""
    pairs = []
    for number in (1, 2):
        steps = ["--max-batched-tokens", str(STEP_TOKENS), "--failure-policy", "fail"]
        pairs.append(await cluster.start_engine(f"p{number}", "prefill", steps))
        pairs.append(await cluster.start_engine(f"d{number}", "decode", steps[2:]))
    await cluster.wait_healthy(*pairs)
    router = await cluster.start_router("router", *pairs)
    await cluster.wait_healthy(router)
    return pairs, router


async def timed(cluster, router, prompt):
    """Return a completion, and the monotonic time of its first token."""
    started = time.monotonic()
    result = await complete(cluster.session, router.url, prompt, MAX_TOKENS)
    return result, started + result.first_token_s


async def lose_in_mid_prompt(cluster, lost, router, prompt):
    """Ask for a completion, and kill the engine that computes it. Returns the completion and the seconds from then to
    its first token.
    """
    before = (await lost.metrics(cluster.session))["minillm_steps"]
    asked = asyncio.create_task(timed(cluster, router, prompt))
    while (await lost.metrics(cluster.session))["minillm_steps"] < before + 3:
        await asyncio.sleep(0.001)
    killed = time.monotonic()
    kill(lost)
    result, first = await asked
    return result, first - killed


async def run(number):
    """Measure one loss. Returns the seconds to the first token after it, and without a loss."""
    async with Cluster() as cluster:
        pairs, router = await start(cluster)
        usual = [
            (
                await complete(cluster.session, router.url, prompt_of(PROMPT_TOKENS, seed), 1)
            ).first_token_s
            for seed in range(4)
        ]
        prompt = prompt_of(PROMPT_TOKENS, 100 + number)
        _, after_s = await lose_in_mid_prompt(cluster, pairs[0], router, prompt)
        return after_s, statistics.median(usual[2:])


def main():
    """Print each run and the medians."""
    found = []
    for number in range(int(sys.argv[1]) if len(sys.argv) > 1 else 5):
        found.append(asyncio.run(run(number)))
        sys.stdout.write(f"{found[-1][0]:.3f} s after the loss; undisturbed {found[-1][1]:.3f} s\n")
    after, usual = (statistics.median(each) for each in zip(*found, strict=True))
    sys.stdout.write(f"median {after:.3f} s; undisturbed {usual:.3f} s\n")


if __name__ == "__main__":
    main()
