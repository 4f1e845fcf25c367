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
GEMMA_4 = {  # as published: layers that keep everything have heads of their own
    "model_type": "gemma4",
    "text_config": {
        "model_type": "gemma4_text",
        "num_hidden_layers": 30,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "num_global_key_value_heads": 2,
        "global_head_dim": 512,
        "attention_k_eq_v": True,
        "hidden_size": 2816,
        "sliding_window": 1024,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5,
        "num_kv_shared_layers": 0,
    },
}
GEMMA_3N = {  # the last 15 layers read the cache of others
    "model_type": "gemma3n",
    "text_config": {
        "model_type": "gemma3n_text",
        "num_hidden_layers": 35,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "hidden_size": 2048,
        "num_kv_shared_layers": 15,
        "sliding_window": 512,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
        "laurel_rank": 64,
    },
}
STEP_3 = {
    "model_type": "step3_vl",
    "text_config": {
        "model_type": "step3_text",
        "num_hidden_layers": 61,
        "num_attention_heads": 64,
        "num_attention_groups": 1,
        "head_dim": 256,
        "hidden_size": 7168,
        "share_q_dim": 2048,
    },
}
GLM_4_9B = {
    "model_type": "chatglm",
    "num_layers": 40,
    "num_attention_heads": 32,
    "kv_channels": 128,
    "hidden_size": 4096,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "attention_softmax_in_fp32": True,
}
FALCON_7B = {
    "model_type": "falcon",
    "num_hidden_layers": 32,
    "num_attention_heads": 71,
    "hidden_size": 4544,
    "multi_query": True,
    "new_decoder_architecture": False,
    "parallel_attn": True,
}
FALCON_40B = {
    **FALCON_7B,
    "num_hidden_layers": 60,
    "num_attention_heads": 128,
    "hidden_size": 8192,
    "num_kv_heads": 8,
    "new_decoder_architecture": True,
}
STARCODER = {
    "model_type": "gpt_bigcode",
    "n_layer": 40,
    "n_head": 48,
    "n_embd": 6144,
    "multi_query": True,
    "attention_softmax_in_fp32": True,
}
LONGCAT_FLASH = {  # each layer attends twice
    "model_type": "longcat_flash",
    "num_layers": 28,
    "num_attention_heads": 64,
    "hidden_size": 6144,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "attention_method": "MLA",
}
NEMOTRON_NAS = {
    "model_type": "nemotron-nas",
    "num_hidden_layers": 4,
    "num_attention_heads": 64,
    "num_key_value_heads": None,
    "hidden_size": 8192,
    "block_configs": [
        {"attention": {"n_heads_in_group": 8, "no_op": False, "replace_with_linear": False}},
        {"attention": {"n_heads_in_group": None, "no_op": True, "replace_with_linear": False}},
        {"attention": {"n_heads_in_group": None, "no_op": False, "replace_with_linear": True}},
        {"attention": {"n_heads_in_group": 16, "no_op": False, "replace_with_linear": False}},
    ],
}
MINIMAX_M2 = {
    "model_type": "minimax_m2",
    "num_hidden_layers": 62,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 3072,
    "attn_type_list": [1] * 62,
    "num_mtp_modules": 3,
}
MINIMAX_M1 = {
    "model_type": "minimax_m1",
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 6144,
    "attn_type_list": ([0] * 7 + [1]) * 10,
    "layernorm_linear_attention_alpha": 3.5,
}
MINIMAX_M3 = {
    "model_type": "minimax_m3_vl",
    "text_config": {
        "model_type": "minimax_m3_text",
        "num_hidden_layers": 60,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "hidden_size": 6144,
        "sparse_attention_config": {
            "use_sparse_attention": True,
            "sparse_index_dim": 128,
            "sparse_num_index_heads": 4,
            "sparse_topk_blocks": 16,
            "sparse_block_size": 128,
            "sparse_attention_freq": [0] * 3 + [1] * 57,
        },
    },
}
FALCON_H1 = {  # every layer has both
    "model_type": "falcon_h1",
    "num_hidden_layers": 36,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_size": 1024,
    "mamba_d_ssm": 1536,
    "mamba_n_heads": 24,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 128,
    "key_multiplier": 0.3,
}
KIMI_LINEAR = {
    "model_type": "kimi_linear",
    "num_hidden_layers": 27,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "hidden_size": 2304,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "mla_use_nope": True,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "kda_layers": [each for each in range(1, 27) if each % 4],
        "head_dim": 128,
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
}
LFM_2 = {
    "model_type": "lfm2",
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 2048,
    "conv_L_cache": 3,
    "conv_dim": 2048,
    "conv_dim_out": 2048,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
}
QWEN_35 = {
    **{name: value for name, value in QWEN3_NEXT.items() if name != "full_attention_interval"},
    "model_type": "qwen3_5_moe_text",
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 12,
    "attn_output_gate": True,
    "mtp_num_hidden_layers": 1,
}
GLM_52 = {  # three layers in four share another's choice
    **DEEPSEEK_V32,
    "model_type": "glm_moe_dsa",
    "num_hidden_layers": 78,
    "index_n_heads": 32,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
}


