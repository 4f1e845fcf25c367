"""The cache shape of a model from its Hugging Face `config.json`: the data that each of its layers caches.

A configuration names the kinds of its layers in one of a few ways: a list (`layer_types`), a pattern, a period, or not
at all because the architecture implies them. Heads differ by layer in some. A reader that assumes that all layers keep
every token of equal heads plans too much for a window, and the wrong thing for a state. So every field that is read is
recorded, and a field that looks like attention and that nobody has read is a refusal that names it: a new
architecture is refused until somebody has read it, and never planned as if it were a plain one.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import msgspec

from kvconnector.bench import file_errors
from kvconnector.bench.shapes import LayerGroup, ModelShape, compressed_mla, parts_of_token
from kvconnector.cache.specs import DType
from kvconnector.cache.specs.spec import ITEM_SIZES_BYTES
from kvconnector.errors import ConfigError
from kvconnector.layout.watermark import MAX_LAYERS
from kvconnector.planning import Keeps

Parts: TypeAlias = tuple[tuple[str, int, int, int], ...]
"""`LayerGroup.parts`."""

Shapes: TypeAlias = tuple[tuple[int, int], ...]
"""Of each part of a state, the units that tensor parallelism splits and the elements of one."""
ValueT = TypeVar("ValueT")

DEFAULTS: dict[str, dict[str, Any]] = {
    "falcon": {"multi_query": True},
    "gemma3_text": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
    "gpt_bigcode": {"multi_query": True},
    "nemotron_h": {"mamba_ssm_cache_dtype": "float32"},
    "t5": {"num_layers": 6, "num_heads": 8, "d_kv": 64},
}
"""Defaults of transformers for fields that a configuration of this `model_type` leaves out."""
ATTENTION: dict[str, tuple[str, Keeps, tuple[str, ...]]] = {
    "full": ("full attention", "all", ()),
    "window": ("window of {}", "window", ("sliding_window", "sliding_window_size")),
    "chunk": ("chunk of {}", "chunk", ("attention_chunk_size",)),
}
"""Layers that keep tokens: their names, the tokens that they keep, and the fields that say how many."""
KINDS = {
    **dict.fromkeys(("full_attention", "attention", "*", "global", "indexed_attention"), "full"),
    "sliding_attention": "window",
    "chunked_attention": "chunk",
    "linear_attention": "delta",
    "conv": "convolution",
    **dict.fromkeys(("mamba", "mamba1", "mamba2", "M"), "mamba"),
    **dict.fromkeys(("-", "mlp", "E", "moe"), "none"),
}
"""The data that a layer caches, by the layer's name in a configuration."""
SHORT_TYPES = {
    **dict.fromkeys(("bf16", "torch.bfloat16", "auto"), "bfloat16"),
    **dict.fromkeys(("fp16", "f16", "half", "torch.float16"), "float16"),
    **dict.fromkeys(("fp32", "f32", "float", "torch.float32"), "float32"),
    **dict.fromkeys(("fp8", "fp8_e4m3", "e4m3"), "float8_e4m3fn"),
    **dict.fromkeys(("fp8_e5m2", "e5m2"), "float8_e5m2"),
}
"""What engines call element types, and torch's names."""
LIGHTNING = ("minimax", "minimax_m1", "minimax_text_01")
"""Architectures whose linear attention is MiniMax's, with one state of each head and no convolution."""
ALL_HEADS = ("decoder_attention_heads", "num_attention_heads", "n_head", "num_heads")
KV_HEADS = ("n_head_kv", "num_kv_heads", "num_key_value_heads", "num_attention_groups")
WINDOW_PERIODS = {"gemma2": 2, "gemma3": 6, "cohere2": 4, "exaone4": 4}
"""One layer in this many keeps every token, if a configuration does not say otherwise."""
REFUSED = {
    "minicpm3": "its latents are cached as heads of K and V",
    "mimo_v2_flash": "heads and their sizes differ between its windows and its other layers",
    "mimo_v2": "heads and their sizes differ between its windows and its other layers",
}
"""Architectures whose fields mean something else than the same ones of others do."""
ATTENTION_FIELDS = re.compile(
    r"attn|attention|head|kv|mqa|gqa|mla|multi_query|(?:^|_)(?:key|value|query|qk)(?:_|$)|lora_rank|latent"
    r"|window|chunk|sliding|index|compress|layers?_(?:block_)?type|block_(?:config|type)|pattern|mamba|ssm|state_size"
    r"|state_dim|conv_|linear|recurr|rwkv|lru|hybrid|(?:^|_)(?:global|local)_|shared_layers|mixer|delta|gla_|cross_|csa"
    r"|hca|per_layer_config|memory|sparse_|kda"
)
"""Names of fields that look like attention, or like another thing that layers cache."""
HARMLESS = re.compile(
    r"(?:num_attention_heads|n_head|num_heads|decoder_attention_heads|num_key_value_heads|head_dim|d_kv|d_head)$"
    r"|.*(?:bias|drop|norm|softcap|rope|rotary|yarn|expert|moe|router|token|init|scal(?:e|ing)|multiplier|temperature"
    r"|implementation|prun|quant|loss|dtype|gate|activation|chunk_size_feed_forward|embed|softmax|clip|upcast|freeze)"
    r"|encoder_attention_heads$|encoder_kv|encoder_head|attention_(?:type|method)$|share_q_dim$|max_window_layers$"
    r"|use_sliding_window$|sliding_window$|sliding_window_size$|layer_types$|layers_block_type$|sliding_window_pattern$"
    r"|hybrid_override_pattern$|q_lora_rank$|o_lora_rank$|qk_nope_head_dim$|v_head_dim$|qk_head_dim$|num_query_groups$"
    r"|query_pre_attn_scalar$|index_n_heads$|index_topk|indexer_(?:rope|types)|o_groups$|mlp_layer_types|is_decoder$"
    r"|add_cross_attention$|cross_attention_hidden_size$|lm_head|head_bias$|mamba_(?:proj|conv|rms|dt|chunk|norm)|id2label"
    r"|mamba_(?:hidden_act|num_groups)|time_step|attn_?(?:alpha|factor)|hidden_size_per_layer|vocab_size_per_layer"
    r"|use_(?:qk|mla|flash)|mla_use_|flash|_attn_impl|parallel_attn$|alibi$|apply_residual|residual|classifier|summary|laurel"
    r"|linear_silu|unk|attention_k_eq_v$|sparse_step$|decoder_sparse|first_k|keys_to_ignore|base_model|use_mamba_kernels$"
    r"|linear_attention_type|state_dict|use_bidirectional_attention$|relative_attention|_sliding_window_pattern$|mixer_rms"
    r"|(?:linear|full)_attn_(?:alpha|beta)_factor$|num_sliding_attention_heads$|num_attention_heads_per_layer$"
    r"|linear_(?:a_log|dt_|allow_neg)|chunk_size$"
)
"""Names of fields that look like it, and that do not change what is cached or are read where they do."""


