"""Which layers of a model cache what, from its Hugging Face configuration.

A configuration names the kinds of its layers in one of a few ways: a list (`layer_types`), a pattern, a period, or not
at all because the architecture is one of them. Whoever reads it as if all layers kept every token plans too much for a
window and something else than a state. So what is not known here is refused by the name of its field or kind.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from kvconnector.bench.shapes import LayerGroup
from kvconnector.cache.specs import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    DType,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from kvconnector.errors import ConfigError

Number: TypeAlias = Callable[..., int]
"""`number(name, other_name, ...)`: the positive number that one of these fields has. Raises ConfigError: none has."""

KINDS = {
    "full_attention": "full",
    "attention": "full",
    "*": "full",
    "global": "full",
    "sliding_attention": "window",
    "chunked_attention": "chunk",
    "linear_attention": "delta",
    "mamba": "mamba",
    "mamba1": "mamba",
    "mamba2": "mamba",
    "M": "mamba",
    "-": "none",
    "mlp": "none",
    "E": "none",
    "moe": "none",
}
"""What a configuration calls a layer, and what that layer caches."""
UNKNOWN_CACHES = re.compile(r"kv_shared")
"""Fields of layers that share another one's cache."""
UNKNOWN_FIELDS = re.compile(
    r"mamba|ssm|recurrent|rwkv|lru_|hybrid|linear_(?:num|key|value|conv|attn)|conv_l|layers?_block_type|block_types"
    r"|attn_layer|attn_type|full_attn|attention_chunk|global_attn|attention_types|local_window"
)
"""Fields of architectures whose layers differ."""


@dataclass(frozen=True, slots=True)
class Attention:
    """K and V of one token of an attention layer, on all ranks together."""

    num_kv_heads: int
    head_size: int
    dtype: DType
    use_mla: bool = False

    def spec(self, kind: type[AttentionSpec], **more: int) -> AttentionSpec:
        """A layer of this kind, a block of which is one token."""
        sizes = {"num_kv_heads": self.num_kv_heads, "head_size": self.head_size}
        return kind(block_size=1, dtype=self.dtype, use_mla=self.use_mla, **sizes, **more)


