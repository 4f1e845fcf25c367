"""Engines of two vLLM releases exchange the same parameters, in either direction.

`scripts/test_vllm --contracts` runs this against the other release: both make and accept the parameters of one file.
"""

import json
from pathlib import Path

import pytest
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from kvconnector.integrations.vllm.params import FIRST_TOKEN
from kvconnector.runtime import TransferParams
from tests.vllm.cache_world import SIZE, attention
from vllm_1p1d.router import REMOTE_DECODE

pytestmark = pytest.mark.vllm

GOLDEN = json.loads(Path(__file__).with_name("kv_transfer_params.json").read_text())
WINDOW = {"sliding_window": 48}
SPECS = {
    "full": lambda: [attention()],
    "window": lambda: [attention(), attention(SlidingWindowSpec, **WINDOW)],
}
STREAMED = {"transfer_id": "t", "transfer_secret": "5" * 32}


@pytest.mark.parametrize("name", GOLDEN)
def test_every_release_makes_the_same_parameters(world, monkeypatch, name):
    monkeypatch.setattr("secrets.token_hex", lambda nbytes: "7" * 2 * nbytes)
    kind, _, is_streamed = name.partition("-")
    engine = world(role="kv_producer", specs=SPECS[kind]())
    engine.add(200, REMOTE_DECODE | (STREAMED if is_streamed else {}), max_tokens=1)
    _, (output,) = engine.step()
    params = json.loads(json.dumps(output.kv_transfer_params))
    assert params | {"remote_port": GOLDEN[name]["remote_port"]} == GOLDEN[name]


@pytest.mark.parametrize("name", GOLDEN)
def test_every_release_accepts_the_parameters(world, name):
    params = GOLDEN[name]
    engine = world(role="kv_consumer", specs=SPECS[name.partition("-")[0]]())
    engine.add(200, params)
    news, _ = engine.step()
    (want,), (load,) = news.wants, news.loads
    assert TransferParams.from_mapping(params).remote_request_id == want.transfer_id
    # one token less, unless its token is known: the decode engine computes the last one, which sees a whole window
    stop = 199 + (FIRST_TOKEN in params)
    window = 199 - WINDOW["sliding_window"] + 1
    starts = (0, window // SIZE * SIZE)[: len(params["remote_block_ids"])]
    assert load.token_ranges == tuple((start, stop) for start in starts)
    theirs = [group.block_ids.tolist() for group in load.remote_blocks]
    assert theirs == params["remote_block_ids"]
