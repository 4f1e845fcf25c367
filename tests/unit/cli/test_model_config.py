"""`kvconnector plan` for models with several kinds of layers, from their published configurations."""

import json

import pytest

from kvconnector.cli import main

MIB = 1 << 20
TOKENS = 20_000

JAMBA = {  # four of 32 layers attend
    "model_type": "jamba",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "attn_layer_period": 8,
    "attn_layer_offset": 4,
    "mamba_d_conv": 4,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "sliding_window": None,
}
NEMOTRON_H = {
    "model_type": "nemotron_h",
    "num_hidden_layers": 52,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 4096,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
}
QWEN3_NEXT = {
    "model_type": "qwen3_next",
    "num_hidden_layers": 48,
    "full_attention_interval": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_size": 2048,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
}
GEMMA_3 = {  # five windows, then one layer that keeps everything; heads by default
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "hidden_size": 2560,
        "sliding_window": 1024,
    },
}
LLAMA_4 = {
    "model_type": "llama4",
    "text_config": {
        "model_type": "llama4_text",
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_size": 5120,
        "attention_chunk_size": 8192,
        "no_rope_layers": [1, 1, 1, 0] * 12,
    },
}
WHISPER = {
    "model_type": "whisper",
    "is_encoder_decoder": True,
    "num_hidden_layers": 32,
    "decoder_layers": 32,
    "decoder_attention_heads": 20,
    "d_model": 1280,
    "max_source_positions": 1500,
}
T5 = {
    "model_type": "t5",
    "is_encoder_decoder": True,
    "num_layers": 12,
    "num_decoder_layers": 6,
    "num_heads": 12,
    "d_kv": 64,
    "d_model": 768,
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
}
DEEPSEEK_V32 = {
    "model_type": "deepseek_v32",
    "num_hidden_layers": 61,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
    "num_nextn_predict_layers": 1,
}
MISTRAL_7B = {
    "model_type": "mistral",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "sliding_window": 4096,
}
QWEN_2 = {**MISTRAL_7B, "model_type": "qwen2", "max_window_layers": 28}


def kv(layers, tokens, heads, dim):
    """Bytes of K and V in bfloat16."""
    return layers * tokens * 2 * heads * dim * 2


# for each kind, its layers and the bytes that a load of `TOKENS` tokens moves of them
EXPECTED: list[tuple[dict, dict]] = [
    (
        JAMBA,
        {
            "full attention": ([4, 12, 20, 28], kv(4, TOKENS, 8, 128)),
            # convolution of 8192 channels x 3, and 8192 x 16 of state
            "Mamba state": (
                [i for i in range(32) if i % 8 != 4],
                28 * 8192 * (3 + 16) * 2,
            ),
        },
    ),
    (
        NEMOTRON_H,
        {
            "full attention": ([7, 18, 29, 40], kv(4, TOKENS, 8, 128)),
            "Mamba state": (None, 24 * ((8192 + 2 * 8 * 128) * 3 + 128 * 64 * 128) * 2),
        },
    ),
    (
        QWEN3_NEXT,
        {
            "full attention": (list(range(3, 48, 4)), kv(12, TOKENS, 2, 256)),
            "gated delta net state": (
                None,
                36 * ((2 * 16 * 128 + 32 * 128) * 3 * 2 + 32 * 128 * 128 * 4),
            ),
        },
    ),
    (
        GEMMA_3,
        {
            "full attention": ([5, 11, 17, 23, 29], kv(5, TOKENS, 4, 256)),
            # the next token sees 1024 tokens, itself included
            "window of 1024": (None, kv(29, 1023, 4, 256)),
        },
    ),
    (
        LLAMA_4,
        {
            "full attention": (list(range(3, 48, 4)), kv(12, TOKENS, 8, 128)),
            "chunk of 8192": (None, kv(36, TOKENS - 2 * 8192, 8, 128)),
        },
    ),
    (
        WHISPER,
        {
            "full attention": (list(range(32)), kv(32, TOKENS, 20, 64)),
            "cross attention": (list(range(32)), kv(32, 1500, 20, 64)),
        },
    ),
    (
        T5,
        {
            "full attention": (list(range(6)), kv(6, TOKENS, 12, 64)),
            "cross attention": (list(range(6)), kv(6, TOKENS, 12, 64)),
        },
    ),
    (
        GPT_OSS,
        {
            "full attention": (list(range(1, 36, 2)), kv(18, TOKENS, 8, 64)),
            "window of 128": (list(range(0, 36, 2)), kv(18, 127, 8, 64)),
        },
    ),
    (MISTRAL_7B, {"window of 4096": (list(range(32)), kv(32, 4095, 8, 128))}),
    ({**QWEN_2, "use_sliding_window": False}, {"": (list(range(32)), kv(32, TOKENS, 8, 128))}),
    (
        {**QWEN_2, "use_sliding_window": True},
        {
            "full attention": (list(range(28)), kv(28, TOKENS, 8, 128)),
            "window of 4096": (list(range(28, 32)), kv(4, 4095, 8, 128)),
        },
    ),
]


