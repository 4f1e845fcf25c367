"""The cache shape of a model from its Hugging Face `config.json`: the data that each of its layers caches.

A configuration names the kinds of its layers in one of a few ways: a list (`layer_types`), a pattern, a period, or not
at all because the architecture implies them. A reader that assumes that all layers keep every token plans too much for
a window, and the wrong thing for a state. So unknown fields and kinds are refused by name.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import msgspec

from kvconnector.bench import file_errors
from kvconnector.bench.shapes import LayerGroup, ModelShape, parts_of_token
from kvconnector.cache.specs import DType
from kvconnector.errors import ConfigError
from kvconnector.planning import Keeps

Parts: TypeAlias = tuple[tuple[str, int, int, int], ...]
"""`LayerGroup.parts`."""

ValueT = TypeVar("ValueT")

DEFAULTS = {
    "gemma3_text": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
    "t5": {"num_layers": 6, "num_heads": 8, "d_kv": 64},
}
"""Defaults of transformers for fields that a configuration of this `model_type` leaves out."""
ATTENTION: dict[str, tuple[str, Keeps, tuple[str, ...]]] = {
    "full": ("full attention", "all", ()),
    "window": ("window of {}", "window", ("sliding_window",)),
    "chunk": ("chunk of {}", "chunk", ("attention_chunk_size",)),
}
"""Layers that keep tokens: their names, the tokens that they keep, and the fields that say how many."""
KINDS = {
    **dict.fromkeys(("full_attention", "attention", "*", "global"), "full"),
    "sliding_attention": "window",
    "chunked_attention": "chunk",
    "linear_attention": "delta",
    **dict.fromkeys(("mamba", "mamba1", "mamba2", "M"), "mamba"),
    **dict.fromkeys(("-", "mlp", "E", "moe"), "none"),
}
"""The data that a layer caches, by the layer's name in a configuration."""
UNKNOWN_CACHES = re.compile(r"kv_shared")
"""Fields of layers that share another one's cache."""
UNKNOWN_FIELDS = re.compile(
    r"mamba|ssm|recurrent|rwkv|lru_|hybrid|linear_(?:num|key|value|conv|attn)|conv_l|layers?_block_type|block_types"
    r"|attn_layer|attn_type|full_attn|attention_chunk|global_attn|attention_types|local_window"
)
"""Fields of architectures whose layers differ."""
WINDOW_PERIODS = {"gemma2": 2, "gemma3": 6, "cohere2": 4, "exaone4": 4}
"""One layer in this many keeps every token, if a configuration does not say otherwise."""


def named_model(name: str) -> ModelShape:
    """Return a known model, or that of a `config.json`. Raises ConfigError: there is no such model."""
    is_path = name.endswith(".json") or "/" in name or os.path.isdir(name)
    return read_model_config(Path(name)) if is_path else ModelShape.parse(name)


def read_model_config(path: Path) -> ModelShape:
    """Return the model that a `config.json`, or a directory with one, describes.

    Keys are those of Hugging Face transformers; a multimodal model's are in its `text_config`. A `kv_lora_rank` means
    MLA: one latent of that many elements and `qk_rope_head_dim` more. Raises ConfigError: the file cannot be read,
    lacks a number, or describes layers of a kind that is not known.
    """
    file = path / "config.json" if path.is_dir() else path
    whole = _read_object(file)
    text = whole.get("text_config")
    text = text if isinstance(text, dict) else whole
    text = {**DEFAULTS.get(str(text.get("model_type")), {}), **text}
    number = (config := _Config(text, str(file))).number
    dtype = text.get("dtype") or text.get("torch_dtype") or whole.get("torch_dtype") or "bfloat16"
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
    token = parts_of_token(heads, head_dim, str(dtype), is_mla=is_mla)
    model = ModelShape(
        name=str(whole.get("_name_or_path") or whole.get("model_type") or file.parent.name),
        num_layers=num_layers,
        num_kv_heads=heads,
        head_dim=head_dim,
        dtype=str(dtype),
        is_mla=is_mla,
        num_draft_layers=config.optional("num_nextn_predict_layers", 0),
    )
    return msgspec.structs.replace(model, groups=config.groups(num_layers, token, str(dtype)))