def layer_groups(
    config: Mapping[str, Any], num_layers: int, attention: Attention, number: Number, path: str
) -> tuple[LayerGroup, ...]:
    """The groups of a model's layers; none if all keep every token.

    Args:
        config: the fields of the text model.
        num_layers: of its decoder.
        attention: what an attention layer caches of a token.
        number: reads a field, see `Number`.
        path: of the file, for errors.

    Raises:
        ConfigError: a kind of layer that is not known, or a field that is missing.
    """
    kinds = _kinds(config, num_layers, path)
    found: dict[str, list[int]] = {}
    for layer, kind in enumerate(kinds):
        found.setdefault(kind, []).append(layer)
    groups = [
        _group(kind, tuple(layers), config, attention, number)
        for kind, layers in sorted(found.items())
        if kind != "none"
    ]
    if config.get(
        "index_topk"
    ):  # DeepSeek-V3.2: keys in fp8, with a float32 scale for each 128 elements
        head_size = number("index_head_dim")
        indexer = Attention(1, head_size + head_size // 128 * 4, DType("uint8"), use_mla=True)
        spec = indexer.spec(FullAttentionSpec)
        groups.append(LayerGroup(kind="indexer", layers=tuple(range(num_layers)), spec=spec))
    if config.get("is_encoder_decoder"):
        positions = config.get("max_source_positions")
        cross = attention.spec(CrossAttentionSpec)
        groups.append(
            LayerGroup(
                kind="cross attention",
                layers=tuple(range(num_layers)),
                spec=cross,
                encoder_tokens=positions if isinstance(positions, int) else 0,
            )
        )
    return () if set(found) == {"full"} and len(groups) == 1 else tuple(groups)


def _group(
    kind: str,
    layers: tuple[int, ...],
    config: Mapping[str, Any],
    attention: Attention,
    number: Number,
) -> LayerGroup:
    if kind == "full":
        name, spec = "full attention", attention.spec(FullAttentionSpec)
    elif kind == "window":
        window = number("sliding_window")
        name = f"window of {window}"
        spec = attention.spec(SlidingWindowSpec, sliding_window=window)
    elif kind == "chunk":
        chunk = number("attention_chunk_size")
        name = f"chunk of {chunk}"
        spec = attention.spec(ChunkedLocalAttentionSpec, attention_chunk_size=chunk)
    else:
        states = _delta_net(number) if kind == "delta" else _mamba(config, number)
        of_state = config.get("mamba_ssm_dtype") or config.get("mamba_ssm_cache_dtype")
        dtypes = (attention.dtype, DType(str(of_state)) if of_state else attention.dtype)
        state = MambaSpec(block_size=1, shapes=states, dtypes=dtypes)
        kinds = {"delta": "gated delta net", "mamba": "Mamba"}
        return LayerGroup(kind=f"{kinds[kind]} state", layers=layers, spec=state)
    return LayerGroup(kind=name, layers=layers, spec=spec)


def _delta_net(number: Number) -> tuple[tuple[int, ...], ...]:
    """Convolution `[channels of Q, K and V, width - 1]` and state `[value heads, value dim, key dim]`."""
    key_dim, value_dim = number("linear_key_head_dim"), number("linear_value_head_dim")
    values = number("linear_num_value_heads")
    channels = 2 * number("linear_num_key_heads") * key_dim + values * value_dim
    return ((channels, number("linear_conv_kernel_dim") - 1), (values, value_dim, key_dim))


def _mamba(config: Mapping[str, Any], number: Number) -> tuple[tuple[int, ...], ...]:
    """Convolution `[channels, width - 1]` and state: Mamba 2's `[heads, head dim, state]`, or Mamba 1's `[channels,
    state]`, which has no heads.
    """
    width = number("mamba_d_conv", "conv_kernel") - 1
    state = number("mamba_d_state", "ssm_state_size", "state_size")
    names = {"mamba_n_heads", "mamba_num_heads"} & config.keys()
    if not names:
        channels = number("mamba_expand", "expand") * number("hidden_size")
        return ((channels, width), (channels, state))
    heads, dim = number(*names), number("mamba_d_head", "mamba_head_dim")
    channels = heads * dim + 2 * number("mamba_n_groups", "n_groups") * state
    return ((channels, width), (heads, dim, state))


def _kinds(config: Mapping[str, Any], num_layers: int, path: str) -> list[str]:
    """What each layer caches, in the words of `KINDS`' values."""
    _refuse_fields(config, UNKNOWN_CACHES, path)
    named = config.get("layer_types") or config.get("layers_block_type")
    named = named or config.get("hybrid_override_pattern") or config.get("layer_pattern")
    if not named:
        return _unnamed_kinds(config, num_layers, path)
    unknown = sorted({str(kind) for kind in named} - KINDS.keys())
    if unknown or len(named) < num_layers:
        raise ConfigError(
            "the kinds of the model's layers cannot be planned",
            path=path,
            unknown=unknown,
            named=len(named),
            layers=num_layers,
        )
    return [KINDS[kind] for kind in named[:num_layers]]


def _unnamed_kinds(config: Mapping[str, Any], num_layers: int, path: str) -> list[str]:
    """Those of architectures whose configurations have a period, or nothing, instead of a list."""
    architecture = str(config.get("model_type", "")).removesuffix("_text")
    layers = range(num_layers)
    if architecture == "jamba":
        period, offset = config.get("attn_layer_period", 8), config.get("attn_layer_offset", 4)
        return ["full" if i % period == offset else "mamba" for i in layers]
    if architecture == "bamba":
        own = config.get("attn_layer_indices") or []
        return ["full" if i in own else "mamba" for i in layers]
    if architecture in ("qwen3_next", "qwen3_5", "qwen3_5_moe"):
        interval = config.get("full_attention_interval", 4)
        return ["full" if (i + 1) % interval == 0 else "delta" for i in layers]
    if architecture in ("mamba", "mamba2"):
        return ["mamba" for _ in layers]
    if architecture == "llama4":
        interval = config.get("no_rope_layer_interval", 4)
        ropes = config.get("no_rope_layers") or [(i + 1) % interval for i in layers]
        has_chunks = config.get("attention_chunk_size") is not None
        return ["chunk" if rope and has_chunks else "full" for rope in ropes[:num_layers]]
    _refuse_fields(config, UNKNOWN_FIELDS, path)
    return _windows(config, architecture, num_layers)


def _refuse_fields(config: Mapping[str, Any], unknown: re.Pattern[str], path: str) -> None:
    fields = sorted(name for name, value in config.items() if value and unknown.search(name))
    if fields:
        raise ConfigError(
            "this model's configuration does not say what its layers cache",
            path=path,
            model_type=config.get("model_type"),
            fields=fields,
        )


WINDOW_PERIODS = {"gemma2": 2, "gemma3": 6, "cohere2": 4, "exaone4": 4}
"""Every how many layers one keeps every token, where a configuration does not say it."""


def _windows(config: Mapping[str, Any], architecture: str, num_layers: int) -> list[str]:
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return ["full"] * num_layers
    period = config.get("sliding_window_pattern") or WINDOW_PERIODS.get(architecture)
    if isinstance(period, int):
        return ["window" if (i + 1) % period else "full" for i in range(num_layers)]
    if config.get("use_sliding_window"):  # Qwen 2: the first layers keep everything
        first = config.get("max_window_layers", 0)
        return ["window" if i >= first else "full" for i in range(num_layers)]
    return ["window"] * num_layers
