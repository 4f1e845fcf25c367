"""Small models with random weights, made locally: no hub, no tokenizer."""

import importlib

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


def make_model(folder, *, kind="llama", kv_heads=4, layers=4, window=0):
    """Make a model under `folder`, once: a "llama", an "eagle" that drafts for it, a model that drafts for itself with
    "mtp" (MiMo, which is a Qwen 2 with a layer more), one with "states" (Granite 4: every second layer is a Mamba 2),
    with "mla" (DeepSeek 2 without experts), with experts ("moe", a Mixtral), with both ("mla-moe"), or with a `window`
    in every second layer (Gemma 3). Of "llama-8b", Llama 3.1 8B, the configuration alone.

    The weights are scaled up so that greedy tokens depend on the whole context: wrong K or V changes the first token.
    """
    path = folder / f"{kind}-kv{kv_heads}-l{layers}-w{window}"
    if (path / "complete").exists():
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
