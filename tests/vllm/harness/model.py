"""Small models with random weights, made locally: no hub, no tokenizer."""

import importlib
import json

VOCAB_SIZE = 1024
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
}

SPARSE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 1024,
    "intermediate_size": 1024,
    "num_attention_heads": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 3,
    "q_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 256,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "topk_method": "noaux_tc",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
}
"""What DeepSeek's models with sparse attention share here: sizes that kernels are made for, and small ones."""
DEEPSEEK = {
    "deepseek-v3.2": {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "num_key_value_heads": 64,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        # few, so that the indexer's keys decide what is read of a short prompt
        "index_topk": 128,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "scoring_func": "sigmoid",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "deepseek-v4": {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "num_key_value_heads": 1,
        "head_dim": 512,
        "o_lora_rank": 256,
        "o_groups": 8,
        "sliding_window": 128,
        "index_topk": 64,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "num_nextn_predict_layers": 0,
        "num_hash_layers": 0,
        "scoring_func": "sqrtsoftplus",
        "swiglu_limit": 10.0,
        "compress_rope_theta": 160000.0,
        "rope_scaling": None,
        "intermediate_size": 256,
    },
}
"""DeepSeek's models with sparse attention, whose weights vLLM makes itself (`load_format="dummy"`)."""
RATIOS = {6: [0, 128, 4, 128, 4, 0], 61: [128, *[128, 4] * 30]}
"""Tokens of a row in each layer of a DeepSeek-V4: of a small one, and of DeepSeek-V4-Pro."""


def make_model(folder, *, kind="llama", kv_heads=4, layers=4, window=0):
    """Make a model under `folder`, once: a "llama", an "eagle" that drafts for it, a model that drafts for itself with
    "mtp" (MiMo, which is a Qwen 2 with a layer more), one with "states" (Granite 4: every second layer is a Mamba 2),
    with "mla" (DeepSeek 2 without experts), with experts ("moe", a Mixtral), with both ("mla-moe"), with a "sparse"
    attention's indexer (GLM 5 without experts), or with a `window` in every second layer (Gemma 3). Of "llama-8b",
    Llama 3.1 8B, and of `DEEPSEEK` the configuration alone.

    The weights are scaled up so that greedy tokens depend on the whole context: wrong K or V changes the first token.
    """
    path = folder / f"{kind}-kv{kv_heads}-l{layers}-w{window}"
    if (path / "complete").exists():
        return path
    if kind in DEEPSEEK:
        config = {**SPARSE, **DEEPSEEK[kind], "num_hidden_layers": layers}
        if kind == "deepseek-v4":
            config["compress_ratios"] = RATIOS[layers]
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(config))
        return path
    import torch

    transformers = importlib.import_module("transformers")  # installed beside vLLM only

    common = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": kv_heads,
        "head_dim": 32,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": None,
    }
    torch.manual_seed(layers)
    config = _config(transformers, common, kind, window)
    if kind == "llama-8b":
        config.save_pretrained(path)
        return path
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "conv1d" not in parameter_name:
                parameter.mul_(10 if "embed" in parameter_name else 4)
    if kind == "eagle":
        # only the layers
        weights = {
            name.removeprefix("model."): value
            for name, value in model.state_dict().items()
            if ".layers." in name and ".0.input_layernorm" not in name
        }
        _save(model, path, "LlamaForCausalLM", weights, "fc.weight")
    elif kind == "mtp":
        # with a layer that drafts: a copy of the last one
        weights, draft = model.state_dict(), "model.mtp_layers.0."
        last = model.model.layers[-1].state_dict()
        weights |= {draft + name: value.clone() for name, value in last.items()}
        for norm in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
            weights[f"{draft}{norm}.weight"] = torch.ones(common["hidden_size"])
        model.config.num_nextn_predict_layers = 1
        _save(model, path, "MiMoForCausalLM", weights, f"{draft}input_proj.weight")
    else:
        model.save_pretrained(path)
    (path / "complete").touch()
    return path


def _save(model, path, architecture, weights, joint):
    """Save a draft's weights with the matrix `joint`, which joins the target's hidden states with its embeddings."""
    import torch

    width = model.config.hidden_size
    weights[joint] = torch.randn(width, 2 * width) / width**0.5
    model.config.architectures = [architecture]
    model.config.save_pretrained(path)
    importlib.import_module("safetensors.torch").save_file(weights, path / "model.safetensors")


def _config(transformers, common, kind, window):
    layers = common["num_hidden_layers"]
    if kind == "llama-8b":
        return transformers.LlamaConfig(**LLAMA_8B)
    if kind == "moe":
        return transformers.MixtralConfig(**common, num_local_experts=8, num_experts_per_tok=2)
    if kind in ("mla", "mla-moe"):
        del common["head_dim"]
        return transformers.DeepseekV2Config(
            **common | {"num_key_value_heads": common["num_attention_heads"]},
            first_k_dense_replace=1 if kind == "mla-moe" else layers,  # layers without experts
            n_routed_experts=8,
            num_experts_per_tok=2,
            n_group=1,  # vLLM 0.33 takes no None
            topk_group=1,
            moe_intermediate_size=256,
            q_lora_rank=None,
            # what attention backends are made for
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
        )
    if kind == "sparse":
        del common["head_dim"]
        return transformers.GlmMoeDsaConfig(
            **common | {"num_key_value_heads": common["num_attention_heads"]},
            first_k_dense_replace=layers,
            n_routed_experts=8,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            moe_intermediate_size=256,
            q_lora_rank=128,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            index_topk=2048,
            index_n_heads=4,
            index_head_dim=128,
            num_nextn_predict_layers=0,
        )
    if kind == "states":
        kinds = ["mamba", "attention"] * (layers // 2)
        return transformers.GraniteMoeHybridConfig(
            **common,
            layer_types=kinds,
            num_local_experts=0,
            num_experts_per_tok=0,
            shared_intermediate_size=512,
            attention_multiplier=32**-0.5,
            position_embedding_type="rope",
            mamba_n_heads=16,
            mamba_d_head=32,
            mamba_n_groups=2,
            mamba_d_state=32,
        )
    if kind == "mtp":
        return transformers.Qwen2Config(**common)
    if window:
        kinds = ["sliding_attention", "full_attention"] * (layers // 2)
        return transformers.Gemma3TextConfig(
            **common, sliding_window=window, layer_types=kinds, query_pre_attn_scalar=32
        )
    return transformers.LlamaConfig(**common)
