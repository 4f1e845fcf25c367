"""The cache shape of a model from its Hugging Face `config.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from kvconnector.bench.shapes import ModelShape
from kvconnector.errors import ConfigError

_ATTENTION = frozenset({"full_attention", "sliding_attention", "chunked_attention"})


def named_model(name: str) -> ModelShape:
    """A known model, or that of a `config.json`. Raises ConfigError: there is none."""
    is_path = name.endswith(".json") or "/" in name or Path(name).is_dir()
    return read_model_config(Path(name)) if is_path else ModelShape.parse(name)


def read_model_config(path: Path) -> ModelShape:
    """The model that a `config.json`, or a directory with one, describes.

    Keys are those of Hugging Face transformers; a multimodal model's are in its `text_config`. A `kv_lora_rank` means
    MLA: one latent of that many elements and `qk_rope_head_dim` more. Raises ConfigError: the file cannot be read,
    lacks a number, or describes layers that keep a recurrent state.
    """
    file = path / "config.json" if path.is_dir() else path
    config = _read_object(file)
    text = config.get("text_config")
    text = text if isinstance(text, dict) else config
    others = sorted({str(kind) for kind in text.get("layer_types") or ()} - _ATTENTION)
    if others:
        raise ConfigError(
            "only layers with keys and values can be planned", path=str(file), layer_types=others
        )

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
    num_layers = number("num_hidden_layers", "n_layer")
    is_mla = text.get("kv_lora_rank") is not None
    heads = 1 if is_mla else number("num_key_value_heads", "num_attention_heads", "n_head")
    if is_mla:
        head_dim = number("kv_lora_rank") + number("qk_rope_head_dim")
    elif text.get("head_dim") is not None:
        head_dim = number("head_dim")
    else:
        head_dim = number("hidden_size", "n_embd") // number("num_attention_heads", "n_head")
    return ModelShape(
        name=str(config.get("_name_or_path") or config.get("model_type") or file.parent.name),
        num_layers=num_layers,
        num_kv_heads=heads,
        head_dim=head_dim,
        dtype=str(dtype),
        is_mla=is_mla,
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
