"""Small models with random weights, made locally: no hub, no tokenizer."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

VOCAB_SIZE = 1024
MAX_TOKENS = 4096


def make_model(folder: Path, *, kv_heads: int = 4, layers: int = 4, window: int = 0) -> Path:
    """A Llama (or, with a `window`, Gemma 2 shaped by `hybrid_config`) under `folder`, made once.

    The weights are scaled up so that greedy tokens depend on the whole context: wrong K or V changes the first token.
    """
    name = (
        f"llama-kv{kv_heads}-l{layers}" if not window else f"window{window}-kv{kv_heads}-l{layers}"
    )
    path = folder / name
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
        "max_position_embeddings": MAX_TOKENS,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": None,
    }
    if window:
        kinds = ["sliding_attention", "full_attention"] * (layers // 2)
        config = transformers.Gemma3TextConfig(
            **common, sliding_window=window, layer_types=kinds, query_pre_attn_scalar=32
        )
    else:
        config = transformers.LlamaConfig(**common)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(10 if "embed" in parameter_name else 4)
    model.save_pretrained(path)
    (path / "complete").write_text(json.dumps(common))
    return path
