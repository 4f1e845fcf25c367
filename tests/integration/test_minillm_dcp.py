"""Engines whose ranks share the tokens of a sequence: decode context parallelism on either side, or on both.

Real processes, real UCX. The completions must be those of a single-rank model that computes everything in this process.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

from minillm.cluster import Cluster
from minillm.config import Architecture, ModelConfig
from minillm.threaded import token_ids
from tests.integration.minillm_engines import (
    RunCluster,
    complete_on,
    expected_tokens,
    prompt_of,
    start_pair,
    wait_all_blocks_free,
)

pytestmark = [pytest.mark.integration, pytest.mark.ucx, pytest.mark.timeout(170)]

MAX_TOKENS = 6
DIRECT = {"paths": {"direct": "always"}}
SENT = {"paths": {"direct": "never"}}
PLAIN = {**SENT, "staging": {"pump": False}}


@dataclass(frozen=True)
class Case:
    """Two engines, how bytes go between them, and which tokens of a known beginning the decode engine has in whole
    blocks of 150 tokens and their answer.
    """

    prefill: str
    decode: str
    connector: dict[str, dict[str, object]]
    path: str
    known: int
    architecture: Architecture = "llama"


CASES = {
    "one to two": Case(
        "tp=1,block=16", "dcp=2,interleave=8,block=16,layout=NHD", SENT, "pump", 128
    ),
    "two to one": Case("dcp=2,interleave=16,block=32", "tp=1,block=16,layout=NHD", DIRECT, "", 144),
    "two to others": Case(
        "dcp=2,block=12,layout=NHD", "dcp=2,interleave=6,block=24", PLAIN, "packed", 144
    ),
    "two to two over stages": Case(
        "pp=2,dcp=2,interleave=4,block=16",
        "pp=2,layers=3+5,dcp=2,interleave=4,block=8",
        {},
        "",
        144,
    ),
    "a latent": Case(
        "tp=2,block=16", "dcp=2,block=20,layout=HDN", SENT, "pump", 120, architecture="mla"
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_ranks_that_share_tokens_decode_what_others_prefilled(
    name: str, run_cluster: RunCluster
) -> None:
    """Also behind a prefix hit, where what is missing begins inside a turn of the interleave."""
    case = CASES[name]
    model = ModelConfig(architecture=case.architecture)
    common = ["--model", case.architecture, "--failure-policy", "fail"]
    common += ["--connector", json.dumps(case.connector)]
    # tokens of the first prompt that the prompt begins with, new ones behind them, found at the decode engine
    turns = ((0, 150, 0), (150, 20, case.known), (0, 5, 0))

    async def main(cluster: Cluster) -> None:
        prefill, decode, _ = await start_pair(
            cluster, [*common, "--engine", case.prefill], [*common, "--engine", case.decode]
        )
        for num_known, num_new, known in turns:
            prompt = prompt_of(150)[:num_known] + prompt_of(num_new)
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
            expected = expected_tokens(model, prompt, MAX_TOKENS)
            assert answer["choices"][0]["token_ids"] == token_ids(expected)
            stats = answer["kv_transfer_stats"]
            missing = len(prompt) - 1 - known
            assert (stats["cached_tokens"], stats["loaded_tokens"]) == (known, missing)
            parts = 1 if case.architecture == "mla" else 2
            token_bytes = model.num_layers * parts * model.cache_heads * model.cache_dim * 4
            # the ranks of a group store each token once
            assert stats["bytes"] == missing * token_bytes
            assert case.path in stats["path"]
        await wait_all_blocks_free(cluster, prefill, decode)

    run_cluster(main)
