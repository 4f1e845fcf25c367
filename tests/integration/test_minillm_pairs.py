"""Prefill on one engine, decode on another, with every kind of difference between the two, offered and streamed.

Real processes, real UCX. The tokens must be those of a single-rank model that computes everything in this process.
Property tests cover all shapes; these tests cover the kinds of parallelism, block sizes and layouts in whole engines.
"""

import asyncio
import json
import secrets
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from minillm.cluster import Cluster, Server
from minillm.config import ModelConfig, parse_engine_options
from tests.integration.minillm_engines import (
    DIRECT,
    PACKED,
    answered,
    complete_on,
    expected_tokens,
    offer_of,
    prompt_of,
    start_pair,
    wait_all_blocks_free,
)
from tests.support.local_engines import encoder_prompt_of, token_ids

pytestmark = [pytest.mark.integration, pytest.mark.ucx, pytest.mark.timeout(170)]

MAX_TOKENS = 6
LENGTHS = (5, 17, 41, 150)
LONG = LENGTHS[-1]
STEP_TOKENS = 40
LLAMA = ModelConfig()
MLA = ModelConfig(architecture="mla")
ONE_HEAD = ModelConfig(num_kv_heads=1)
WINDOWS = ModelConfig(architecture="hybrid")
CHUNKS = ModelConfig(architecture="chunked-local")
STATES = ModelConfig(architecture="mamba")
ENCODER = ModelConfig(architecture="encoder-decoder")
COMPRESSED = ModelConfig(architecture="compressed")


@dataclass(frozen=True)
class Case:
    """Two engines and their model. Every load's path includes `path`. Engines compute each `long` prompt in one step,
    which is so long that its first layers are read while the others are computed.
    """

    prefill: str
    decode: str
    model: ModelConfig = LLAMA
    connector: dict[str, Any] | None = None
    path: str = ""
    long: tuple[int, ...] = ()


CASES = {
    "stages and ranks to one": Case(
        "tp=2,pp=2,layers=5+3,block=16", "tp=1,block=8,layout=NHD", connector=PACKED
    ),
    "one to token stripes": Case(
        "tp=1,block=16", "dcp=2,interleave=8,block=16,layout=NHD", connector=DIRECT
    ),
    "ranks to stages": Case("tp=2,block=16", "pp=2,block=6,layout=NHD", connector=PACKED),
    "windows": Case("tp=1,block=8", "tp=2,block=16,layout=NHD", WINDOWS, PACKED),
    "chunks": Case("pp=2,block=12,layout=CROSS", "tp=2,block=16", CHUNKS, PACKED),
    "encoder": Case("tp=2,block=16", "pp=2,layers=3+5,block=6,layout=NHD", ENCODER, DIRECT),
    "states": Case("tp=1,block=16,states=16", "tp=1,block=8,states=16", STATES, DIRECT),
    "compressed rows": Case("tp=2,block=16", "tp=1,block=6,layout=NHD", COMPRESSED, PACKED),
    "one step": Case(
        "tp=2,block=16", "tp=1,block=6,layout=NHD", connector=PACKED, long=(1100, 1700)
    ),
    "windows in one step": Case(
        "tp=1,block=8", "tp=2,block=16", WINDOWS, DIRECT, long=(1100, 1700)
    ),
}
SLOW_CASES = {
    "ranks to ranks": Case("tp=2,block=16,layout=NHD", "tp=2,block=4,layout=CROSS"),
    "both to stages": Case("tp=2,pp=2,block=16,layout=NHD", "pp=2,layers=2+6,block=64"),
    "chunks to stages": Case("tp=2,block=16,layout=NHD", "pp=2,block=6,layout=HDN", CHUNKS),
    "chunks in one step": Case(
        "tp=1,block=24", "tp=2,block=8,layout=NHD", CHUNKS, PACKED, long=(1100, 1700)
    ),
    "encoder to ranks": Case(
        "pp=2,block=24,layout=CROSS", "tp=4,block=16,layout=HDN", ENCODER, PACKED
    ),
    "encoder in one step": Case(
        "tp=1,block=8", "tp=2,block=16,layout=CROSS", ENCODER, long=(1100, 1700)
    ),
    "compressed rows to stages": Case(
        "tp=1,block=8", "pp=2,layers=7+1,block=3", COMPRESSED, DIRECT
    ),
    "compressed rows to ranks": Case(
        "tp=1,block=5", "tp=2,block=16,layout=HDN", COMPRESSED, PACKED
    ),
    "latents to stages": Case("tp=2,block=16", "pp=2,block=64,layout=CROSS", MLA),
    "latents transposed": Case("tp=2,block=16", "tp=2,block=5,layout=HDN", MLA),
    "one head to ranks": Case("tp=2,block=16,layout=HDN", "tp=2,block=12,layout=HDN", ONE_HEAD),
    "token stripes to one": Case(
        "dcp=2,interleave=16,block=32", "tp=1,block=16,layout=NHD", connector=DIRECT
    ),
    "token stripes to others": Case(
        "dcp=2,block=12,layout=NHD",
        "dcp=2,interleave=6,block=24",
        connector=PACKED,
        path="packed",
    ),
    "token stripes over stages": Case(
        "pp=2,dcp=2,interleave=4,block=16", "pp=2,layers=3+5,dcp=2,interleave=4,block=8"
    ),
}
ALL = [
    *(pytest.param(case, id=name) for name, case in CASES.items()),
    *(pytest.param(case, id=name, marks=pytest.mark.slow) for name, case in SLOW_CASES.items()),
]


