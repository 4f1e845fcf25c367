"""Small models with random weights, made locally: no hub, no tokenizer."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

VOCAB_SIZE = 1024
MAX_TOKENS = 4096


def make_model(
    folder: Path, *, kv_heads: int = 4, layers: int = 4, window: int = 0, has_states: bool = False
) -> Path:
    """A Llama under `folder`, made once. With a `window` it is a Gemma 3, with `has_states` a Granite 4: every second
    layer has a window, or is a Mamba 2.

    The weights are scaled up so that greedy tokens depend on the whole context: wrong K or V changes the first token.
    """
    kind = "states" if has_states else f"window{window}" if window else "llama"
    path = folder / f"{kind}-kv{kv_heads}-l{layers}"
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
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        _config(transformers, common, window, has_states), dtype=torch.float32
    )
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "conv1d" not in parameter_name:
                parameter.mul_(10 if "embed" in parameter_name else 4)
    model.save_pretrained(path)
    (path / "complete").write_text(json.dumps(common))
    return path


def _config(transformers: Any, common: dict[str, Any], window: int, has_states: bool) -> Any:
    layers = common["num_hidden_layers"]
    if has_states:
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
    if window:
        kinds = ["sliding_attention", "full_attention"] * (layers // 2)
        return transformers.Gemma3TextConfig(
            **common, sliding_window=window, layer_types=kinds, query_pre_attn_scalar=32
        )
    return transformers.LlamaConfig(**common)