def element_type(text: str) -> str:
    """Return an element type's name unchanged. Raises ConfigError: another one, with torch's name for a short one."""
    if text in ITEM_SIZES_BYTES:
        return text
    short = SHORT_TYPES.get(text.lower()) or next(
        iter(difflib.get_close_matches(text, list(ITEM_SIZES_BYTES), n=1)), None
    )
    hint = f"; did you mean {short!r}?" if short else ""
    raise ConfigError(f"no such element type{hint}", given=text, known=[*ITEM_SIZES_BYTES])


def named_model(name: str) -> ModelShape:
    """Return a known model, or that of a `config.json`. Raises ConfigError: there is no such model."""
    if name.endswith(".json") or os.path.isdir(name):
        return read_model_config(Path(name))
    if "/" in name and not os.path.exists(name):
        raise ConfigError(
            "no such folder. Nothing is downloaded: give the path of a model's config.json, or a known name",
            model=name,
        )
    return read_model_config(Path(name)) if "/" in name else ModelShape.parse(name)


def read_model_config(path: Path) -> ModelShape:
    """Return the model that a `config.json`, or a directory with one, describes.

    Keys are those of Hugging Face transformers; a multimodal model's are in its `text_config`. A `kv_lora_rank` means
    MLA: one latent of that many elements and `qk_rope_head_dim` more. Raises ConfigError: the file cannot be read,
    lacks a number, describes layers of a kind that is not known, or has a field of attention that is not.
    """
    file = path / "config.json" if path.is_dir() else path
    whole = _read_object(file)
    text = whole.get("text_config")
    text = text if isinstance(text, dict) else whole
    text = {**DEFAULTS.get(str(text.get("model_type")), {}), **text}
    dtype = text.get("dtype") or text.get("torch_dtype") or whole.get("torch_dtype") or "bfloat16"
    config = _Config(text, str(file), str(dtype))
    name = str(whole.get("_name_or_path") or whole.get("model_type") or file.parent.name)
    drafts = ("num_nextn_predict_layers", "num_mtp_modules", "mtp_num_hidden_layers")
    num_draft_layers = max(config.optional(each, 0) for each in drafts)
    if ratios := config.compressions():
        config.refuse_unread_fields()
        compressed = compressed_mla(name, ratios)
        return msgspec.structs.replace(compressed, num_draft_layers=num_draft_layers)
    layers = config.layers()
    config.refuse_unread_fields()
    groups = config.groups(layers)
    (_, heads, head_dim, _), *_ = groups[0].parts
    return ModelShape(
        name=name,
        num_layers=len(layers),
        num_kv_heads=heads,
        head_dim=head_dim,
        dtype=str(dtype),
        is_mla=config.is_mla,
        num_draft_layers=num_draft_layers,
        groups=() if _is_plain(groups, len(layers)) else groups,
        assumptions=tuple(config.assumptions),
    )


