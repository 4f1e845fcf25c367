"""Prefill on one engine, decode on another, over every kind of difference between the two.

Real processes, real UCX. The tokens must be those of a single-rank model that computes everything in this process.
Property tests have all shapes; these are kinds of parallelism, of block sizes and of layouts in whole engines.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from minillm.cluster import Cluster, Server
from minillm.config import ModelConfig, parse_engine_options
from tests.integration import minillm_engines as me
from tests.support.local_engines import token_ids

pytestmark = [pytest.mark.integration, pytest.mark.ucx, pytest.mark.timeout(170)]

MAX_TOKENS = 6
LONG = 150
LLAMA = ModelConfig()
MLA = ModelConfig(architecture="mla")
ONE_HEAD = ModelConfig(num_kv_heads=1)
PLAIN = {**me.PACKED, "staging": {"pump": False}}


@dataclass(frozen=True)
class Case:
    """Two engines, and what they share. `path` is in the path of every load."""

    prefill: str
    decode: str
    model: ModelConfig = LLAMA
    connector: dict[str, Any] | None = None
    path: str = ""


CASES = {
    "stages and ranks to one": Case(
        "tp=2,pp=2,layers=5+3,block=16", "tp=1,block=8,layout=NHD", connector=me.PACKED
    ),
    "one to token stripes": Case(
        "tp=1,block=16", "dcp=2,interleave=8,block=16,layout=NHD", connector=me.DIRECT
    ),
}
SLOW_CASES = {
    "ranks to ranks": Case("tp=2,block=16,layout=NHD", "tp=2,block=4,layout=CROSS"),
    "both to stages": Case("tp=2,pp=2,block=16,layout=NHD", "pp=2,layers=2+6,block=64"),
    "latents to stages": Case("tp=2,block=16", "pp=2,block=64,layout=CROSS", MLA),
    "latents transposed": Case("tp=2,block=16", "tp=2,block=5,layout=HDN", MLA),
    "one head to ranks": Case("tp=2,block=16,layout=HDN", "tp=2,block=12,layout=HDN", ONE_HEAD),
    "token stripes to one": Case(
        "dcp=2,interleave=16,block=32", "tp=1,block=16,layout=NHD", connector=me.DIRECT
    ),
    "token stripes to others": Case(
        "dcp=2,block=12,layout=NHD",
        "dcp=2,interleave=6,block=24",
        connector=PLAIN,
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


def token_bytes(case: Case) -> int:
    """Of one token on all ranks of D: each stores it once, whose heads or latents it has and whose turn it is."""
    model, shape = case.model, parse_engine_options(case.decode)
    dcp_size = int(shape.get("dcp", 1))
    copies = int(shape.get("tp", dcp_size)) // model.cache_heads // dcp_size
    parts = 1 if model.architecture == "mla" else 2
    return model.num_layers * parts * model.cache_heads * model.cache_dim * 4 * max(1, copies)


def known_tokens(case: Case) -> int:
    """Tokens of the long prompt that are in whole blocks of D."""
    shape = parse_engine_options(case.decode)
    block = int(shape["block"]) * int(shape.get("dcp", 1))
    return LONG // block * block


@pytest.mark.parametrize("case", ALL)
def test_decode_continues_what_another_engine_prefilled(
    case: Case, run_cluster: me.RunCluster, tmp_path: Path
) -> None:
    """Prompts inside a block, of a block and a bit, of many blocks; and one that D knows the beginning of."""
    common = me.engine_options(tmp_path, case.model, case.connector or {})

    async def turn(cluster: Cluster, servers: list[Server], prompt: tuple[int, ...]) -> int:
        offer = await me.offer_of(cluster, servers[0], prompt)
        answer = await me.decode_offered(cluster, servers[1], prompt, offer, MAX_TOKENS)
        expected = token_ids(me.expected_tokens(case.model, prompt, MAX_TOKENS))
        assert answer["choices"][0]["token_ids"] == expected
        stats = answer["kv_transfer_stats"]
        assert stats["bytes"] == stats["loaded_tokens"] * token_bytes(case)
        assert case.path in stats["path"]
        assert stats["cached_tokens"] + stats["loaded_tokens"] == len(prompt) - 1
        return int(stats["cached_tokens"])

    async def main(cluster: Cluster) -> None:
        prefill, decode, _ = await me.start_pair(
            cluster, [*common, "--engine", case.prefill], [*common, "--engine", case.decode]
        )
        servers = [prefill, decode]
        first = (turn(cluster, servers, me.prompt_of(length)) for length in (5, 17, LONG))
        assert await asyncio.gather(*first) == [0, 0, 0]
        # what is missing may begin inside a turn of the interleave
        begun = me.prompt_of(LONG) + me.prompt_of(20)
        assert await turn(cluster, servers, begun) == known_tokens(case)
        await me.wait_all_blocks_free(cluster, prefill, decode)

    run_cluster(main)
