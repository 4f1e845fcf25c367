"""`scripts/bench_cancelled`: what prompts that nobody wants any more cost the next one.

A prefill and a decode engine and a router run as processes, of vLLM or of minillm. In "cancelled" ten long prompts are
asked for, their clients leave while the prefill engine computes, and a short prompt is asked for at once. It is
compared with the same prompt alone, and behind ten that stay. In "unread" the ten are computed, no decode engine is
asked for them, and they fill the prefill engine's cache, so that the short one finds no room. Both report how long it
waits for its first token, and for how long each engine holds more blocks than that prompt needs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
    suppress,
)
from functools import partial
from pathlib import Path
from typing import NamedTuple

import aiohttp

from kvconnector.bench.environment import commit, cpu_name
from minillm.cluster import Cluster
from tests.support.ports import free_ports
from vllm_1p1d import run as vllm
from vllm_1p1d.model import VOCAB_SIZE, make_model
from vllm_1p1d.router import REMOTE_DECODE

NUM_LONG = 10
LONG_TOKENS, SHORT_TOKENS, STEP_TOKENS = 1950, 700, 256
BLOCK_TOKENS, NUM_BLOCKS = 64, 320
"""The prefill engine's cache: ten long prompts fill it, but for less than the short one needs."""
BYTES_PER_TOKEN = 2 * 4 * 4 * 32 * 4
"""K and V of the example's model: four layers, four heads of 32 floats."""
LEAVE_AFTER_S, HELD_TIMEOUT_S, POLL_S = 0.2, 60.0, 0.02
PORTS = (0, 1, 2, vllm.CONTROL_PORT_OFFSETS["prefill"], vllm.CONTROL_PORT_OFFSETS["decode"])
MINILLM, OURS, RECLAIMS, NIXL = "minillm", "kvconnector", "kvconnector-reclaims", "nixl"
RECLAIM = {"KVCONNECTOR_LEASE_RECLAIM_ABOVE": "0.5"}


class Deployment(NamedTuple):
    """Base URLs of a router and its two engines, and the name of their model."""

    router: str
    prefill: str
    decode: str
    model: str = "minillm"


class Found(NamedTuple):
    """Seconds to the short prompt's first token, and until each engine holds no more blocks than it needs; infinite if
    that takes more than `HELD_TIMEOUT_S`.
    """

    first_token_s: float
    prefill_held_s: float
    decode_held_s: float


@asynccontextmanager
async def of_minillm(folder: Path) -> AsyncIterator[Deployment]:
    """Run minillm's engines, and its router."""
    shape = f"block={BLOCK_TOKENS},blocks={NUM_BLOCKS}"
    options = ["--engine", shape, "--max-batched-tokens", str(STEP_TOKENS)]
    async with Cluster(folder) as cluster:
        engines = [
            await cluster.start_engine(role, role, options) for role in ("prefill", "decode")
        ]
        await cluster.wait_healthy(*engines)
        router = await cluster.start_router("router", engines[0], engines[1])
        await cluster.wait_healthy(router)
        yield Deployment(router.url, engines[0].url, engines[1].url)