def _is_plain(groups: Sequence[LayerGroup], num_layers: int) -> bool:
    """Returns True if all layers keep every token, in K and V of one size or a latent."""
    (first, *others) = groups
    sizes = {part[1:] for part in first.parts}
    is_token = first.keeps == "all" and first.kind != "indexer" and len(sizes) == 1
    return is_token and not others and len(first.layers) == num_layers


def _read_object(file: Path) -> dict[str, Any]:
    with file_errors("cannot read the model's configuration", file):
        config = json.loads(file.read_bytes())  # published ones have Infinity, which JSON lacks
    if not isinstance(config, dict):
        raise ConfigError("a model's configuration must be a JSON object", path=str(file))
    return config


class Cached(NamedTuple):
    """What a layer caches: as in `LayerGroup`."""

    kind: str
    parts: Parts
    keeps: Keeps = "all"
    extent_tokens: int = 0
    encoder_tokens: int = 0


class _Config:
    """The fields of the text model in the file at `path`, and which of them were read."""

    def __init__(self, fields: dict[str, Any], path: str, dtype: str) -> None:
        self._fields, self._path, self._dtype = fields, path, dtype
        self._read: set[str] = set()
        self.assumptions: list[str] = []
        self.architecture = str(self.get("model_type") or "").removesuffix("_text")
        if self.architecture in REFUSED:
            raise self._refusal(f"{self.architecture} is not known: {REFUSED[self.architecture]}")
        self.is_mla = self.get("kv_lora_rank") is not None

    def get(self, name: str) -> Any:
        """Return a field, None if it is missing. It counts as read."""
        self._read.add(name)
        return self._fields.get(name)

    def number(self, *names: str) -> int:
        """Return the first of these fields, a positive number. Raises ConfigError: it is missing, or something else."""
        found = {name: value for name in names if (value := self.get(name)) is not None}
        value = next(iter(found.values()), None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        raise self._refusal(
            "the model's configuration lacks a positive number", needed=names, found=found
        )

    def optional(self, name: str, default: ValueT, *, least: int = 0) -> ValueT:
        """Return a field, or `default` if it is missing or null. Raises ConfigError: wrong type, or too low."""
        value = self.get(name)
        if value is None:
            return default
        if type(value) is type(default) and not (isinstance(value, int) and value < least):
            return value
        raise self._refusal("a field of the model's configuration makes no sense", **{name: value})

    def within(self, name: str) -> _Config:
        """Return the fields of a nested object, whose unknown ones are refused as this one's are."""
        value = self.get(name)
        if not isinstance(value, dict):
            raise self._refusal(
                "the model's configuration lacks an object", needed=name, found=value
            )
        return _Config(value, f"{self._path}: {name}", self._dtype)

    def refuse_unread_fields(self) -> None:
        """Raise ConfigError if a field that looks like attention, and says something, was not read."""
        unread = sorted(
            name
            for name, value in self._fields.items()
            if value
            and name not in self._read
            and ATTENTION_FIELDS.search(name)
            and not HARMLESS.match(name)
        )
        if unread:
            raise self._refusal(
                "this model's configuration has fields that may change what its layers cache, and that are not known",
                model_type=self._fields.get("model_type"),
                fields=unread,
            )

    def _refusal(self, text: str, **values: Any) -> ConfigError:
        return ConfigError(text, path=self._path, **values)

    def heads(self) -> tuple[int, int]:
        """Return the KV heads of a layer, and the elements of one."""
        return self._num_kv_heads(), self._head_dim()

    @property
    def latent_size(self) -> int:
        """Elements of an MLA layer's latent and rotary key."""
        return self.number("kv_lora_rank") + self.number("qk_rope_head_dim")

    def _num_kv_heads(self) -> int:
        """Return a layer's KV heads, and note an assumption where the configuration gives none."""
        self._read |= {*KV_HEADS, "multi_query", "multi_query_group_num"}
        if self.architecture == "falcon" and self.get("new_decoder_architecture"):
            return self.number(*KV_HEADS, *ALL_HEADS)
        if self.get("multi_query") is True:
            return 1
        if self.get("multi_query_attention"):
            return self.number("multi_query_group_num")
        if any(self.get(name) is not None for name in KV_HEADS):
            return self.number(*KV_HEADS)
        heads = self.number(*ALL_HEADS)
        text = f"no number of KV heads is given: each of the {heads} attention heads has its own K and V"
        if text not in self.assumptions:
            self.assumptions.append(text)
        return heads

    def _head_dim(self) -> int:
        names = ("head_dim", "d_kv", "kv_channels", "attention_head_dim", "hidden_size_per_head")
        own = next((name for name in names if self.get(name) is not None), None)
        if own:
            return self.number(own)
        size, heads = self.number("hidden_size", "n_embd", "d_model"), self.number(*ALL_HEADS)
        if size % heads:
            raise self._refusal(
                "the hidden size is no multiple of the heads", size=size, heads=heads
            )
        return size // heads

    def layers(self) -> list[tuple[Cached, ...]]:
        """Return what each layer of the decoder caches. Raises ConfigError: a kind of layer is not known, or a field is
        missing.
        """
        # of an encoder-decoder model the decoder's, which alone caches
        decoder = ("decoder_layers", "num_decoder_layers") if self.get("is_encoder_decoder") else ()
        num_layers = self.number(*decoder, "num_hidden_layers", "n_layer", "num_layers")
        if num_layers > MAX_LAYERS:
            raise self._refusal(f"num_layers is 1 to {MAX_LAYERS}", num_layers=num_layers)
        if self.get("block_configs"):
            return self._blocks(num_layers)
        if self.architecture.startswith("lfm2"):
            self._read |= {"conv_L_cache", "conv_dim", "conv_dim_out"}
        made: dict[tuple[str, int, int], tuple[Cached, ...]] = {}
        layers = []
        own_sizes = self._sizes_by_layer()
        for layer, kind in enumerate(self._kinds(num_layers)):
            key = (kind, *own_sizes.get(layer, (0, 0)))
            if key not in made:
                made[key] = tuple(
                    self._cached(each, key[1:]) for each in kind.split("+") if each != "none"
                )
            layers.append(made[key])
        shared = self._num_sharing_layers()
        layers = layers[: num_layers - shared] + [()] * shared
        if self.architecture == "longcat_flash":
            layers = [each for each in layers for _ in range(2)]  # two attentions a layer
        for layer in self._indexed_layers(len(layers)):
            layers[layer] += (self._indexer(),)
        if self.get("is_encoder_decoder"):
            tokens = self.optional("max_source_positions", 0)
            cross = Cached("cross attention", self._token(), "encoder", encoder_tokens=tokens)
            layers = [(*each, cross) for each in layers]
        return layers

    def compressions(self) -> list[int]:
        """Return the compression of each layer of DeepSeek-V4, nothing for other models. Raises ConfigError: sizes that
        no engine is known to lay out.
        """
        if self.architecture != "deepseek_v4":
            return []
        num_layers = self.number("num_hidden_layers")
        ratios = self.get("compress_ratios")
        if ratios is None:  # as transformers saves it
            rates, types = self.get("compress_rates"), self.get("layer_types")
            if not isinstance(rates, dict) or not isinstance(types, list):
                raise self._refusal("the model's configuration lacks compress_ratios")
            ratios = [rates.get(each, 0) for each in types]
        if not isinstance(ratios, list) or len(ratios) < num_layers:
            raise self._refusal(
                "compress_ratios names every layer", found=ratios, layers=num_layers
            )
        wanted = {
            "head_dim": 512,
            "qk_rope_head_dim": 64,
            "sliding_window": 128,
            "index_head_dim": 128,
        }
        found = {name: self.number(name) for name in wanted}
        if found != wanted:
            raise self._refusal("compressed latents of other sizes are not known", found=found)
        return ratios[:num_layers]

    def _sizes_by_layer(self) -> dict[int, tuple[int, int]]:
        """Return the KV heads and their elements of layers that have their own, as `per_layer_config` says."""
        found = self.get("per_layer_config")
        if not found:
            return {}
        if not isinstance(found, dict) or not all(str(layer).isdecimal() for layer in found):
            raise self._refusal("per_layer_config has no object for each layer", found=found)
        sizes = {}
        for layer, changes in found.items():
            own = _Config({**self._fields, **changes}, f"{self._path}: layer {layer}", self._dtype)
            unknown = changes.keys() - {"head_dim", "num_key_value_heads"}
            if any(ATTENTION_FIELDS.search(name) for name in unknown):
                raise self._refusal(
                    "a layer of per_layer_config has fields of its own that are not known",
                    fields=sorted(unknown),
                )
            sizes[int(layer)] = own.heads()
        return sizes

    def _num_sharing_layers(self) -> int:
        """Return the number of last layers that read another layer's cache, and have none."""
        if self.architecture not in ("gemma3n", "gemma4", "gemma4_unified"):
            return 0
        return self.optional("num_kv_shared_layers", 0)

    def groups(self, layers: Iterable[tuple[Cached, ...]]) -> tuple[LayerGroup, ...]:
        """Return groups of layers that cache alike."""
        found: dict[Cached, list[int]] = {}
        for layer, each in enumerate(layers):
            for cached in each:
                found.setdefault(cached, []).append(layer)
        if not found:
            raise self._refusal("no layer of the model caches anything")
        rank = {"all": 0, "window": 1, "chunk": 2, "state": 3, "encoder": 5}
        order = sorted(found, key=lambda each: (each.kind == "indexer", rank[each.keeps]))
        return tuple(
            LayerGroup(
                kind=each.kind,
                layers=tuple(found[each]),
                parts=each.parts,
                keeps=each.keeps,
                extent_tokens=each.extent_tokens,
                encoder_tokens=each.encoder_tokens,
            )
            for each in order
        )

    def _token(self, own: tuple[int, int] = (0, 0)) -> Parts:
        """Return K and V of a token, or its latent. `own`: a layer's own KV heads and their elements."""
        if self.is_mla:
            return parts_of_token(1, self.latent_size, self._dtype, is_mla=True)
        if any(own):
            return parts_of_token(*own, self._dtype, is_mla=False)
        heads, head_dim = self.heads()
        value_dim = self.optional("v_head_dim", head_dim, least=1)
        item = DType(self._dtype).item_size_bytes
        return (("k", heads, head_dim, item), ("v", heads, value_dim, item))

    def _cached(self, kind: str, own: tuple[int, int]) -> Cached:
        """Return what a layer of a kind caches, and with its `own` KV heads and their elements if they are not 0."""
        if kind in ATTENTION:
            name, keeps, names = ATTENTION[kind]
            size = self.number(*names) if names else 0
            if kind == "window" and self.architecture.startswith("cohere2"):
                size += 1  # its windows have the token itself beside this number of others
            is_global = kind == "full" and not any(own)
            token = self._global_token() if is_global else self._token(own)
            return Cached(name.format(size), token, keeps, size)
        makers: dict[str, Callable[[], tuple[str, Shapes]]] = {
            "delta": self._delta_net,
            "kda": self._kimi_delta,
            "lightning": self._lightning,
            "mamba": self._mamba,
            "convolution": self._convolution,
        }
        name, shapes = makers[kind]()
        given = self.get("mamba_ssm_dtype") or self.get("mamba_ssm_cache_dtype")
        # Kimi's kernels keep the recurrent state in float32, whatever the model's type
        state = str(given or ("float32" if kind == "kda" else self._dtype))
        dtypes = [self._dtype] * (kind != "lightning") + [state]
        parts = tuple(
            (f"state{number}", *shape, DType(each).item_size_bytes)
            for number, (shape, each) in enumerate(zip(shapes, dtypes, strict=False))
        )
        return Cached(f"{name} state", parts, "state")

    def _global_token(self) -> Parts:
        """Return K and V of a layer that keeps every token, whose heads differ from a window's in Gemma 4."""
        if self.architecture not in ("gemma4", "gemma4_unified"):
            return self._token()
        heads = self.get("num_global_key_value_heads") if self.get("attention_k_eq_v") else None
        heads = self.number("num_global_key_value_heads") if heads else self._num_kv_heads()
        self.get("num_global_key_value_heads")
        head_dim = self.optional("global_head_dim", 512, least=1)
        return parts_of_token(heads, head_dim, self._dtype, is_mla=False)

    def _indexed_layers(self, num_layers: int) -> list[int]:
        """Return the layers of sparse attention that have an indexer's keys. Others share a layer's choice."""
        every = range(num_layers)
        if self.get("sparse_attention_config"):  # MiniMax-M3
            own = self.within("sparse_attention_config")
            named = own.get("sparse_attention_freq") or []
            if not isinstance(named, list) or len(named) < num_layers:
                raise self._refusal(
                    "a field names too few layers", sparse_attention_freq=named, layers=num_layers
                )
            return [layer for layer in every if named[layer]]
        if not self.get("index_topk"):
            return []
        types, pattern = self.get("indexer_types"), self.get("index_topk_pattern")
        if named := types or pattern:
            marks = {"full": True, "F": True, "shared": False, "S": False}
            if len(named) < num_layers or not {*named} <= marks.keys():
                raise self._refusal(
                    "the layers that share an indexer are not named as full and shared", found=named
                )
            return [layer for layer in every if marks[named[layer]]]
        period = self.optional("index_topk_freq", 1, least=1)
        offset = self.optional("index_skip_topk_offset", 2)
        return [layer for layer in every if max(layer - offset + 1, 0) % period == 0]

    def _indexer(self) -> Cached:
        """Keys of DeepSeek's indexer in fp8, a float32 scale for each 128 elements; MiniMax-M3's as they are."""
        if self.get("sparse_attention_config"):
            size = self.within("sparse_attention_config").number("sparse_index_dim")
            return Cached("indexer", parts_of_token(1, size, self._dtype, is_mla=True))
        size = self.number("index_head_dim")
        return Cached("indexer", (("index", 1, size, 1), ("index-scales", 1, size // 128 * 4, 1)))

    def _blocks(self, num_layers: int) -> list[tuple[Cached, ...]]:
        """Return what each layer of a searched architecture (Nemotron NAS) caches, whose heads differ by layer."""
        blocks = self.get("block_configs")
        if not isinstance(blocks, list) or len(blocks) != num_layers:
            raise self._refusal("block_configs names every layer", layers=num_layers)
        layers: list[tuple[Cached, ...]] = []
        item, head_dim = DType(self._dtype).item_size_bytes, self._head_dim()
        for block in blocks:
            attention = _Config(dict(block).get("attention") or {}, self._path, self._dtype)
            if not attention._fields:
                raise self._refusal("a block of block_configs has no attention", block=block)
            if attention.get("no_op") or attention.get("replace_with_linear"):
                layers.append(())
                continue
            attention.get("num_sink_tokens")
            share = attention.number("n_heads_in_group")
            attention.refuse_unread_fields()
            heads = self.number(*ALL_HEADS) // share
            parts = tuple((name, heads, head_dim, item) for name in ("k", "v"))
            kind = f"full attention, {heads} heads"
            layers.append((Cached(kind, parts),))
        kinds = {each for layer in layers for each in layer}
        if len(kinds) == 1:
            layers = [
                tuple(each._replace(kind="full attention") for each in layer) for layer in layers
            ]
        return layers

    def _delta_net(self) -> tuple[str, Shapes]:
        """Convolution `[channels of Q, K and V, width - 1]` and state `[value heads, value dim x key dim]`."""
        number = self.number
        key_dim, value_dim = number("linear_key_head_dim"), number("linear_value_head_dim")
        values = number("linear_num_value_heads")
        channels = 2 * number("linear_num_key_heads") * key_dim + values * value_dim
        convolution = (channels, number("linear_conv_kernel_dim") - 1)
        return "gated delta net", (convolution, (values, value_dim * key_dim))

    def _kimi_delta(self) -> tuple[str, Shapes]:
        """Convolution `[channels of Q, K and V, width - 1]` and state `[heads, head dim x head dim]`."""
        if self.get("linear_attn_config"):
            own = self.within("linear_attn_config")
            heads, dim = own.number("num_heads"), own.number("head_dim")
            width = own.number("short_conv_kernel_size")
        else:  # as transformers saves it
            heads, dim = self.number("linear_num_heads"), self.number("linear_head_dim")
            width = self.number("linear_conv_kernel_dim")
        return "Kimi delta attention", ((3 * heads * dim, width - 1), (heads, dim * dim))

    def _lightning(self) -> tuple[str, Shapes]:
        """State `[heads, head dim x head dim]` of all attention heads."""
        dim = self._head_dim()
        return "lightning attention", ((self.number(*ALL_HEADS), dim * dim),)

    def _convolution(self) -> tuple[str, Shapes]:
        """Convolution `[channels, width - 1]` of LFM2, which has no other state."""
        self.get("conv_dim_out")
        channels = self.number("conv_dim", "hidden_size")
        return "short convolution", ((channels, self.number("conv_L_cache") - 1),)

    def _mamba(self) -> tuple[str, Shapes]:
        """Convolution `[channels, width - 1]` and state: `[heads, head dim x state]` of Mamba 2, `[channels, state]` of
        Mamba 1, which has no heads.
        """
        number = self.number
        width = number("mamba_d_conv", "conv_kernel") - 1
        state = number("mamba_d_state", "ssm_state_size", "state_size")
        names = [name for name in ("mamba_n_heads", "mamba_num_heads") if self.get(name)]
        if not names:
            channels = self._mamba_channels()
            return "Mamba", ((channels, width), (channels, state))
        heads, dim = number(*names), number("mamba_d_head", "mamba_head_dim")
        self.get("mamba_expand"), self.get("expand")
        inner = self.get("mamba_d_ssm") or heads * dim
        channels = inner + 2 * number("mamba_n_groups", "n_groups") * state
        return "Mamba", ((channels, width), (heads, dim * state))

    def _mamba_channels(self) -> int:
        if self.architecture in ("mamba", "falcon_mamba") and self.get("intermediate_size"):
            return self.number("intermediate_size")
        return self.number("mamba_expand", "expand") * self.number("hidden_size")

    def _kinds(self, num_layers: int) -> list[str]:
        """Return the data that each layer caches, as values of `KINDS`; several with a plus between them."""
        if self.get("linear_attn_config"):
            return self._kimi_kinds(num_layers)
        if self.architecture in ("minimax_m1", "minimax_text_01", "minimax_m2") and (
            ones := self.get("attn_type_list")
        ):
            if not isinstance(ones, list) or len(ones) < num_layers or not {*ones} <= {0, 1}:
                raise self._refusal("attn_type_list has a 0 or a 1 for each layer", found=ones)
            return ["full" if each else "lightning" for each in ones[:num_layers]]
        names = ("layer_types", "layers_block_type", "hybrid_override_pattern", "layer_pattern")
        named = next(filter(None, map(self.get, names)), None)
        if not named:
            return self._unnamed_kinds(range(num_layers))
        self._read |= {"full_attention_interval", "attn_layer_indices", "full_attn_idxs"}
        self._read |= {"attn_layer_period", "attn_layer_offset", "no_rope_layers", "attn_type_list"}
        self._read |= {"no_rope_layer_interval", "global_attn_every_n_layers"}
        self._read |= {"prefix_dense_sliding_window_pattern"}
        named = named if isinstance(named, list | str) else [named]
        known = dict(KINDS)
        if self.architecture in LIGHTNING:
            known["linear_attention"] = "lightning"
        if self.architecture == "kimi_linear":
            known["linear_attention"] = "kda"
        unknown = sorted({str(kind) for kind in named} - known.keys())
        if unknown or len(named) < num_layers:
            raise self._refusal(
                "the kinds of the model's layers cannot be planned",
                unknown=unknown,
                named=len(named),
                layers=num_layers,
            )
        return [known[kind] for kind in named[:num_layers]]

    def _kimi_kinds(self, num_layers: int) -> list[str]:
        """Return Kimi-Linear's kinds, whose lists count layers from 1."""
        own = self.within("linear_attn_config")
        linear, full = own.get("kda_layers"), own.get("full_attn_layers")
        if not isinstance(linear, list) or not isinstance(full, list):
            raise self._refusal("linear_attn_config lacks kda_layers or full_attn_layers")
        if sorted([*linear, *full]) != list(range(1, num_layers + 1)):
            raise self._refusal(
                "linear_attn_config does not name each layer once", layers=num_layers
            )
        return ["kda" if layer in linear else "full" for layer in range(1, num_layers + 1)]

    def _unnamed_kinds(self, layers: range) -> list[str]:
        """Return the kinds of layers of architectures whose configurations have a period, or nothing, not a list."""
        optional = self.optional
        architecture = self.architecture
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
        if architecture in ("mamba", "mamba2", "falcon_mamba"):
            return ["mamba" for _ in layers]
        if architecture == "falcon_h1":
            return ["full+mamba" for _ in layers]
        if architecture in ("lfm2", "lfm2_moe") and self.get("full_attn_idxs") is not None:
            full: list[int] = optional("full_attn_idxs", [])
            return ["full" if i in full else "convolution" for i in layers]
        if architecture == "llama4":
            interval = optional("no_rope_layer_interval", 4, least=1)
            ropes = optional("no_rope_layers", []) or [(i + 1) % interval for i in layers]
            has_chunks = self.get("attention_chunk_size") is not None
            return ["chunk" if rope and has_chunks else "full" for rope in ropes[: len(layers)]]
        return self._windows(architecture, layers)

    def _windows(self, architecture: str, layers: range) -> list[str]:
        get = self.get
        if not get("sliding_window") or get("use_sliding_window") is False:
            return ["full" for _ in layers]
        period = (
            get("sliding_window_pattern")
            or get("_sliding_window_pattern")
            or WINDOW_PERIODS.get(architecture)
        )
        if isinstance(period, int):
            return ["window" if (i + 1) % period else "full" for i in layers]
        if period and isinstance(period, str) and {*period} <= {"L", "G"}:  # EXAONE 4
            last = layers[-1]
            return [
                "full" if period[i % len(period)] == "G" or i == last else "window" for i in layers
            ]
        if period:
            raise self._refusal(
                "the pattern of windows is not known", sliding_window_pattern=period
            )
        # Qwen 2: the first layers keep everything
        first = self.optional("max_window_layers", 0) if get("use_sliding_window") else 0
        return ["window" if i >= first else "full" for i in layers]
