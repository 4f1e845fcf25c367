"""Small models with random weights, made as for the vLLM cases, in forms that SGLang's CPU code can run."""

import importlib
import json

from tests.vllm.harness.model import make_model

FEW_TOKENS = 4
ADAPTER_RANK = 4


def model_of(folder, *, kind="llama", kv_heads=4, window=0):
    """Make a model of `kind` "llama", "mla", "mla-moe", "mtp", "sparse", "states" or with a `window`, once."""
    layers = 2 if kind.startswith("mla") else 4
    path = make_model(folder, kind=kind, kv_heads=kv_heads, layers=layers, window=window)
    if kind == "mla-moe":
        _change(path, scoring_func="softmax")
    if kind.startswith("mla") or kind == "sparse":
        # DeepSeek's only rotary embedding that SGLang computes on a CPU
        rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "mscale": 1.0}
        rope |= {"mscale_all_dim": 1.0, "original_max_position_embeddings": 4096}
        _change(path, rope_parameters=rope, rope_scaling=rope, moe_layer_freq=1)
    if kind == "mtp":
        _speak_few_tokens(path)
    if window:
        # so that its windows have a pool of their own: see kernels.py
        _change(path, is_hybrid_swa=True, hybrid_layer_pattern=[1, 0] * (layers // 2))
    return path


def adapters_of(model):
    """Make two adapters (LoRA) with random weights for a llama of `model_of`, once. Returns their folders by name."""
    torch, tensors = map(importlib.import_module, ("torch", "safetensors.torch"))
    config = json.loads((model / "config.json").read_text())
    hidden, dim = config["hidden_size"], config["head_dim"]
    outputs = {
        "q_proj": config["num_attention_heads"] * dim,
        "k_proj": config["num_key_value_heads"] * dim,
        "v_proj": config["num_key_value_heads"] * dim,
    }
    found = {name: model / f"adapter-{name}" for name in ("sql", "poems")}
    for seed, path in enumerate(found.values()):
        path.mkdir(exist_ok=True)
        drawn = torch.Generator().manual_seed(seed)
        weights = {
            f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_{part}.weight": (
                torch.randn(shape, generator=drawn) * hidden**-0.5
            )
            for layer in range(config["num_hidden_layers"])
            for name, size in outputs.items()
            for part, shape in (("A", (ADAPTER_RANK, hidden)), ("B", (size, ADAPTER_RANK)))
        }
        tensors.save_file(weights, path / "adapter_model.safetensors")
        described = {"peft_type": "LORA", "r": ADAPTER_RANK, "lora_alpha": 4 * ADAPTER_RANK}
        described |= {"target_modules": [*outputs], "bias": "none", "task_type": "CAUSAL_LM"}
        (path / "adapter_config.json").write_text(json.dumps(described))
    return found


def _speak_few_tokens(path):
    """Give a few tokens most of the model's answers, once, so that its layer for drafts, which knows nothing, is right
    now and then. Which of them it answers still depends on the whole context.
    """
    place, mark = path / "model.safetensors", path / "few-tokens"
    if mark.exists():
        return
    tensors = importlib.import_module("safetensors.torch")
    weights = tensors.load_file(place)
    weights["lm_head.weight"][:FEW_TOKENS] *= 10
    tensors.save_file(weights, place)
    mark.touch()


def _change(path, **values):
    config = path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | values))