def planned(capsys, tmp_path, config, *arguments):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    size = ("--tokens", str(TOKENS), "--chunk", "16MiB")
    assert main(["plan", "--model", str(path), *size, *arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "config, expected",
    EXPECTED,
    ids=[f"{number}-{config['model_type']}" for number, (config, _) in enumerate(EXPECTED)],
)
@pytest.mark.parametrize(
    "cut", [(), ("--prefill", "tp=4,block=32", "--decode", "tp=2,pp=2,layout=HND")]
)
def test_each_kind_of_layer_is_planned_by_its_retention(capsys, tmp_path, config, expected, cut):
    report = json.loads(planned(capsys, tmp_path, config, *cut, "--json"))
    found = {}
    for row in report["reads"]:
        layers, nbytes = found.setdefault(row["kind"], (set(), 0))
        layers |= {layer for start, stop in row["layers"] for layer in range(start, stop)}
        found[row["kind"]] = (layers, nbytes + row["bytes"])
    assert {kind: nbytes for kind, (_, nbytes) in found.items()} == {
        kind: nbytes for kind, (_, nbytes) in expected.items()
    }
    for kind, (layers, _) in expected.items():
        assert layers is None or found[kind][0] == set(layers)
    assert report["total_bytes"] == sum(nbytes for _, nbytes in expected.values())


def test_the_table_names_the_kinds_and_their_layers(capsys, tmp_path):
    text = planned(capsys, tmp_path, GEMMA_3)
    assert "5 full attention, 390.6 MiB; 29 window of 1024, 115.9" in text.replace("\n", " ")
    assert "18976-20000" not in text


def test_latents_have_no_heads_and_draft_layers_are_named(capsys, tmp_path):
    report = json.loads(planned(capsys, tmp_path, DEEPSEEK_V32, "--json"))
    nbytes = {row["kind"]: row["bytes"] for row in report["reads"]}
    # the indexer has 128 elements of one byte and a scale of four bytes
    assert nbytes == {"full attention": 61 * TOKENS * 576 * 2, "indexer": 61 * TOKENS * 132}
    text = planned(capsys, tmp_path, DEEPSEEK_V32).replace("\n", " ")
    assert text.count("latent") == 3  # the summary, and a row for each kind
    assert "1 MTP, not counted" in text


def test_a_model_of_several_kinds_is_planned_whole_or_refused(capsys, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(JAMBA))
    assert main(["plan", "--model", str(path), "--layers", "4"]) == 2
    text = capsys.readouterr().err
    assert "Mamba state" in text
    assert "num_layers" in text
    # ranks share the tokens of full attention, and each holds its heads of a state
    shared = ("--decode", "tp=4,dcp=2", "--prefill", "tp=2,dcp=2,interleave=4", "--json")
    report = json.loads(planned(capsys, tmp_path, JAMBA, *shared))
    stripes = {row["kind"]: row["stripes"] for row in report["reads"]}
    assert stripes["Mamba state"] == [[0, 1, 1]]
    assert stripes["full attention"] != [[0, 1, 1]]