@asynccontextmanager
async def of_vllm(
    connector: str, environment: dict[str, str], folder: Path
) -> AsyncIterator[Deployment]:
    """Run vLLM's servers with a connector, and the example's router."""
    model = folder / "model"
    base: int = free_ports(PORTS)  # type: ignore[no-untyped-call]  # tests have no types
    make_model(model)
    urls = [f"http://127.0.0.1:{base + number}" for number in range(3)]
    cache_bytes = BYTES_PER_TOKEN * BLOCK_TOKENS * NUM_BLOCKS
    more = f"--max-num-batched-tokens {STEP_TOKENS} --kv-cache-memory-bytes {cache_bytes}"
    with ExitStack() as stack:
        for number, role in enumerate(("prefill", "decode")):
            command, variables = vllm.engine_command(
                role, number, model=str(model), port=base, connector=connector, more=more
            )
            variables |= {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", **environment}
            vllm.start(stack, folder / f"{role}.log", command, variables)
        for role, url in zip(("prefill", "decode"), urls[1:], strict=True):
            await _healthy(url, role)
        command = [sys.executable, str(Path(vllm.__file__).with_name("router.py"))]
        command += ["--port", str(base), "--prefill", urls[1], "--decode", urls[2]]
        vllm.start(stack, folder / "router.log", command)
        await _healthy(urls[0], "router")
        yield Deployment(urls[0], urls[1], urls[2], str(model))


DEPLOYMENTS: dict[str, Callable[[Path], AbstractAsyncContextManager[Deployment]]] = {
    MINILLM: of_minillm,
    OURS: partial(of_vllm, "KVConnector", {}),
    RECLAIMS: partial(of_vllm, "KVConnector", RECLAIM),
    NIXL: partial(of_vllm, "NixlConnector", {}),
}


async def _healthy(url: str, name: str) -> None:
    deadline = time.monotonic() + vllm.START_TIMEOUT_S
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < deadline:
            with suppress(aiohttp.ClientError):
                async with session.get(f"{url}/health") as answer:
                    if answer.status == vllm.OK:
                        return
            await asyncio.sleep(0.5)
    raise SystemExit(f"the {name} did not start; see its log")


class Client:
    """Requests to a deployment, none of which has a prompt that begins like another's."""

    def __init__(self, session: aiohttp.ClientSession, at: Deployment) -> None:
        self._session, self._at = session, at
        self._source = random.Random(1)

    def prompt(self, tokens: int) -> list[int]:
        """Return a new prompt."""
        return [self._source.randrange(1, VOCAB_SIZE) for _ in range(tokens)]

    async def first_token_s(self, prompt: Sequence[int], max_tokens: int = 4) -> float:
        """Ask the router for a completion, and read it to its end. Returns the seconds to its first token.

        Raises:
            SystemExit: it failed.
        """
        body = {"model": self._at.model, "prompt": prompt, "max_tokens": max_tokens}
        body |= {"stream": True, "temperature": 0.0, "ignore_eos": True}
        started = time.monotonic()
        first = 0.0
        async with self._session.post(f"{self._at.router}/v1/completions", json=body) as answer:
            async for line in answer.content:
                if line.startswith(b"data: {") and not first:
                    first = time.monotonic() - started
                if answer.status != vllm.OK or b'"error"' in line:
                    raise SystemExit(f"a completion failed: {line.decode(errors='replace')}")
        return first

    async def offer(self, prompt: Sequence[int]) -> None:
        """Have the prefill engine compute a prompt for a decode engine that is never asked."""
        body = {"model": self._at.model, "prompt": prompt, "max_tokens": 1}
        body |= {"temperature": 0.0, "kv_transfer_params": REMOTE_DECODE}
        async with self._session.post(f"{self._at.prefill}/v1/completions", json=body) as answer:
            if not (await answer.json()).get("kv_transfer_params"):
                raise SystemExit("the prefill engine has offered nothing")

    async def poke(self, url: str) -> None:
        """Have an engine take steps, since vLLM's gauges change with a step only."""
        body = {"model": self._at.model, "prompt": self.prompt(3), "max_tokens": 1}
        async with self._session.post(f"{url}/v1/completions", json=body) as answer:
            await answer.read()

    async def held(self, url: str) -> int:
        """Return how many blocks of its cache an engine holds."""
        async with self._session.get(f"{url}/metrics") as answer:
            text = await answer.text()
        if free := re.search(r"(?m)^minillm_free_blocks (\S+)$", text):
            return NUM_BLOCKS - int(float(free[1]))
        share = re.search(r"(?m)^vllm:kv_cache_usage_perc\{.*\} (\S+)$", text)
        return round(float(share[1]) * (NUM_BLOCKS - 1)) if share else 0

    async def held_s(self, url: str) -> float:
        """Return the seconds until an engine holds no more blocks than the short prompt needs."""
        started, needed = time.monotonic(), -(-SHORT_TOKENS // BLOCK_TOKENS) + 1
        while time.monotonic() < started + HELD_TIMEOUT_S:
            await self.poke(url)
            if await self.held(url) <= needed:
                return time.monotonic() - started
            await asyncio.sleep(POLL_S)
        return float("inf")

    async def measured(self) -> Found:
        """Ask for a short prompt, and see what the engines hold meanwhile."""
        watched = [self.held_s(url) for url in (self._at.prefill, self._at.decode)]
        asked = self.first_token_s(self.prompt(SHORT_TOKENS))
        return Found(*await asyncio.gather(asked, *watched))


async def alone(client: Client) -> Found:
    """The short prompt alone, the median of five."""
    found = [await client.measured() for _ in range(5)]
    return Found(*map(statistics.median, zip(*found, strict=True)))


async def behind(client: Client, *, leaves: bool) -> Found:
    """The short prompt, after ten long ones whose clients have left or stay."""
    prompts = [client.prompt(LONG_TOKENS) for _ in range(NUM_LONG)]
    asked = [asyncio.create_task(client.first_token_s(each, 16)) for each in prompts]
    await asyncio.sleep(LEAVE_AFTER_S)
    done = [each.result() for each in asked if each.done()]
    if len(done) > 1:
        raise SystemExit(f"{len(done)} long prompts were done within {LEAVE_AFTER_S} s")
    if leaves:
        for each in asked:
            each.cancel()
    found = await client.measured()
    await asyncio.gather(*asked, return_exceptions=True)
    return found


async def unread(client: Client) -> Found:
    """The short prompt, while ten offers that nobody reads fill the cache."""
    for _ in range(NUM_LONG):
        await client.offer(client.prompt(LONG_TOKENS))
    return await client.measured()


CASES: dict[str, Callable[[Client], Awaitable[Found]]] = {
    "alone": alone,
    "behind ten that stay": partial(behind, leaves=False),
    "behind ten cancelled": partial(behind, leaves=True),
    "behind ten unread": unread,
}


async def measure(name: str, folder: Path) -> dict[str, Found]:
    """Run every case with one deployment."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    async with AsyncExitStack() as stack:
        at = await stack.enter_async_context(DEPLOYMENTS[name](folder))
        connector = aiohttp.TCPConnector(limit=0)
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        client = Client(session, at)
        for _ in range(3):  # the engines know each other, and stream
            await client.first_token_s(client.prompt(SHORT_TOKENS))
        for case, run in CASES.items():
            found[case] = await run(client)
            sys.stdout.write(f"{name}, {case}: {_row(found[case])}\n")
            sys.stdout.flush()
    return found


def _row(found: Found) -> str:
    return ", ".join(
        f"{name} {seconds:.2f} s"
        for name, seconds in zip(("first token", "P holds", "D holds"), found, strict=True)
    )


def main() -> int:
    """Measure the named deployments, one after the other."""
    parser = argparse.ArgumentParser(prog="scripts/bench_cancelled", description=__doc__)
    parser.add_argument(
        "deployments", nargs="*", metavar="DEPLOYMENT", help=f"of {', '.join(DEPLOYMENTS)}"
    )
    parser.add_argument("--folder", type=Path, help="for the logs of engines")
    arguments = parser.parse_args()
    if unknown := {*arguments.deployments} - {*DEPLOYMENTS}:
        parser.error(f"no deployment named {', '.join(sorted(unknown))}")
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="kvconnector-cancelled-"))
    found = {
        name: asyncio.run(measure(name, folder / name))
        for name in arguments.deployments or DEPLOYMENTS
    }
    facts = {"commit": commit(), "machine": f"{os.cpu_count()} x {cpu_name()}"}
    rows = {
        name: {case: each._asdict() for case, each in got.items()} for name, got in found.items()
    }
    (folder / "cancelled.json").write_text(json.dumps({"environment": facts, **rows}, indent=1))
    sys.stdout.write(f"{facts}\n{folder / 'cancelled.json'}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
