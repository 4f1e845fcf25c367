"""A small model and a tokenizer with random contents, made locally so that the example needs no hub."""

from __future__ import annotations

import importlib
from pathlib import Path

VOCAB_SIZE = 1024


def make_model(path: Path) -> None:
    """Write a Llama of four layers and a tokenizer whose words are `w0`, `w1`, ... to `path`, unless it is there.

    The weights are scaled up, so that greedy tokens depend on the whole context.
    """
    if (path / "tokenizer.json").exists():
        return
    import torch

    transformers = importlib.import_module("transformers")  # comes with vLLM

    config = transformers.LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(10 if "embed" in name else 4)
    model.save_pretrained(path)
    save_tokenizer(path)


def save_tokenizer(path: Path) -> None:
    """Write a tokenizer of `VOCAB_SIZE` words beside a model."""
    transformers = importlib.import_module("transformers")
    tokenizers = importlib.import_module("tokenizers")
    words = {f"w{number}": number for number in range(VOCAB_SIZE)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="w0"
    ).save_pretrained(path)
