import pytest

from kvconnector.bench.deployment import Deployment
from kvconnector.bench.options import BenchOptions
from kvconnector.bench.shapes import (
    DEEPSEEK_V4_FLASH,
    DEEPSEEK_V4_PRO,
    MODELS,
    EngineShape,
    ModelShape,
    compressed_mla,
    engine_geometry,
    sparse_mla,
)
from kvconnector.bench.sizes import parse_bytes, parse_tokens
from kvconnector.cli.doctor import _self_test
from kvconnector.errors import ConfigError


@pytest.mark.parametrize(
    "text,nbytes",
    [("4096", 4096), ("512k", 512 << 10), ("1.5 GB", 1_500_000_000), (" 3 gib ", 3 << 30)],
)
def test_sizes_are_read_with_their_unit(text, nbytes):
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    "parse,texts",
    [
        (parse_bytes, ["", "MiB", "2XB", "-1", "0", "0.1"]),
        (
            EngineShape.parse,
            [
                *("tp=", "tp=0", "tp=two", "tq=1", "tp=1,tp=2", "layout=DHN", "block=1.5"),
                *("scale=0.5", "dtype=bfloat16,rounding=cast", "dtype=float8_e4m3fn,scale=0"),
                *("dtype=float8_e4m3fn,scale=1e39", "dtype=float8_e4m3fn,rounding=truncated"),
            ],
        ),
        (lambda device: [*_self_test(device, "")], ["cuda:x"]),
        (parse_tokens, ["", "0", "1,", "a", "1,-2", "1.5"]),
        (ModelShape.parse, ["qwen9", "qwen3-8b,layers=x", "qwen3-8b,layers=0", "qwen3-8b,heads=1"]),
    ],
)
def test_malformed_sizes_and_shapes_are_refused(parse, texts):
    for text in texts:
        with pytest.raises(ConfigError):
            parse(text)


@pytest.mark.parametrize(
    "model,num_tokens,nbytes",
    [
        # vLLM's groups, summed by hand: windows, rows of 4 and of 128 tokens, indexers, and float32 states
        (DEEPSEEK_V4_PRO, 1_000, 25_228_424),
        (DEEPSEEK_V4_PRO, 8_192, 67_910_712),
        (DEEPSEEK_V4_PRO, 65_536, 383_958_584),
        (DEEPSEEK_V4_FLASH, 1_000, 16_957_988),
        (DEEPSEEK_V4_FLASH, 8_192, 46_612_876),
        (DEEPSEEK_V4_FLASH, 65_536, 267_401_612),
        (MODELS["deepseek-v3.2"], 1_001, 1_000 * 61 * (656 + 132)),
        (sparse_mla("shared", 8, [0, 4]), 101, 100 * (8 * 656 + 2 * 132)),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_mixed_cache_moves_the_rows_that_each_group_keeps(model, num_tokens, nbytes):
    assert model.request_bytes(num_tokens - 1) == nbytes


@pytest.mark.parametrize(
    "prefill, decode, nbytes, size",
    [
        ("", "", (2 << 20, 2 << 20), "2 MiB"),
        ("dtype=bfloat16", "", (2 << 20, 2 << 20), "2 MiB"),
        ("", "dtype=float8_e4m3fn", (2 << 20, 1 << 20), "2 MiB into 1 MiB"),
        ("dtype=float8_e5m2", "dtype=bfloat16", (1 << 20, 2 << 20), "1 MiB into 2 MiB"),
        ("dtype=float8_e4m3fn", "dtype=float8_e4m3fn,scale=2", (1 << 20, 1 << 20), "1 MiB"),
    ],
)
def test_a_request_has_the_bytes_of_each_engines_elements(prefill, decode, nbytes, size):
    shapes = {"prefill": EngineShape.parse(prefill), "decode": EngineShape.parse(decode)}
    options = BenchOptions(model=MODELS["llama-3.1-8b"], tokens=(16,), iterations=1, **shapes)
    deployment = Deployment(options)
    assert deployment.request_bytes(16) == nbytes
    assert f"16 tokens, {size} scattered" in deployment.case_name(16)


def test_blocks_have_the_rows_of_their_tokens():
    groups = engine_geometry(DEEPSEEK_V4_PRO, EngineShape(block=256), "e").ranks[0].groups
    sizes = {kind.kind: group for kind, group in zip(DEEPSEEK_V4_PRO.groups, groups, strict=True)}
    assert [(each.block_size, each.row_tokens) for each in sizes.values()] == [
        *[(256, 1), (64, 4), (2, 128), (64, 4)],
        *[(256, 1)] * 3,
    ]
    assert EngineShape(block=256).first_blocks(DEEPSEEK_V4_PRO, 999) == [
        *[(3, 1), (0, 4), (0, 4), (0, 4), (3, 1), (3, 1), (3, 1)],
    ]
    with pytest.raises(ConfigError, match="multiple of a row's tokens"):
        engine_geometry(DEEPSEEK_V4_PRO, EngineShape(tp=2, dcp=2, block=256, interleave=64), "e")
    with pytest.raises(ConfigError, match="must be 4 or 128"):
        compressed_mla("other", [0, 8])


def test_fewer_layers_of_a_mixed_model_are_those_of_its_groups():
    short = ModelShape.parse("deepseek-v4-flash,layers=2")
    assert [group.kind for group in short.groups] == ["window"]
    assert short.request_bytes(999) == 2 * 127 * 584


# From the models' public configurations: layers x parts x heads x elements x 2 bytes.
@pytest.mark.parametrize(
    "name,token_bytes",
    [
        ("llama-3.1-8b", 32 * 2 * 8 * 128 * 2),
        ("llama-3.1-70b", 80 * 2 * 8 * 128 * 2),
        ("qwen3-8b", 36 * 2 * 8 * 128 * 2),
        ("qwen3-235b", 94 * 2 * 4 * 128 * 2),
        ("deepseek-r1", 61 * 576 * 2),
        ("gpt-oss-120b", 36 * 2 * 8 * 64 * 2),
    ],
)
def test_known_models_have_their_published_cache_size(name, token_bytes):
    assert MODELS[name].token_bytes == token_bytes