MINIMAX_M3_SAVED = {  # by transformers, with flat fields and types of layers
    "model_type": "minimax_m3_vl",
    "text_config": {
        "model_type": "minimax_m3_vl_text",
        "num_hidden_layers": 60,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "hidden_size": 6144,
        "index_block_size": 128,
        "index_head_dim": 128,
        "index_local_blocks": 1,
        "index_n_heads": 4,
        "index_topk_blocks": 16,
        "layer_types": ["full_attention"] * 3 + ["minimax_m3_sparse"] * 57,
    },
}
GRANITE_4 = {  # a group of heads, whose B and C every rank holds
    "model_type": "granitemoehybrid",
    "num_hidden_layers": 40,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "hidden_size": 1536,
    "layer_types": (["linear_attention"] * 9 + ["full_attention"]) * 4,  # mamba, to transformers
    "mamba_d_conv": 4,
    "mamba_d_head": "auto",
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 48,
}
MAMBA_CODESTRAL = {
    "model_type": "mamba2",
    "num_hidden_layers": 64,
    "num_heads": 128,
    "head_dim": 64,
    "n_groups": 8,
    "state_size": 128,
    "conv_kernel": 4,
    "hidden_size": 4096,
    "expand": 2,
}
MIMO_V2 = {  # as published
    "model_type": "mimo_v2_flash",
    "num_hidden_layers": 48,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 192,
    "v_head_dim": 128,
    "hidden_size": 4096,
    "swa_num_attention_heads": 64,
    "swa_num_key_value_heads": 8,
    "swa_head_dim": 192,
    "swa_v_head_dim": 128,
    "sliding_window": 128,
    "sliding_window_size": 128,
    "attention_chunk_size": 128,
    "hybrid_layer_pattern": [0, *[1, 1, 1, 1, 0] * 9, 1, 0],
}
STEP_35 = {
    "model_type": "step3p5",
    "num_hidden_layers": 45,
    "num_attention_heads": 64,
    "num_attention_groups": 8,
    "head_dim": 128,
    "hidden_size": 4096,
    "sliding_window": 512,
    "layer_types": (["full_attention"] + ["sliding_attention"] * 3) * 12,  # with those that draft
    "attention_other_setting": {
        "attention_type": "sliding_attention",
        "num_attention_heads": 96,
        "num_attention_groups": 4,
        "head_dim": 128,
        "true_head_dim": 128,
    },
}
MINICPM_3 = {
    "model_type": "minicpm3",
    "num_hidden_layers": 62,
    "num_attention_heads": 40,
    "num_key_value_heads": 40,
    "hidden_size": 2560,
    "kv_lora_rank": 256,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
}
QWEN_25_VL = {  # flat, as published
    "model_type": "qwen2_5_vl",
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "hidden_size": 3584,
    "sliding_window": 32768,
    "max_window_layers": 28,
    "use_sliding_window": False,
    "vision_config": {"hidden_size": 1280, "num_heads": 16},
}
QWEN_3_OMNI = {
    "model_type": "qwen3_omni_moe",
    "thinker_config": {
        "model_type": "qwen3_omni_moe_thinker",
        "text_config": {
            "model_type": "qwen3_omni_moe_text",
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "hidden_size": 2048,
        },
    },
    "talker_config": {"text_config": {"num_hidden_layers": 20}},
}


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
            "Mamba state": (None, 24 * ((8192 + 2 * 8 * 128) * 3 * 2 + 128 * 64 * 128 * 4)),
        },
    ),
    (
        QWEN3_NEXT,
        {
            "full attention": (list(range(3, 48, 4)), kv(12, TOKENS, 2, 256)),
            # vLLM reads the type of a state in Qwen 3.5's files only
            "gated delta net state": (
                None,
                36 * ((2 * 16 * 128 + 32 * 128) * 3 + 32 * 128 * 128) * 2,
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
    (
        GEMMA_4,
        {
            "full attention": (list(range(5, 30, 6)), kv(5, TOKENS, 2, 512)),
            "window of 1024": (None, kv(25, 1023, 8, 256)),
        },
    ),
    (
        GEMMA_3N,
        {
            "full attention": ([4, 9, 14, 19], kv(4, TOKENS, 2, 256)),
            "window of 512": (None, kv(16, 511, 2, 256)),
        },
    ),
    (STEP_3, {"": (list(range(61)), kv(61, TOKENS, 1, 256))}),
    (GLM_4_9B, {"": (list(range(40)), kv(40, TOKENS, 2, 128))}),
    (FALCON_7B, {"": (list(range(32)), kv(32, TOKENS, 1, 64))}),
    (FALCON_40B, {"": (list(range(60)), kv(60, TOKENS, 8, 64))}),
    (STARCODER, {"": (list(range(40)), kv(40, TOKENS, 1, 128))}),
    (LONGCAT_FLASH, {"": (list(range(56)), 56 * TOKENS * 576 * 2)}),
    (
        NEMOTRON_NAS,
        {
            "full attention, 8 heads": ([0], kv(1, TOKENS, 8, 128)),
            "full attention, 4 heads": ([3], kv(1, TOKENS, 4, 128)),
        },
    ),
    (MINIMAX_M2, {"": (list(range(62)), kv(62, TOKENS, 8, 128))}),
    (
        MINIMAX_M1,
        {
            "full attention": (list(range(7, 80, 8)), kv(10, TOKENS, 8, 128)),
            "lightning attention state": (None, 70 * 64 * 128 * 128 * 2),
        },
    ),
    (
        MINIMAX_M3,
        {
            "full attention": (list(range(60)), kv(60, TOKENS, 4, 128)),
            "indexer": (list(range(3, 60)), 57 * TOKENS * 128 * 2),
        },
    ),
    (
        FALCON_H1,
        {
            "full attention": (list(range(36)), kv(36, TOKENS, 2, 64)),
            "Mamba state": (list(range(36)), 36 * ((1536 + 2 * 128) * 3 + 24 * 64 * 128) * 2),
        },
    ),
    (
        KIMI_LINEAR,
        {
            "full attention": ([3, 7, 11, 15, 19, 23, 26], 7 * TOKENS * 576 * 2),
            "Kimi delta attention state": (
                None,
                20 * (3 * 32 * 128 * 3 * 2 + 32 * 128 * 128 * 4),
            ),
        },
    ),
    (
        LFM_2,
        {
            "full attention": ([2, 5, 8, 10, 12, 14], kv(6, TOKENS, 8, 64)),
            "short convolution state": (None, 10 * 2048 * 2 * 2),
        },
    ),
    (
        QWEN_35,
        {
            "full attention": (list(range(3, 48, 4)), kv(12, TOKENS, 2, 256)),
            "gated delta net state": (
                None,
                36 * ((2 * 16 * 128 + 32 * 128) * 3 * 2 + 32 * 128 * 128 * 4),
            ),
        },
    ),
    (
        GLM_52,
        {
            "full attention": (list(range(78)), 78 * TOKENS * 576 * 2),
            "indexer": ([0, 1, 2, *range(6, 78, 4)], 21 * TOKENS * 132),
        },
    ),
    (
        MINIMAX_M3_SAVED,
        {
            "full attention": (list(range(60)), kv(60, TOKENS, 4, 128)),
            "indexer": (list(range(3, 60)), 57 * TOKENS * 128 * 2),
        },
    ),
    (
        GRANITE_4,
        {
            "full attention": (list(range(9, 40, 10)), kv(4, TOKENS, 4, 128)),
            "Mamba state": (None, 36 * ((3072 + 2 * 128) * 3 + 48 * 64 * 128) * 2),
        },
    ),
    (
        MAMBA_CODESTRAL,
        {"Mamba state": (None, 64 * ((8192 + 2 * 8 * 128) * 3 + 128 * 64 * 128) * 2)},
    ),
    (
        MIMO_V2,
        {
            "full attention": (
                [0, *range(5, 46, 5), 47],
                11 * TOKENS * 4 * (192 + 128) * 2,
            ),
            "window of 128": (None, 37 * 127 * 8 * (192 + 128) * 2),
        },
    ),
    (
        STEP_35,
        {
            "full attention": (list(range(0, 45, 4)), kv(12, TOKENS, 8, 128)),
            "window of 512": (None, kv(33, 511, 4, 128)),
        },
    ),
    (MINICPM_3, {"": (list(range(62)), kv(62, TOKENS, 40, 96))}),
    (QWEN_25_VL, {"": (list(range(28)), kv(28, TOKENS, 4, 128))}),
    (QWEN_3_OMNI, {"": (list(range(48)), kv(48, TOKENS, 4, 128))}),
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
    "cut",
    [
        ("--prefill", "block=1", "--decode", "block=1"),
        ("--prefill", "tp=4,block=32", "--decode", "pp=2,layout=HND"),
    ],
)
def test_each_kind_of_layer_is_planned_by_its_retention(capsys, tmp_path, config, expected, cut):
    if cut[1] != "block=1" and config["model_type"] in ("lfm2", "minimax_m1"):
        pytest.skip("engines exchange these states with equal tensor parallelism only")
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
    assert "5 full attention, 390.6 MiB; 29 window of 1024, 116 MiB" in text.replace("\n", " ")
    assert "18976-20000" not in text


@pytest.mark.parametrize(
    "blocks, first",
    [((16, 16), 18976), ((64, 64), 18944), ((16, 64), 18977), ((64, 16), 18977)],
)
def test_a_window_begins_with_a_whole_block_where_blocks_are_equal(capsys, tmp_path, blocks, first):
    """The last 1,023 of 20,000 tokens, and those before them in a block that is cached as a whole."""
    sides = zip(("--prefill", "--decode"), blocks, strict=True)
    cut = [word for side, block in sides for word in (side, f"block={block}")]
    report = json.loads(planned(capsys, tmp_path, GEMMA_3, *cut, "--json"))
    tokens = {row["kind"]: row["tokens"] for row in report["reads"]}
    assert tokens == {"full attention": [0, 20000], "window of 1024": [first, 20000]}


def test_latents_have_no_heads_and_draft_layers_are_named(capsys, tmp_path):
    report = json.loads(planned(capsys, tmp_path, DEEPSEEK_V32, "--json"))
    nbytes = {row["kind"]: row["bytes"] for row in report["reads"]}
    # the indexer has 128 elements of one byte and a scale of four bytes
    assert nbytes == {"full attention": 61 * TOKENS * 576 * 2, "indexer": 61 * TOKENS * 132}
    text = planned(capsys, tmp_path, DEEPSEEK_V32).replace("\n", " ")
    assert text.count("latent") == 3  # the summary, and a row for each kind
    assert "1 MTP layer, not counted" in text


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


DEEPSEEK_V4 = {
    "model_type": "deepseek_v4",
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "hidden_size": 7168,
    "q_lora_rank": 1536,
    "o_lora_rank": 1024,
    "sliding_window": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 1024,
    "compress_rope_theta": 160000,
    "num_nextn_predict_layers": 1,
    "compress_ratios": [128, *[128, 4] * 30, 0],  # the last one is the draft's
}
RATES = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}


# The first two are what engines of vLLM 0.33 moved on a GPU.
@pytest.mark.parametrize(
    "tokens, nbytes", [(999, 26_653_384), (8191, 67_910_712), (65_535, 383_958_584)]
)
@pytest.mark.parametrize("is_saved", [False, True])
def test_compressed_rows_windows_and_states_are_planned_to_the_byte(
    capsys, tmp_path, tokens, nbytes, is_saved
):
    """Of all tokens but the last one, which the decode engine computes."""
    config = dict(DEEPSEEK_V4)
    if is_saved:  # by transformers, with names for ratios
        names = {ratio: name for name, ratio in RATES.items()}
        config["layer_types"] = [names[each] for each in config.pop("compress_ratios")[:61]]
        config["compress_rates"] = RATES
    report = json.loads(planned(capsys, tmp_path, config, "--tokens", str(tokens), "--json"))
    assert report["total_bytes"] == nbytes


def test_compressed_latents_of_other_sizes_are_refused(capsys, tmp_path):
    assert "other sizes" in refusal(capsys, tmp_path, {**DEEPSEEK_V4, "head_dim": 256})
    for ratios in ([4], [16] * 61):
        text = refusal(capsys, tmp_path, {**DEEPSEEK_V4, "compress_ratios": ratios})
        assert "a 0 or a 1 or a 4 or a 128 for each layer" in text


def refusal(capsys, tmp_path, config):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert main(["plan", "--model", str(path)]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    "field, value",
    [
        ("num_memory_blocks_kv", 4),
        ("attn_layer_every", 2),
        ("cross_layer_kv_sharing", True),
        ("compress_ratios", [0, 128, 4]),
        ("kv_groups_by_layer", [2, 8]),
        ("ssm_heads", 8),
        ("swa_num_key_value_heads", 4),
        ("local_window_size", 64),
        ("index_share_for_mtp_iteration", True),
        ("per_layer_config", {"0": {"sliding_window": 3}}),
    ],
)
def test_a_field_of_attention_that_nobody_has_read_is_refused_by_name(
    capsys, tmp_path, field, value
):
    assert field in refusal(capsys, tmp_path, {**MISTRAL_7B, field: value})
    # one that says nothing changes nothing
    planned(capsys, tmp_path, {**MISTRAL_7B, field: None})


@pytest.mark.parametrize(
    "config, words",
    [
        ({**LFM_2, "full_attn_idxs": 3}, "full_attn_idxs=3"),
        (
            {**MINIMAX_M1, "attn_type_list": [2] * 80},
            "attn_type_list must be a list with a 0 or a 1",
        ),
        ({**MINIMAX_M2, "attn_type_list": [1]}, "attn_type_list must be a list with a 0 or a 1"),
        ({**NEMOTRON_NAS, "num_hidden_layers": 5}, "block_configs names every layer"),
        ({**NEMOTRON_NAS, "block_configs": [{"mixer": 1}] * 4}, "has no attention"),
        ({**GLM_52, "index_topk_pattern": "FX" * 39}, "named as full and shared"),
        ({**MISTRAL_7B, "sliding_window_pattern": "LXG"}, "sliding_window_pattern"),
        ({**MISTRAL_7B, "num_attention_heads": 30}, "no multiple of the heads"),
        (
            {**MISTRAL_7B, "kv_lora_rank": 512, "qk_rope_head_dim": 64},
            "no latents of mistral are known",
        ),
        ({**MIMO_V2, "hybrid_layer_pattern": [2] * 48}, "a 0 or a 1 for each layer"),
        (
            {**STEP_35, "attention_other_setting": {"attention_type": "full_attention"}},
            "of windows only",
        ),
        ({"model_type": "lfm2_moe"}, "does not name the kinds of its layers"),
        ({"model_type": "kimi_linear"}, "does not name the kinds of its layers"),
        (
            {**KIMI_LINEAR, "linear_attn_config": {"kda_layers": [1], "full_attn_layers": [2]}},
            "does not name each layer once",
        ),
    ],
)
def test_what_contradicts_itself_is_refused_with_the_field(capsys, tmp_path, config, words):
    assert words in refusal(capsys, tmp_path, config)


def test_an_assumed_number_of_kv_heads_is_printed(capsys, tmp_path):
    config = {**MISTRAL_7B, "num_key_value_heads": None}
    words = "no number of KV heads is given: each of the 32 attention heads has its own K and V"
    assert f"assumed: {words}" in planned(capsys, tmp_path, config)
    assert json.loads(planned(capsys, tmp_path, config, "--json"))["model"]["assumptions"] == [
        words
    ]
    assert "assumed" not in planned(capsys, tmp_path, MISTRAL_7B)


def test_infinity_in_a_published_configuration_is_no_fault(capsys, tmp_path):
    planned(capsys, tmp_path, {**FALCON_H1, "time_step_limit": [0.0, float("inf")]})


def test_layers_that_transformers_saved_with_sizes_of_their_own_are_read(capsys, tmp_path):
    own = {str(layer): {"head_dim": 64, "num_key_value_heads": 2} for layer in (3, 7)}
    report = json.loads(
        planned(
            capsys, tmp_path, {**QWEN_2, "sliding_window": None, "per_layer_config": own}, "--json"
        )
    )
    assert report["total_bytes"] == kv(30, TOKENS, 8, 128) + kv(2, TOKENS, 2, 64)


def test_values_of_another_size_than_keys_are_counted(capsys, tmp_path):
    config = {**QWEN_2, "sliding_window": None, "v_head_dim": 64}
    report = json.loads(planned(capsys, tmp_path, config, "--json"))
    assert report["total_bytes"] == kv(32, TOKENS, 8, 128) * 3 // 4


@pytest.mark.parametrize(
    "config, full",
    [
        ({**MISTRAL_7B, "model_type": "gemma2"}, list(range(1, 32, 2))),
        ({**MISTRAL_7B, "model_type": "cohere2"}, list(range(3, 32, 4))),
        (
            {**MISTRAL_7B, "model_type": "exaone4", "sliding_window_pattern": "LLLG"},
            list(range(3, 32, 4)),
        ),
        (
            {**MISTRAL_7B, "model_type": "gemma3_text", "sliding_window_pattern": 8},
            list(range(7, 32, 8)),
        ),
        (
            {name: value for name, value in JAMBA.items() if name != "attn_layer_offset"},
            [4, 12, 20, 28],
        ),
        ({**JAMBA, "attn_layer_offset": 1}, [1, 9, 17, 25]),
    ],
)
def test_which_layers_keep_everything_where_a_configuration_has_a_period(
    capsys, tmp_path, config, full
):
    report = json.loads(planned(capsys, tmp_path, config, "--json"))
    groups = {group["kind"]: group["layers"] for group in report["model"]["groups"]}
    assert groups["full attention"] == full


def test_a_window_of_cohere_2_has_the_token_itself_beside_its_size(capsys, tmp_path):
    report = json.loads(
        planned(capsys, tmp_path, {**MISTRAL_7B, "model_type": "cohere2"}, "--json")
    )
    assert report["model"]["groups"][1]["extent_tokens"] == 4097


def test_t5_s_heads_have_a_size_of_their_own(capsys, tmp_path):
    """T5-11B: 128 heads of 128 elements, in a model of 1024."""
    config = {**T5, "d_kv": 128, "num_heads": 128, "d_model": 1024}
    report = json.loads(planned(capsys, tmp_path, config, "--json"))
    assert report["total_bytes"] == 2 * kv(6, TOKENS, 128, 128)


def test_what_a_file_leaves_out_is_what_transformers_has_by_default_and_is_printed(
    capsys, tmp_path
):
    """As files do that transformers saved before it wrote every field."""
    text = planned(capsys, tmp_path, GEMMA_3)
    words = "the file leaves out what transformers' gemma3_text has by default:"
    assert words in text
    assert "num_key_value_heads 4" in text.replace("\n", " ")
    llama = planned(capsys, tmp_path, {"model_type": "llava", "text_config": {}}, "--json")
    assert json.loads(llama)["total_bytes"] == kv(32, TOKENS, 32, 128)


def test_a_field_by_another_name_leaves_no_default(capsys, tmp_path):
    bloom = {"model_type": "bloom", "n_layer": 30, "num_attention_heads": 32, "n_embed": 4096}
    report = json.loads(planned(capsys, tmp_path, bloom, "--json"))
    assert report["total_bytes"] == kv(30, TOKENS, 32, 128)


def test_a_float32_checkpoint_is_served_in_16_bits(capsys, tmp_path):
    config = {**QWEN_2, "sliding_window": None, "torch_dtype": "float32"}
    report = json.loads(planned(capsys, tmp_path, config, "--json"))
    assert report["total_bytes"] == kv(32, TOKENS, 8, 128)


def test_states_that_engines_do_not_cut_are_refused_between_other_sizes(capsys, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LFM_2))
    assert main(["plan", "--model", str(path), "--prefill", "tp=2"]) == 2
    text = capsys.readouterr().err
    assert "give both the same tp" in text
    assert "short convolution state" in text


