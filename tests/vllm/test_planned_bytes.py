"""The bytes that `kvconnector plan` predicts are those that a load takes, to the byte, by vLLM's own planner, allocator
and block managers: of every model that `plan` knows by name, and of the configurations of others.
"""

import json
import time

import pytest
import torch
from vllm.v1 import kv_cache_interface as kv

from kvconnector.bench.shapes import MODELS as NAMED
from kvconnector.bench.shapes import EngineShape, ModelShape
from kvconnector.cli.model_config import read_model_config
from kvconnector.cli.plan import build_report
from tests.vllm import model_world as world
from tests.vllm import scheduler_world as w
from tests.vllm.compressed_world import pair, specs_of

pytestmark = pytest.mark.vllm

DEADLINE_S = 60.0
LENGTHS = (5, 127, 128, 129, 300, 1000, 1024, 1025)
PACKED = {"state_content_bytes": 656, "cache_dtype_str": "fp8_ds_mla"}


def compressed(name):
    """DeepSeek-V4 with all of its layers, as vLLM caches them."""
    ratios = [0] * NAMED[name].num_layers
    for group in NAMED[name].groups:
        for layer in group.layers if group.row_tokens > 1 else ():
            ratios[layer] = group.row_tokens
    return specs_of(ratios)


def sparse(num_layers):
    """DeepSeek-V3.2's and GLM-5's latents in fp8, with an indexer in each layer."""
    found = {}
    for number in range(num_layers):
        name = f"model.layers.{number}.self_attn"
        index = world.latent(132, torch.uint8, cache_role=kv.SparseCacheRole.INDEXER)
        found[f"{name}.attn"] = world.latent(576, torch.uint8, **PACKED), "FLASHMLA_SPARSE"
        found[f"{name}.indexer.k_cache"] = index, "DEEPSEEK_V32_INDEXER"
    return found


def plain(heads, dim, num_layers=2):
    spec = world.grouped(heads, dim), "FLASH_ATTN"
    return {f"model.layers.{number}.self_attn.attn": spec for number in range(num_layers)}


# With how many layers a model is moved; DeepSeek-V4 with all of its own.
KNOWN = {
    "llama-3.1-8b": (2, lambda: plain(8, 128)),
    "llama-3.1-70b": (2, lambda: plain(8, 128)),
    "qwen3-8b": (2, lambda: plain(8, 128)),
    "qwen3-235b": (2, lambda: plain(4, 128)),
    "deepseek-r1": (3, world.kimi_k2),
    "gpt-oss-120b": (4, world.gpt_oss),
    "deepseek-v3.2": (3, lambda: sparse(3)),
    "glm-5": (3, lambda: sparse(3)),
    "deepseek-v4-pro": (61, lambda: compressed("deepseek-v4-pro")),
    "deepseek-v4-flash": (43, lambda: compressed("deepseek-v4-flash")),
}
MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 64}
KDA = {"num_heads": 4, "head_dim": 128, "short_conv_kernel_size": 4}
# `config.json`s of the models of `model_world`, with its layers and the heads of its one rank.
CONFIGS = {
    "kimi-k2": {"model_type": "kimi_k2", "num_hidden_layers": 3, **MLA},
    "kimi-linear": {
        "model_type": "kimi_linear",
        "num_hidden_layers": 4,
        "linear_attn_config": {"kda_layers": [1, 2, 3], "full_attn_layers": [4], **KDA},
        **MLA,
    },
    "qwen3.5": {
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "hidden_size": 4096,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 2,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32",
    },
    "gpt-oss": {
        "model_type": "gpt_oss",
        "num_hidden_layers": 4,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "minimax-m3": {
        "model_type": "minimax_m3_text",
        "num_hidden_layers": 4,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "sparse_attention_config": {
            "sparse_index_dim": 128,
            "sparse_attention_freq": [0, 1, 1, 1],
        },
    },
}


def moved(engines, num_tokens, salt):
    """Load a prompt. Returns the number of its tokens that were loaded, and the bytes as the connector counts them."""
    asked = engines.p.world.add(num_tokens, w.REMOTE_DECODE, prompt=salt, max_tokens=1)
    params = None
    while params is None:
        params = next(
            (out.kv_transfer_params for out in engines.p.step() if out.kv_transfer_params), None
        )
    engines.d.worker.take_stats()
    wanted = engines.d.world.add(num_tokens, params, prompt=salt)
    until_s = time.monotonic() + DEADLINE_S
    while not wanted.num_output_tokens:
        engines.d.step(), engines.p.step()
        assert time.monotonic() < until_s, (asked, wanted)
        time.sleep(0.001)
    (load,) = engines.d.worker.take_stats().transfers
    return params["remote_num_tokens"], load.nbytes


def predicted(model, block, num_tokens):
    engine = EngineShape(block=block)
    return build_report(model, engine, engine, range(num_tokens), chunk_bytes=2 << 20).total_bytes


def check(model, layers, shape, num_blocks):
    kinds = [spec for spec, _ in layers.values()]
    sizes = [each.block_size for each in kinds if not isinstance(each, kv.MambaSpec)]
    caching = not any(isinstance(each, kv.MambaSpec) for each in kinds)
    options = {"block_size": max(sizes), "enable_prefix_caching": caching}
    with pair(model, layers, num_blocks=num_blocks, **options) as engines:
        for number, num_tokens in enumerate(LENGTHS):
            count, nbytes = moved(engines, num_tokens, 100 + number)
            assert nbytes == predicted(shape, max(sizes), count), num_tokens


@pytest.mark.parametrize("name", NAMED)
def test_a_known_model_is_loaded_with_the_bytes_of_its_plan(model, name):
    num_layers, layers = KNOWN[name]
    shape = ModelShape.parse(f"{name},layers={num_layers}")
    check(model, layers(), shape, 160 if "v4" in name else 256)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_is_loaded_with_the_bytes_of_its_plan(model, tmp_path, name):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"torch_dtype": "bfloat16", **CONFIGS[name]}))
    check(model, world.MODELS[name](), read_model_config(path), 256)
