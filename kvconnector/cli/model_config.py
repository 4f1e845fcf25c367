"""The cache shape of a model from its Hugging Face `config.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from kvconnector.bench.shapes import ModelShape
from kvconnector.cache.specs import DType
from kvconnector.cli.model_layers import Attention, layer_groups
from kvconnector.errors import ConfigError

DEFAULTS = {
    "gemma3_text": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
    "t5": {"num_layers": 6, "num_heads": 8, "d_kv": 64},
}
"""What transformers takes for fields that a configuration of this `model_type` leaves out."""


def named_model(name: str) -> ModelShape:
    """A known model, or that of a `config.json`. Raises ConfigError: there is none."""
    is_path = name.endswith(".json") or "/" in name or Path(name).is_dir()
    return read_model_config(Path(name)) if is_path else ModelShape.parse(name)


def read_model_config(path: Path) -> ModelShape:
    """The model that a `config.json`, or a directory with one, describes.

    Keys are those of Hugging Face transformers; a multimodal model's are in its `text_config`. A `kv_lora_rank` means
    MLA: one latent of that many elements and `qk_rope_head_dim` more. Raises ConfigError: the file cannot be read,
    lacks a number, or describes layers of a kind that is not known.
    """
    file = path / "config.json" if path.is_dir() else path
    config = _read_object(file)
    text = config.get("text_config")
    text = text if isinstance(text, dict) else config
    text = {**DEFAULTS.get(str(text.get("model_type")), {}), **text}

    def number(*names: str) -> int:
        found = {name: text[name] for name in names if text.get(name) is not None}
        value = next(iter(found.values()), None)
        if isinstance(value, int) and value > 0:
            return value
        raise ConfigError(
            "the model's configuration lacks a positive number",
            path=str(file),
            needed=names,
            found=found,
        )

    dtype = text.get("dtype") or text.get("torch_dtype") or config.get("torch_dtype") or "bfloat16"
    # of an encoder-decoder model the decoder's, which alone caches
    decoder = ("decoder_layers", "num_decoder_layers") if text.get("is_encoder_decoder") else ()
    num_layers = number(*decoder, "num_hidden_layers", "n_layer", "num_layers")
    is_mla = text.get("kv_lora_rank") is not None
    all_heads = ("decoder_attention_heads", "num_attention_heads", "n_head", "num_heads")
    if is_mla:
        heads, head_dim = 1, number("kv_lora_rank") + number("qk_rope_head_dim")
    else:
        heads = number("num_key_value_heads", *all_heads)
        own = next((name for name in ("head_dim", "d_kv") if text.get(name) is not None), None)
        head_dim = (
            number(own) if own else number("hidden_size", "n_embd", "d_model") // number(*all_heads)
        )
    attention = Attention(heads, head_dim, DType(str(dtype)), use_mla=is_mla)
    return ModelShape(
        name=str(config.get("_name_or_path") or config.get("model_type") or file.parent.name),
        num_layers=num_layers,
        num_kv_heads=heads,
        head_dim=head_dim,
        dtype=str(dtype),
        is_mla=is_mla,
        num_draft_layers=int(text.get("num_nextn_predict_layers") or 0),
        groups=layer_groups(text, num_layers, attention, number, str(file)),
    )


def _read_object(file: Path) -> dict[str, Any]:
    try:
        config = msgspec.json.decode(file.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"cannot read the model's configuration: {error}", path=str(file)
        ) from error
    if not isinstance(config, dict):
        raise ConfigError("a model's configuration is a JSON object", path=str(file))
    return config