def test_states_whose_groups_the_ranks_share_out_are_cut(capsys, tmp_path):
    """Eight groups over four ranks and over two; the only group of Granite's heads is whole on each rank."""
    planned(capsys, tmp_path, NEMOTRON_H, "--prefill", "tp=4", "--decode", "tp=2")
    planned(capsys, tmp_path, GRANITE_4, "--prefill", "tp=4", "--decode", "tp=2")


def test_groups_that_the_ranks_cannot_share_out_are_refused(capsys, tmp_path):
    """vLLM starts no such engine."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**GRANITE_4, "mamba_n_groups": 2}))
    assert main(["plan", "--model", str(path), "--prefill", "tp=4"]) == 2
    assert "choose a tp that divides its heads" in capsys.readouterr().err


MINISTRAL = {  # params.json, Mistral's own format
    "dim": 4096,
    "n_layers": 36,
    "head_dim": 128,
    "hidden_dim": 12288,
    "n_heads": 32,
    "n_kv_heads": 8,
    "norm_eps": 1e-05,
    "vocab_size": 131072,
    "tied_embeddings": True,
}


@pytest.mark.parametrize(
    "fields, nbytes",
    [
        ({}, kv(36, TOKENS, 8, 128)),
        ({"sliding_window": 4096}, kv(36, 4095, 8, 128)),
        (
            {"sliding_window": [None, 32768, 32768, 32768]},
            kv(9, TOKENS, 8, 128) + kv(27, TOKENS, 8, 128),
        ),
        ({"sliding_window": [None, 4096]}, kv(18, TOKENS, 8, 128) + kv(18, 4095, 8, 128)),
        (
            {
                "q_lora_rank": 1536,
                "kv_lora_rank": 512,
                "qk_rope_head_dim": 64,
                "qk_nope_head_dim": 128,
            },
            36 * TOKENS * 576 * 2,
        ),
        (
            {"vision_encoder": {"hidden_size": 1664, "num_attention_heads": 16}},
            kv(36, TOKENS, 8, 128),
        ),
        ({"moe": {"num_experts": 8, "num_experts_per_tok": 2}}, kv(36, TOKENS, 8, 128)),
    ],
)
def test_mistral_s_own_format_is_read(capsys, tmp_path, fields, nbytes):
    (tmp_path / "params.json").write_text(json.dumps({**MINISTRAL, **fields}))
    blocks = ("--prefill", "block=1", "--decode", "block=1")
    arguments = ("--tokens", str(TOKENS), "--json", *blocks)
    assert main(["plan", "--model", str(tmp_path), *arguments]) == 0
    assert json.loads(capsys.readouterr().out)["total_bytes"] == nbytes


def test_windows_of_several_sizes_of_mistral_are_refused(capsys, tmp_path):
    assert "several sizes" in refusal(
        capsys, tmp_path, {**MINISTRAL, "sliding_window": [1024, 4096]}
    )


def test_every_rank_holds_b_and_c_of_its_group_of_heads(capsys, tmp_path):
    """Granite 4's heads have one group: each of 8 ranks has all last inputs of B and C, and an eighth of the rest."""
    ranks = ("--prefill", "tp=8", "--decode", "tp=8", "--json")
    report = json.loads(planned(capsys, tmp_path, GRANITE_4, *ranks))
    states = [row["bytes"] for row in report["reads"] if row["kind"] == "Mamba state"]
    assert states == [36 * ((3072 // 8 + 2 * 128) * 3 + 48 // 8 * 64 * 128) * 2] * 8


def test_packed_latents_have_their_scales_and_rotary_keys_in_the_row(capsys, tmp_path):
    packed = ("--prefill", "dtype=fp8_ds_mla", "--decode", "dtype=fp8_ds_mla", "--json")
    report = json.loads(planned(capsys, tmp_path, DEEPSEEK_V32, *packed))
    nbytes = {row["kind"]: row["bytes"] for row in report["reads"]}
    assert nbytes == {"full attention": 61 * TOKENS * 656, "indexer": 61 * TOKENS * 132}
    plain = planned(capsys, tmp_path, DEEPSEEK_V32, "--decode", "dtype=float8_e4m3fn")
    words = "assumed: fp8 latents have 576 bytes; for FlashMLA's, of 656, give dtype=fp8_ds_mla"
    assert words in plain.replace("\n", " ")


@pytest.mark.parametrize(
    "config, arguments, words",
    [
        (DEEPSEEK_V32, ["--decode", "dtype=fp8_ds_mla"], "is not converted: both engines"),
        (
            MISTRAL_7B,
            ["--prefill", "dtype=fp8_ds_mla", "--decode", "dtype=fp8_ds_mla"],
            "sparse attention only",
        ),
        (KIMI_LINEAR, ["--prefill", "tp=64", "--decode", "tp=64"], "choose a tp that divides"),
        (GRANITE_4, ["--prefill", "tp=5", "--decode", "tp=5"], "choose a tp that divides"),
        (MISTRAL_7B, ["--decode", "pp=33"], "more pipeline stages than its model has layers"),
        (MISTRAL_7B, ["--decode", "dtype=fp8"], "did you mean 'float8_e4m3fn'?"),
        (MISTRAL_7B, ["--decode", "block=0"], "block must be `int` >= 1"),
        (DEEPSEEK_V32, ["--layers", "3"], "leave these options out"),
    ],
)
def test_what_no_engine_does_is_refused_with_the_remedy(capsys, tmp_path, config, arguments, words):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert main(["plan", "--model", str(path), *arguments]) == 2
    assert words in capsys.readouterr().err


def test_the_heads_of_a_state_and_the_rows_of_compressed_layers_are_shown(capsys, tmp_path):
    """Not the channels of its convolution; and rows are no tokens."""
    ranks = ("--prefill", "tp=4", "--decode", "tp=4", "--json")
    report = json.loads(planned(capsys, tmp_path, KIMI_LINEAR, *ranks))
    heads = [row["heads"] for row in report["reads"] if row["kind"].startswith("Kimi")]
    assert heads == [[[0, 8]], [[8, 16]], [[16, 24]], [[24, 32]]]
    assert "rows 0-4999" in planned(capsys, tmp_path, DEEPSEEK_V4)


KIMI_K3 = {
    "model_type": "kimi_k3",
    "text_config": {
        **KIMI_LINEAR,
        "attn_res_block_size": 4,
        "mla_use_output_gate": True,
        "num_nextn_predict_layers": 1,
    },
}


@pytest.mark.parametrize(
    "config, more",
    [
        (DEEPSEEK_V32, {"full attention": TOKENS * 576 * 2, "indexer": TOKENS * 132}),
        # what convolutions keep of drafts is not moved
        (KIMI_K3, {"full attention": TOKENS * 576 * 2}),
        (QWEN_35, {"full attention": kv(1, TOKENS, 2, 256)}),
        # the last 127 tokens, and those before them in a block
        (DEEPSEEK_V4, {"window": (TOKENS - (TOKENS - 127) // 64 * 64) * 584}),
    ],
    ids=lambda each: each.get("model_type", ""),
)
def test_draft_layers_count_where_both_engines_draft(capsys, tmp_path, config, more):
    without = json.loads(planned(capsys, tmp_path, config, "--json"))
    found = json.loads(planned(capsys, tmp_path, config, "--json", "--mtp"))
    extra = {}
    for report, sign in ((found, 1), (without, -1)):
        for row in report["reads"]:
            extra[row["kind"]] = extra.get(row["kind"], 0) + sign * row["bytes"]
    assert {kind: nbytes for kind, nbytes in extra.items() if nbytes} == more
    stages = planned(capsys, tmp_path, config, "--mtp", "--decode", "pp=2")
    assert "1 MTP layer, counted" in stages.replace("\n", " ")


@pytest.mark.parametrize(
    "config, words",
    [
        (GEMMA_3, "the model has no MTP layers: leave --mtp out"),
        (MINIMAX_M2, "what this model's MTP layers cache is not known"),
    ],
)
def test_draft_layers_that_are_not_there_or_not_known_are_refused(capsys, tmp_path, config, words):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert main(["plan", "--model", str(path), "--mtp"]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "name, nbytes",
    [
        ("deepseek-r1", 1000 * 576 * 2),
        ("deepseek-v3.2", 1000 * (656 + 132)),
        ("glm-5", 1000 * (656 + 132)),
        ("deepseek-v4-flash", (1000 - 832) * 584),
    ],
)
def test_models_that_are_known_by_name_have_their_draft_layers(capsys, name, nbytes):
    totals = []
    for more in ((), ("--mtp",)):
        assert main(["plan", "--model", name, "--tokens", "1000", "--json", *more]) == 0
        totals.append(json.loads(capsys.readouterr().out)["total_bytes"])
    assert totals[1] - totals[0] == nbytes
