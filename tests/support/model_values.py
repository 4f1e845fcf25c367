"""Configurations of models, and what engines state of them: equal text from vLLM and from SGLang, of any release."""

from typing import Any

from tests.support.model_configs import DELTA, FAMILIES, LATENT, MOE, WINDOWS, config

LLAMA: dict[str, Any] = {
    "architecture": "LlamaForCausalLM",
    "model_type": "llama",
    "num_key_value_heads": 2,
}
QWEN: dict[str, Any] = {
    "architecture": "Qwen3ForCausalLM",
    "model_type": "qwen3",
    "num_key_value_heads": 2,
}
GEMMA: dict[str, Any] = {
    "architecture": "Gemma3ForCausalLM",
    "model_type": "gemma3_text",
    "head_dim": 64,
}
GEMMA |= {"num_key_value_heads": 2, "sliding_window": 128, "rope_theta": None}
GEMMA |= {"layer_types": WINDOWS * 2, "query_pre_attn_scalar": 64}
DEEPSEEK: dict[str, Any] = {"architecture": "DeepseekV3ForCausalLM", "model_type": "deepseek_v3"}
DEEPSEEK |= LATENT | MOE
YARN = {"factor": 4.0, "original_max_position_embeddings": 4096}
YARN_TEXT = "yarn(rope_theta=1000000, factor=4, original_max_position_embeddings=4096)"
LINEAR = {"factor": 8.0, "rope_type": "linear", "rope_theta": 1e6}
GEMMA_TEXTS = (
    ("full_attention", "linear(rope_theta=1000000, factor=8)"),
    ("sliding_attention", "default(rope_theta=10000)"),
)
LLAMA_3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA_3_TEXT = (
    "llama3(rope_theta=500000, factor=8, high_freq_factor=4, low_freq_factor=1,"
    " original_max_position_embeddings=8192)"
)
MSCALES = {"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1}
DEEPSEEK_TEXT = (
    "yarn(rope_theta=10000, factor=40, mscale=1, mscale_all_dim=1,"
    " original_max_position_embeddings=4096)"
)
LONGROPE = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
LONGROPE_TEXT = (
    "longrope(rope_theta=10000, max_position_embeddings=8192, long_factor=16 values with digest"
    " 2bb98a8d8fad15fb, original_max_position_embeddings=4096,"
    " short_factor=16 values with digest fad0fb1009f94781)"
)
MINIMAX_TEXT = "default(rope_theta=10000, partial_rotary_factor=0.666666667)"
GPT_OSS_TEXT = (
    "yarn(rope_theta=10000, factor=32, original_max_position_embeddings=4096, truncate=false)"
)

TABLE: dict[str, tuple[dict[str, Any], str | tuple[tuple[str, str], ...]]] = {
    "plain": (config(**LLAMA), "default(rope_theta=10000)"),
    "plain, new form": (
        config(
            **LLAMA, rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 1e4}
        ),
        "default(rope_theta=10000)",
    ),
    "no theta": (config(**LLAMA, rope_theta=None), "default(rope_theta=10000)"),
    "YaRN, oldest form": (
        config(**QWEN, rope_theta=1e6, rope_scaling={"type": "yarn", **YARN}),
        YARN_TEXT,
    ),
    "YaRN, old form": (
        config(**QWEN, rope_theta=1000000, rope_scaling={"rope_type": "yarn", **YARN}),
        YARN_TEXT,
    ),
    "YaRN, new form": (
        config(
            **QWEN,
            rope_theta=None,
            rope_parameters={"rope_type": "yarn", "rope_theta": 1000000, **YARN},
        ),
        YARN_TEXT,
    ),
    "YaRN, and the defaults of its parameters": (
        config(
            **QWEN,
            rope_theta=1e6,
            rope_scaling={"type": "yarn", **YARN, "beta_fast": 32, "beta_slow": 1.0},
        ),
        YARN_TEXT,
    ),
    "YaRN, its length the model's": (
        config(**QWEN, rope_theta=1e6, rope_scaling={"type": "yarn", "factor": 4.0}),
        YARN_TEXT,
    ),
    "Llama 3.1": (
        config(
            **LLAMA,
            rope_theta=500000.0,
            rope_scaling={
                "rope_type": "llama3",
                "original_max_position_embeddings": 8192,
                **LLAMA_3,
            },
        ),
        LLAMA_3_TEXT,
    ),
    "Gemma 3, old form": (
        config(
            **GEMMA | {"rope_theta": 1e6},
            rope_local_base_freq=10000.0,
            rope_scaling={"factor": 8.0, "rope_type": "linear"},
        ),
        GEMMA_TEXTS,
    ),
    "Gemma 3, new form": (
        config(
            **GEMMA,
            rope_parameters={
                "full_attention": LINEAR,
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        ),
        GEMMA_TEXTS,
    ),
    "DeepSeek V3": (
        config(
            **DEEPSEEK,
            num_key_value_heads=10,
            rope_theta=10000,
            rope_scaling={"type": "yarn", **YARN, "factor": 40, **MSCALES},
        ),
        DEEPSEEK_TEXT,
    ),
    "partial": (
        config("Glm4ForCausalLM", "glm4", num_key_value_heads=2, partial_rotary_factor=0.5),
        "default(rope_theta=10000, partial_rotary_factor=0.5)",
    ),
    "LongRoPE": (
        config(
            "Phi3ForCausalLM",
            "phi3",
            num_key_value_heads=2,
            max_position_embeddings=8192,
            original_max_position_embeddings=4096,
            rope_scaling={"type": "longrope", **LONGROPE},
            pad_token_id=0,
        ),
        LONGROPE_TEXT,
    ),
    "M-RoPE": (
        config(**QWEN, rope_theta=1e6, rope_scaling={"type": "mrope", "mrope_section": [4, 6, 6]}),
        "default(rope_theta=1000000)",
    ),
    "partial, of a release's own class": (
        config(
            "Qwen3NextForCausalLM",
            "qwen3_next",
            num_key_value_heads=2,
            head_dim=64,
            **DELTA,
            **MOE,
        ),
        "default(rope_theta=10000, partial_rotary_factor=0.25)",
    ),
    "partial, by its size": (FAMILIES["minimax m2"], MINIMAX_TEXT),
    "YaRN that is not written down": (FAMILIES["gpt-oss"], GPT_OSS_TEXT),
}
CASES = {
    name: (fields, (("", texts),) if isinstance(texts, str) else texts)
    for name, (fields, texts) in TABLE.items()
}
"""By name: a `config.json`, and its position encodings."""
SECTIONS = (("mrope_interleaved", "false"), ("mrope_section", "[4 6 6]"))
"""What is stated beside it of "M-RoPE"."""
