import pytest

from kvconnector.bench.shapes import DEEPSEEK_V4_PRO, MODELS, EngineShape, ModelShape
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
            ["tp=", "tp=0", "tp=two", "tq=1", "tp=1,tp=2", "layout=DHN", "block=1.5"],
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


def test_a_mixed_cache_moves_the_tokens_that_each_group_keeps():
    # 8,192 tokens: one entry for each 4 and each 128 tokens, and a window of 128
    entries = 30 * 2048 * (576 + 132) + 31 * 64 * 576
    assert DEEPSEEK_V4_PRO.request_bytes(2048) == entries + 61 * 128 * 576
    # in pages of 16 tokens
    shape = EngineShape(block=4)
    assert shape.first_blocks(DEEPSEEK_V4_PRO, 2048) == [(0, 512), (0, 512), (0, 64), (504, 8)]


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