def token_bytes(case):
    """Return one token's bytes on all ranks of D: a rank stores it once if it has the head and shares the token."""
    model, shape = case.model, parse_engine_options(case.decode)
    dcp_size = int(shape.get("dcp", 1))
    copies = int(shape.get("tp", dcp_size)) // model.cache_heads // dcp_size
    parts = 1 if model.architecture == "mla" else 2
    return model.num_layers * parts * model.cache_heads * model.cache_dim * 4 * max(1, copies)


@dataclass(frozen=True)
class Pair:
    """The engines of a case."""

    case: Case
    cluster: Cluster
    prefill: Server
    decode: Server

    async def offered(self, prompt):
        """One engine after the other. Returns the offer, and the tokens that the decode engine already had."""
        encoder_prompt = self._encoder_prompt(prompt)
        offer = await offer_of(self.cluster, self.prefill, prompt, encoder_prompt=encoder_prompt)
        return offer, await self._decoded(prompt, offer)

    async def streamed(self, offer, prompt, late_s=0.0):
        """Both at once, as by a router that has had an offer. Returns the tokens that the decode engine already had."""
        names = {"transfer_id": secrets.token_hex(8), "transfer_secret": secrets.token_hex(16)}
        address = {key: offer[key] for key in ("remote_engine_id", "remote_host", "remote_port")}
        theirs = {"do_remote_prefill": True, **address, **names}
        decoded = asyncio.create_task(self._decoded(prompt, theirs))
        await asyncio.sleep(late_s)
        ours = {"do_remote_decode": True, **names}
        answer = await complete_on(
            self.cluster,
            self.prefill,
            prompt,
            max_tokens=1,
            kv_transfer_params=ours,
            encoder_prompt=self._encoder_prompt(prompt),
        )
        # an engine that does not stream names the transfer itself
        request_id = answer["kv_transfer_params"]["remote_request_id"]
        assert request_id.startswith(names["transfer_id"])
        return await decoded

    def _encoder_prompt(self, prompt):
        return encoder_prompt_of(self.case.model, list(prompt))

    async def _decoded(self, prompt, params):
        answer = await complete_on(
            self.cluster,
            self.decode,
            prompt,
            max_tokens=MAX_TOKENS,
            kv_transfer_params=params,
            encoder_prompt=self._encoder_prompt(prompt),
        )
        expected = token_ids(expected_tokens(self.case.model, prompt, MAX_TOKENS))
        assert answer["choices"][0]["token_ids"] == expected
        stats = answer["kv_transfer_stats"]
        if self.case.model in (LLAMA, MLA, ONE_HEAD):
            assert stats["bytes"] == stats["loaded_tokens"] * token_bytes(self.case)
        assert stats["bytes"] > 0
        assert self.case.path in stats["path"]
        assert stats["cached_tokens"] + stats["loaded_tokens"] == len(prompt) - 1
        return int(stats["cached_tokens"])