def _read_object(file: Path) -> dict[str, Any]:
    with file_errors("cannot read the model's configuration", file):
        config = msgspec.json.decode(file.read_bytes())
    if not isinstance(config, dict):
        raise ConfigError("a model's configuration is a JSON object", path=str(file))
    return config


@dataclass(frozen=True, slots=True)
class _Config:
    """The fields of the text model in the file at `path`."""

    fields: dict[str, Any]
    path: str

    def number(self, *names: str) -> int:
        """Return the first of these fields, a positive number. Raises ConfigError: it is missing, or something else."""
        found = {name: self.fields[name] for name in names if self.fields.get(name) is not None}
        value = next(iter(found.values()), None)
        if isinstance(value, int) and value > 0:
            return value
        raise ConfigError(
            "the model's configuration lacks a positive number",
            path=self.path,
            needed=names,
            found=found,
        )

    def optional(self, name: str, default: ValueT, *, least: int = 0) -> ValueT:
        """Return a field, or `default` if it is missing or null. Raises ConfigError: wrong type, or too low."""
        value = self.fields.get(name)
        if value is None:
            return default
        if type(value) is type(default) and not (isinstance(value, int) and value < least):
            return value
        raise ConfigError(
            "a field of the model's configuration makes no sense", path=self.path, **{name: value}
        )

    def groups(self, num_layers: int, token: Parts, dtype: str) -> tuple[LayerGroup, ...]:
        """Return the groups of the decoder's layers; none if all keep every token. Raises ConfigError: a kind of layer
        is not known, or a field is missing.
        """
        fields, every = self.fields, tuple(range(num_layers))
        found: dict[str, list[int]] = {}
        for layer, kind in enumerate(self._kinds(num_layers)):
            found.setdefault(kind, []).append(layer)
        groups = [
            self._group(kind, tuple(layers), token, dtype)
            for kind, layers in sorted(found.items())
            if kind != "none"
        ]
        if fields.get("index_topk"):
            # DeepSeek-V3.2: keys in fp8, with a float32 scale for each 128 elements
            head_size = self.number("index_head_dim")
            key = parts_of_token(1, head_size + head_size // 128 * 4, "uint8", is_mla=True)
            groups.append(LayerGroup(kind="indexer", layers=every, parts=key))
        if fields.get("is_encoder_decoder"):
            groups.append(
                LayerGroup(
                    kind="cross attention",
                    layers=every,
                    parts=token,
                    keeps="encoder",
                    encoder_tokens=self.optional("max_source_positions", 0),
                )
            )
        if not groups:
            raise ConfigError("no layer of the model caches anything", path=self.path)
        return () if set(found) == {"full"} and len(groups) == 1 else tuple(groups)

    def _group(self, kind: str, layers: tuple[int, ...], token: Parts, dtype: str) -> LayerGroup:
        if kind in ATTENTION:
            name, keeps, names = ATTENTION[kind]
            size = self.number(*names) if names else 0
            name = name.format(size)
            return LayerGroup(
                kind=name, layers=layers, parts=token, keeps=keeps, extent_tokens=size
            )
        name, *shapes = self._delta_net() if kind == "delta" else self._mamba()
        own = self.fields.get("mamba_ssm_dtype") or self.fields.get("mamba_ssm_cache_dtype")
        dtypes = dtype, str(own or dtype)
        parts = tuple(
            (f"state{number}", *shape, DType(each).item_size_bytes)
            for number, (shape, each) in enumerate(zip(shapes, dtypes, strict=True))
        )
        return LayerGroup(kind=f"{name} state", layers=layers, parts=parts, keeps="state")

    def _delta_net(self) -> tuple[str, tuple[int, int], tuple[int, int]]:
        """Convolution `[channels of Q, K and V, width - 1]` and state `[value heads, value dim x key dim]`."""
        number = self.number
        key_dim, value_dim = number("linear_key_head_dim"), number("linear_value_head_dim")
        values = number("linear_num_value_heads")
        channels = 2 * number("linear_num_key_heads") * key_dim + values * value_dim
        convolution = (channels, number("linear_conv_kernel_dim") - 1)
        return "gated delta net", convolution, (values, value_dim * key_dim)

    def _mamba(self) -> tuple[str, tuple[int, int], tuple[int, int]]:
        """Convolution `[channels, width - 1]` and state: `[heads, head dim x state]` of Mamba 2, `[channels, state]` of
        Mamba 1, which has no heads.
        """
        number = self.number
        width = number("mamba_d_conv", "conv_kernel") - 1
        state = number("mamba_d_state", "ssm_state_size", "state_size")
        names = {"mamba_n_heads", "mamba_num_heads"} & self.fields.keys()
        if not names:
            channels = number("mamba_expand", "expand") * number("hidden_size")
            return "Mamba", (channels, width), (channels, state)
        heads, dim = number(*names), number("mamba_d_head", "mamba_head_dim")
        channels = heads * dim + 2 * number("mamba_n_groups", "n_groups") * state
        return "Mamba", (channels, width), (heads, dim * state)

    def _kinds(self, num_layers: int) -> list[str]:
        """Return the data that each layer caches, as values of `KINDS`."""
        self._refuse_fields(UNKNOWN_CACHES)
        names = ("layer_types", "layers_block_type", "hybrid_override_pattern", "layer_pattern")
        named = next(filter(None, map(self.fields.get, names)), None)
        if not named:
            return self._unnamed_kinds(range(num_layers))
        named = named if isinstance(named, list | str) else [named]
        unknown = sorted({str(kind) for kind in named} - KINDS.keys())
        if unknown or len(named) < num_layers:
            raise ConfigError(
                "the kinds of the model's layers cannot be planned",
                path=self.path,
                unknown=unknown,
                named=len(named),
                layers=num_layers,
            )
        return [KINDS[kind] for kind in named[:num_layers]]

    def _unnamed_kinds(self, layers: range) -> list[str]:
        """Return the kinds of layers of architectures whose configurations have a period, or nothing, not a list."""
        get, optional = self.fields.get, self.optional
        architecture = str(get("model_type", "")).removesuffix("_text")
        if architecture == "jamba":
            period = optional("attn_layer_period", 8, least=1)
            offset = optional("attn_layer_offset", 4)
            return ["full" if i % period == offset else "mamba" for i in layers]
        if architecture == "bamba":
            own: list[int] = optional("attn_layer_indices", [])
            return ["full" if i in own else "mamba" for i in layers]
        if architecture in ("qwen3_next", "qwen3_5", "qwen3_5_moe"):
            interval = optional("full_attention_interval", 4, least=1)
            return ["full" if (i + 1) % interval == 0 else "delta" for i in layers]
        if architecture in ("mamba", "mamba2"):
            return ["mamba" for _ in layers]
        if architecture == "llama4":
            interval = optional("no_rope_layer_interval", 4, least=1)
            ropes = optional("no_rope_layers", []) or [(i + 1) % interval for i in layers]
            has_chunks = get("attention_chunk_size") is not None
            return ["chunk" if rope and has_chunks else "full" for rope in ropes[: len(layers)]]
        self._refuse_fields(UNKNOWN_FIELDS)
        return self._windows(architecture, layers)

    def _windows(self, architecture: str, layers: range) -> list[str]:
        get = self.fields.get
        if not get("sliding_window") or get("use_sliding_window") is False:
            return ["full" for _ in layers]
        period = get("sliding_window_pattern") or WINDOW_PERIODS.get(architecture)
        if isinstance(period, int):
            return ["window" if (i + 1) % period else "full" for i in layers]
        # Qwen 2: the first layers keep everything
        first = self.optional("max_window_layers", 0) if get("use_sliding_window") else 0
        return ["window" if i >= first else "full" for i in layers]

    def _refuse_fields(self, unknown: re.Pattern[str]) -> None:
        fields = sorted(
            name for name, value in self.fields.items() if value and unknown.search(name)
        )
        if fields:
            raise ConfigError(
                "this model's configuration does not say what its layers cache",
                path=self.path,
                model_type=self.fields.get("model_type"),
                fields=fields,
            )
