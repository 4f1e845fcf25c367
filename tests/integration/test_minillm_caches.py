"""Engines do not move known prefixes again, and swap requests out of full pools.

Real processes, real UCX. The completions must be those of a single-rank model that computes everything in this process.
"""

import asyncio
import functools

import pytest

from minillm.cache_groups import CACHED_KINDS
from minillm.config import ModelConfig
from tests.integration.minillm_engines import (
    answered,
    complete_on,
    expected_tokens,
    prompt_of,
    start_pair,
    wait_all_blocks_free,
)
from tests.support.local_engines import token_ids

pytestmark = [pytest.mark.integration, pytest.mark.ucx, pytest.mark.timeout(170)]

ITEM_BYTES = 4
SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)


def bytes_of(model, **tokens):
    """Return the bytes of `tokens` tokens of each kind of layer, without replicated heads; a state is one token. Of
    layers that compress they are rows, by the kind of cache.
    """
    if model.architecture == "compressed":
        kinds = [kind for layer in model.layer_kinds for kind in CACHED_KINDS[layer]]
        return sum(tokens[kind] * model.compressed_width(kind) * ITEM_BYTES for kind in kinds)
    head_bytes = model.head_dim * ITEM_BYTES
    kv_bytes = 2 * model.num_kv_heads * head_bytes
    # the convolution's last inputs, and the state
    width = model.mixer.conv_width - 1 + model.mixer.state_dim
    state_bytes = model.num_heads * width * head_bytes
    token_bytes = {"full": kv_bytes, "window": kv_bytes, "chunk": kv_bytes, "state": state_bytes}
    return sum(tokens[kind] * token_bytes[kind] for kind in model.layer_kinds)


def rows(fine, coarse, window, fine_inputs, coarse_inputs):
    """Return what a load brings of each kind of cache of a model that compresses."""
    return {
        "fine_rows": fine,
        "fine_index": fine,
        "coarse_rows": coarse,
        "latents": window,
        "fine_compressor": fine_inputs,
        "coarse_compressor": coarse_inputs,
    }


# Per request: leading prompt tokens in common with the previous request and its answer, new tokens after them, and
# tokens to generate; found at P; found at D, by all groups; loaded by each kind of layer. P has blocks of 16 tokens and
# a state every 64, D blocks of 6 and a state every 66. Windows and chunks have 64 tokens.
TURNS = {
    "llama": [
        ((0, 150, 50), 0, 0, {"full": 149}),
        # all but the last token of the answer is in D's cache
        ((200, 20, 6), 144, 198, {"full": 219 - 198}),
        ((100, 51, 6), 96, 96, {"full": 150 - 96}),
        ((5, 30, 6), 0, 0, {"full": 34}),
    ],
    "hybrid": [
        ((0, 150, 50), 0, 0, {"full": 149, "window": 63}),
        ((200, 20, 6), 144, 198, {"full": 219 - 198, "window": 219 - 198}),
        # D never had the window before token 96
        ((100, 51, 6), 96, 0, {"full": 150 - 96, "window": 63}),
        ((5, 30, 6), 0, 0, {"full": 34, "window": 34}),
    ],
    "chunked-local": [
        # tokens 128 to 148 are in the last one's chunk
        ((0, 150, 50), 0, 0, {"full": 149, "chunk": 149 - 128}),
        ((200, 20, 6), 144, 198, {"full": 219 - 198, "chunk": 219 - 198}),
        # D never had the tokens from 64 on
        ((100, 51, 6), 96, 0, {"full": 150 - 96, "chunk": 150 - 128}),
        ((5, 30, 6), 0, 0, {"full": 34, "chunk": 34}),
    ],
    "mamba": [
        ((0, 150, 50), 0, 0, {"full": 149, "state": 1}),
        ((200, 20, 6), 128, 198, {"full": 219 - 198, "state": 1}),
        # nor the state after token 95
        ((100, 51, 6), 64, 0, {"full": 150 - 96, "state": 1}),
        ((5, 30, 6), 0, 0, {"full": 34, "state": 1}),
    ],
    # P's blocks have 4 rows, D's 6: of 16 and 64, or of 24 and 96 tokens
    "compressed": [
        ((0, 150, 50), 0, 0, rows(37, 9, 63, 7, 149 - 144)),
        # the window is there up to token 198, in whole blocks
        ((200, 20, 6), 128, 192, rows(54 - 48, 13 - 12, 219 - 198, 7, 219 - 208)),
        # D never had the window before token 96, but it has the rows of these tokens
        ((100, 51, 6), 64, 0, rows(37 - 24, 9 - 6, 63, 7, 150 - 144)),
        ((5, 30, 6), 0, 0, rows(8, 2, 34, 7, 34 - 32)),
    ],
}