@pytest.mark.parametrize("case", ALL)
def test_decode_continues_what_another_engine_prefills(case, run_cluster, tmp_path):
    """Prompts shorter than a block, a little longer than a step, and of many steps, each offered and streamed in turn;
    and prompts whose beginning D knows, whose rest may begin inside a group of interleaved tokens.
    """

    async def main(cluster):
        path = tmp_path / "model.json"
        path.write_bytes(msgspec.json.encode(case.model))
        common = ["--model-config", str(path), "--failure-policy", "fail"]
        common += ["--connector", json.dumps(case.connector or {})]
        common += ["--max-batched-tokens", "2048" if case.long else str(STEP_TOKENS)]
        shapes = ([*common, "--engine", shape] for shape in (case.prefill, case.decode))
        prefill, decode = await start_pair(cluster, *shapes)
        pair = Pair(case, cluster, prefill, decode)
        offers = await asyncio.gather(*(pair.offered(prompt_of(n)) for n in LENGTHS))
        assert [known for _, known in offers] == [0] * len(LENGTHS)
        offer, _ = offers[0]
        streams = (
            pair.streamed(offer, prompt_of(n, 7), late_s=0.1 * i) for i, n in enumerate(LENGTHS)
        )
        assert await asyncio.gather(*streams) == [0] * len(LENGTHS)
        shape = parse_engine_options(case.decode)
        block = int(shape["block"]) * int(shape.get("dcp", 1))
        begun = prompt_of(LONG) + prompt_of(20)
        _, known = await pair.offered(begun)
        known_streamed = await pair.streamed(offer, prompt_of(LONG, 7) + prompt_of(90))
        # windows, chunks and states are known after fewer tokens than were loaded; with an encoder nothing is
        if case.model in (LLAMA, MLA, ONE_HEAD):
            assert known == known_streamed == LONG // block * block
        for seed, length in enumerate(case.long):
            assert await pair.streamed(offer, prompt_of(length, seed)) == 0
        await wait_all_blocks_free(cluster, pair.prefill, pair.decode)

    run_cluster(main)


async def _step_count(cluster, server):
    return (await server.metrics(cluster.session))["minillm_steps"]


@pytest.mark.parametrize("stream", [(True, True), (True, False), (False, True)])
def test_the_router_streams_if_both_engines_do(stream, run_cluster):
    """Several answers of one prompt, and clients that leave in mid-prompt."""
    step = ["--max-batched-tokens", str(STEP_TOKENS), "--failure-policy", "fail"]
    options = [[*step, "--connector", json.dumps({"stream": each})] for each in stream]

    async def main(cluster):
        prefill, decode, router = await start_pair(cluster, *options, is_routed=True)
        for seed in range(3):
            await answered(cluster, router, prompt_of(150, seed), MAX_TOKENS)
        prompt = prompt_of(130, 9)
        several = await complete_on(cluster, router, prompt, max_tokens=MAX_TOKENS, n=2)
        first = next(choice for choice in several["choices"] if choice["index"] == 0)
        assert first["token_ids"] == token_ids(expected_tokens(LLAMA, prompt, MAX_TOKENS))
        before = await _step_count(cluster, prefill)
        leaving = asyncio.create_task(
            complete_on(cluster, router, prompt_of(2500), max_tokens=MAX_TOKENS)
        )
        while await _step_count(cluster, prefill) < before + 5:
            await asyncio.sleep(0.01)
        leaving.cancel()
        await wait_all_blocks_free(cluster, prefill, decode)

    run_cluster(main)
