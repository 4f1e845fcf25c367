"""Small models with random weights, made as for the vLLM cases, in forms that SGLang's CPU code can run."""

import importlib
import json

from tests.vllm.harness.model import make_model

FEW_TOKENS = 4


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