@pytest.mark.parametrize(
    "architecture", ["chunked-local", "compressed", *map(SLOW, ("llama", "hybrid", "mamba"))]
)
def test_a_known_beginning_is_neither_computed_nor_moved_again(architecture, run_cluster):
    """The missing tokens start anywhere in P's blocks and differ between layers. A stage has a single kind of layer."""
    decode_shape = "pp=2,layers=7+1,block=6,layout=NHD"
    model = ModelConfig(architecture=architecture)
    common = ["--model", architecture, "--failure-policy", "fail"]

    async def main(cluster):
        prefill, decode = await start_pair(
            cluster,
            [*common, "--engine", "block=4" if architecture == "compressed" else "block=16"],
            [*common, "--engine", decode_shape],
        )
        known = ()
        total_bytes = 0
        for (num_known, num_new, max_tokens), at_p, at_d, loaded in TURNS[architecture]:
            prompt = known[:num_known] + prompt_of(num_new)
            offer = {"do_remote_decode": True}
            offered = await complete_on(
                cluster, prefill, prompt, max_tokens=1, kv_transfer_params=offer
            )
            params = offered["kv_transfer_params"]
            answer = await complete_on(
                cluster, decode, prompt, max_tokens=max_tokens, kv_transfer_params=params
            )
            tokens = answer["choices"][0]["token_ids"]
            assert tokens == token_ids(expected_tokens(model, prompt, max_tokens))
            known = prompt + tuple(tokens)
            assert offered["usage"]["prompt_tokens_details"]["cached_tokens"] == at_p
            stats = answer["kv_transfer_stats"]
            missing = len(prompt) - 1 - at_d
            assert (stats["cached_tokens"], stats["loaded_tokens"]) == (at_d, missing)
            assert stats["bytes"] == bytes_of(model, **loaded)
            total_bytes += stats["bytes"]
        gauges = await prefill.metrics(cluster.session)
        assert gauges["minillm_prefix_hit_rate"] > 0.2
        counters = await decode.metrics(cluster.session)
        name = "kvconnector_transfer_bytes_total"
        assert sum(v for k, v in counters.items() if k.startswith(name)) == total_bytes
        await wait_all_blocks_free(cluster, prefill, decode)

    run_cluster(main)


TOKENS_TO_SWAP = 24


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("shape", ["pp=2,block=8", SLOW("dcp=2,interleave=4,block=4")])
def test_requests_that_do_not_fit_into_a_decode_engine_are_swapped(shape, device, run_cluster):
    """Six requests grow to twice its pool. Its block tables are on the device, which is not the default on a CPU."""

    async def main(cluster):
        on_device = ["--device", device, "--block-tables", "device", "--failure-policy", "fail"]
        prefill, decode, router = await start_pair(
            cluster,
            ["--device", device, "--engine", "block=16"],
            [*on_device, "--engine", f"{shape},layout=NHD,blocks=20,host=64"],
            is_routed=True,
        )
        prompts = [prompt_of(30 + index, index) for index in range(6)]
        await asyncio.gather(*(answered(cluster, router, p, TOKENS_TO_SWAP) for p in prompts))
        values = await decode.metrics(cluster.session)
        assert values["minillm_swapped_blocks"] > 0
        # none is computed twice, and all but the last token of each prompt come from the other engine
        assert values["minillm_computed_tokens"] == len(prompts) * TOKENS_TO_SWAP
        await wait_all_blocks_free(cluster, prefill, decode)

    run_cluster(main)
