"""The cache shape of a model from its Hugging Face `config.json`: the data that each of its layers caches.

A configuration names the kinds of its layers in one of a few ways: a list (`layer_types`), a pattern, a period, or not
at all because the architecture implies them. Heads differ by layer in some. A reader that assumes that all layers keep
every token of equal heads plans too much for a window, and the wrong thing for a state. So every field that is read is
recorded, and a field that looks like attention and that nobody has read is a refusal that names it: a new
architecture is refused until somebody has read it, and never planned as if it were a plain one.

A field that a file leaves out is not absent from the model: it has the default of the model's class in transformers,
which `model_defaults.json` has for each type. A type that is neither there nor in `PUBLISHED` is refused by name.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
import os
import re
from collections.abc import Callable, Iterable, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

from kvconnector.bench import file_errors, read_file
from kvconnector.bench.shapes import LayerGroup, ModelShape, compressed_mla, parts_of_token
from kvconnector.cache.specs import DType
from kvconnector.errors import ConfigError
from kvconnector.layout.watermark import MAX_LAYERS
from kvconnector.planning import Keeps

Parts: TypeAlias = tuple[tuple[str, int, int, int], ...]
"""`LayerGroup.parts`."""

StateParts: TypeAlias = tuple[tuple[str, int, int], ...]
"""Of each part of a state, its name, the units that tensor parallelism splits, and the elements of one."""
TEMPORAL = "temporal"
"""The part of a state that recurs, which may have a type of its own. The others are inputs of a convolution."""
ValueT = TypeVar("ValueT")

PUBLISHED = frozenset(
    [
        "baichuan",
        "bailing_hybrid",
        "bailing_moe",
        "bailing_moe_v2",
        "chatglm",
        "deepseek",
        "exaone",
        "internlm2",
        "internlm3",
        "kimi_k2",
        "mimo",
        "mimo_v2",
        "minicpm",
        "minimax",
        "minimax_m1",
        "minimax_m3",
        "minimax_text_01",
        "nemotron-nas",
        "orion",
        "phi3_v",
        "phi4mm",
        "solar",
        "step3",
        "telechat",
    ]
)
"""Types of text models that transformers does not have, or not with their defaults: their files name every field."""
MISTRAL = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
}
"""transformers' names of the fields that each `params.json` of Mistral's has."""
NESTED = ("thinker_config", "text_config", "llm_config", "language_config")
"""Names of the text model within a configuration of several models."""
DRAFTS = (
    "num_nextn_predict_layers",
    "num_mtp_layers",
    "num_mtp_modules",
    "mtp_num_hidden_layers",
)
"""Names of the number of draft layers."""
DRAFTED = (
    *("deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "kimi_linear"),
    *("mimo", "qwen3_5", "qwen3_5_moe"),
)
"""Architectures whose draft layers attend to every token, as one of their layers of full attention does."""
SAME = (
    ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    ("num_key_value_heads", "num_kv_heads", "n_head_kv", "num_attention_groups"),
    ("hidden_size", "n_embd", "n_embed", "d_model"),
    ("head_dim", "kv_channels", "attention_head_dim", "hidden_size_per_head"),
    ("sliding_window", "sliding_window_size"),
    ("expand", "mamba_expand"),
    ("n_groups", "mamba_n_groups", "mamba_ngroups"),
    ("conv_kernel", "mamba_d_conv"),
    DRAFTS,
)
"""Names of one thing: a default of one of them says nothing if the file has another."""
ATTENTION: dict[str, tuple[str, Keeps, tuple[str, ...]]] = {
    "full": ("full attention", "all", ()),
    "window": ("window of {}", "window", ("sliding_window", "sliding_window_size")),
    "chunk": ("chunk of {}", "chunk", ("attention_chunk_size",)),
}
"""Layers that keep tokens: their names, the tokens that they keep, and the fields that say how many."""
FULL_NAMES = [
    "full_attention",
    "attention",
    "*",
    "global",
    "indexed_attention",
    "deepseek_sparse_attention",
    "minimax_m3_sparse",
]
KINDS = {
    **dict.fromkeys(FULL_NAMES, "full"),
    "sliding_attention": "window",
    "chunked_attention": "chunk",
    "conv": "convolution",
    **dict.fromkeys(("mamba", "mamba1", "mamba2", "M"), "mamba"),
    **dict.fromkeys(("-", "mlp", "E", "moe"), "none"),
}
"""The data that a layer caches, by the layer's name in a configuration."""
LINEAR = {
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid"), "delta"),
    **dict.fromkeys(("minimax", "minimax_m1", "minimax_text_01"), "lightning"),
    **dict.fromkeys(("bamba", "granitemoehybrid", "jamba", "nemotron_h"), "mamba"),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba"), "mamba"),
    "kimi_linear": "kda",
    "zamba2": "mamba",
}
"""What transformers calls `linear_attention` in each architecture; MiniMax's has one state a head, no convolution."""
STATE_TYPES = {
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), "mamba_ssm_dtype"),
    "nemotron_h": "mamba_ssm_cache_dtype",
}
"""Fields that set the type of a recurrent state in vLLM, where it is not the model's."""
ALL_HEADS = ("decoder_attention_heads", "num_attention_heads", "n_head", "num_heads")
KV_HEADS = ("n_head_kv", "num_kv_heads", "num_key_value_heads", "num_attention_groups")
GEMMA_4 = ("gemma4", "gemma4_unified", "diffusion_gemma")
MIMO = ("mimo_v2", "mimo_v2_flash")
LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
LATENTS = re.compile("deepseek|kimi|glm|longcat|axk1|bailing_hybrid|hy_v4")
"""Architectures that cache a latent, MLA's, if they have a `kv_lora_rank`."""
UNNAMED = "the model's configuration does not name the kinds of its layers"
WINDOWS = ("sliding_attention", "chunked_attention")
PERIODS = ("sliding_window_pattern", "_sliding_window_pattern", "global_attn_every_n_layers")
"""Fields that give the period at which a layer keeps every token."""
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
    r"|hybrid_override_pattern$|mtp_|q_lora_rank$|o_lora_rank$|qk_nope_head_dim$|v_head_dim$|qk_head_dim$|num_query_groups$"
    r"|query_pre_attn_scalar$|index_n_heads$|index_topk|indexer_(?:rope|types)|o_groups$|mlp_layer_types|is_decoder$"
    r"|add_cross_attention$|cross_attention_hidden_size$|lm_head|head_bias$|mamba_(?:proj|conv|rms|dt|chunk|norm)|id2label"
    r"|mamba_(?:hidden_act|num_groups)|time_step|attn_?(?:alpha|factor)|hidden_size_per_layer|vocab_size_per_layer"
    r"|use_(?:qk|mla|flash)|mla_use_|flash|_attn_impl|parallel_attn$|alibi$|apply_residual|residual|classifier|summary|laurel"
    r"|linear_silu|unk|attention_k_eq_v$|sparse_step$|decoder_sparse|first_k|keys_to_ignore|base_model|use_mamba_kernels$"
    r"|linear_attention_type|state_dict|use_bidirectional_attention$|relative_attention|_sliding_window_pattern$|mixer_rms"
    r"|(?:linear|full)_attn_(?:alpha|beta)_factor$|num_sliding_attention_heads$|num_attention_heads_per_layer$"
    r"|linear_(?:a_log|dt_|allow_neg)|attn_res_block_size$|chunk_size$"
)
"""Names of fields that look like it, and that do not change what is cached or are read where they do."""


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
    file = _file_in(path) if path.is_dir() else path
    whole = _read_object(file)
    if MISTRAL.keys() <= whole.keys():
        whole = _renamed_of_mistral(whole, str(file))
    text, defaults, pattern = _text_model(whole, str(file))
    dtype = _served_type(text, whole)
    config = _Config(text, str(file), dtype, defaults=defaults, pattern=pattern)
    name = str(whole.get("_name_or_path") or whole.get("model_type") or file.parent.name)
    num_draft_layers = config.num_draft_layers
    if ratios := config.compressions():
        config.refuse_unread_fields()
        return compressed_mla(name, ratios, num_draft_layers=num_draft_layers)
    layers = config.layers()
    config.refuse_unread_fields()
    groups = config.groups(layers)
    drafts = config.drafts()
    (_, heads, head_dim, _), *_ = groups[0].parts
    return ModelShape(
        name=name,
        num_layers=len(layers),
        num_kv_heads=heads,
        head_dim=head_dim,
        dtype=config.dtype,
        is_mla=config.is_mla,
        num_draft_layers=num_draft_layers,
        groups=() if _is_plain(groups, len(layers)) else groups,
        draft_groups=config.groups(drafts, first=len(layers)) if drafts else (),
        assumptions=config.assumptions,
    )


def _file_in(folder: Path) -> Path:
    """Return a folder's `config.json`, or Mistral's `params.json` if there is no other."""
    own = folder / "params.json"
    return own if own.exists() and not (folder / "config.json").exists() else folder / "config.json"


@functools.cache
def _defaults() -> dict[str, dict[str, Any]]:
    """The defaults of transformers' classes, by model type."""
    file = importlib.resources.files(__package__).joinpath("model_defaults.json")
    found: dict[str, dict[str, Any]] = json.loads(file.read_bytes())["models"]
    return found


def _text_model(whole: dict[str, Any], path: str) -> tuple[dict[str, Any], Set[str], Sequence[str]]:
    """Return the fields of the model that generates text, with the defaults of those that the file leaves out, their
    names, and the kinds of its layers by default, as `_Config` takes them. Raises ConfigError: this type of model is
    not known.
    """
    fields, model_type = whole, str(whole.get("model_type") or "")
    while True:
        # a field that is left out has the default of its class; one that is null has none
        inner = str(_defaults().get(model_type, {}).get("text_config") or "")
        nested = next((fields[name] for name in NESTED if isinstance(fields.get(name), dict)), None)
        if nested is None:
            break
        fields, model_type = nested, str(nested.get("model_type") or inner)
    model_type = inner or model_type
    known = _defaults().get(model_type)
    if known is None and model_type.removesuffix("_text") not in PUBLISHED:
        raise ConfigError(
            f"{model_type or 'a model without a model_type'} is not known: if each of its layers keeps every token,"
            " give --layers, --kv-heads and --head-dim instead, or --layers, --head-dim and --mla for latents",
            path=path,
            model_type=model_type,
        )
    alike = {name for names in SAME if fields.keys() & {*names} for name in names}
    left_out = {name: value for name, value in (known or {}).items() if name not in alike}
    pattern = left_out.pop("layer_types", "")
    return (
        {**left_out, "model_type": model_type, **fields},
        left_out.keys() - fields.keys(),
        pattern,
    )


def _served_type(text: dict[str, Any], whole: dict[str, Any]) -> str:
    """Return the type in which engines serve a model: 16 bits if its weights have 32, or if the file does not say."""
    found = (each.get(name) for each in (text, whole) for name in ("dtype", "torch_dtype"))
    dtype = str(next(filter(None, found), "bfloat16")).removeprefix("torch.")
    return "bfloat16" if dtype in ("float32", "auto") else dtype


def _renamed_of_mistral(params: dict[str, Any], path: str) -> dict[str, Any]:
    """Return the fields of a `params.json`, Mistral's own format, by transformers' names."""
    fields = {MISTRAL.get(name, name): value for name, value in params.items()}
    is_mla = bool(fields.get("qk_nope_head_dim"))
    window = fields.get("sliding_window")
    if isinstance(window, list):  # one for each layer of a period, null for all tokens
        sizes = {each for each in window if type(each) is int}
        if len(sizes) != 1 or not all(each is None or each in sizes for each in window):
            raise ConfigError("windows of several sizes are not known", path=path, found=window)
        (fields["sliding_window"],) = sizes
        kinds = ["sliding_attention" if each else "full_attention" for each in window]
        num_layers = fields["num_hidden_layers"]
        if type(num_layers) is int and 0 < num_layers <= MAX_LAYERS:  # others are refused below
            fields["layer_types"] = kinds * -(-num_layers // len(kinds))
    elif window is None:
        fields["sliding_window"] = None
    for other in ("vision_encoder", "multimodal", "moe", "quantization", "llama_4_scaling", "yarn"):
        fields.pop(other, None)
    return {**fields, "model_type": "deepseek_v3" if is_mla else "mistral"}


def _is_plain(groups: Sequence[LayerGroup], num_layers: int) -> bool:
    """Returns True if all layers keep every token, in K and V of one size or a latent."""
    (first, *others) = groups
    sizes = {part[1:] for part in first.parts}
    is_token = first.keeps == "all" and first.kind != "indexer" and len(sizes) == 1
    return is_token and not others and len(first.layers) == num_layers


def _read_object(file: Path) -> dict[str, Any]:
    with file_errors("cannot read the model's configuration", file):
        config = json.loads(read_file(file))  # published ones have Infinity, which JSON lacks
    if not isinstance(config, dict):
        raise ConfigError("a model's configuration must be a JSON object", path=str(file))
    return config


class KVHeads(NamedTuple):
    """KV heads of a layer, and the elements of one of K and of V."""

    num_heads: int
    key_dim: int
    value_dim: int


class Cached(NamedTuple):
    """What a layer caches: as in `LayerGroup`."""

    kind: str
    parts: Parts
    keeps: Keeps = "all"
    extent_tokens: int = 0
    encoder_tokens: int = 0
    is_cut: bool = True


def _convolved(width: int, **channels: int) -> StateParts:
    """Return a convolution's inputs by name: the last `width` of each channel."""
    return tuple((f"conv-{name}", count, width) for name, count in channels.items())


class _Config:
    """The fields of the text model in the file at `path`, and which of them were read."""

    def __init__(
        self,
        fields: dict[str, Any],
        path: str,
        dtype: str,
        *,
        defaults: Set[str] = frozenset(),
        pattern: Sequence[str] = (),
    ) -> None:
        self._fields, self._path, self.dtype = fields, path, dtype
        self._defaults, self._pattern = defaults, pattern
        self._read: set[str] = set()
        self._used: dict[str, Any] = {}
        self._assumptions: list[str] = []
        self.architecture = str(self.get("model_type") or "").removesuffix("_text")
        self.is_mla = self.get("kv_lora_rank") is not None and self.architecture != "minicpm3"
        if self.is_mla and not LATENTS.match(self.architecture):
            raise self._refusal(
                f"no latents of {self.architecture} are known",
                kv_lora_rank=self.get("kv_lora_rank"),
            )

    def get(self, name: str) -> Any:
        """Return a field, None if it is missing. It counts as read."""
        self._read.add(name)
        value = self._fields.get(name)
        if value and name in self._defaults:
            self._used[name] = value
        return value

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the file does not say and was assumed, in words."""
        values = ", ".join(f"{name} {value}" for name, value in self._used.items())
        text = f"the file leaves out what transformers' {self._fields['model_type']} has by default: {values}"
        return (*self._assumptions, *([text] if values else []))

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

    def marks(self, name: str, value: Any, known: Sequence[int], num_layers: int) -> list[int]:
        """Return the first `num_layers` marks of a field's value. Raises ConfigError: it is no list, has too few marks,
        or others than the known ones.
        """
        found = value if isinstance(value, list) else []
        if len(found) < num_layers or not all(type(e) is int and e in known for e in found):
            text = f"{name} must be a list with a {' or a '.join(map(str, known))} for each layer"
            raise self._refusal(text, layers=num_layers, **{name: value})
        return found[:num_layers]

    def layer_numbers(self, name: str, layers: range) -> list[int]:
        """Return the layers that a list names. Raises ConfigError: it is no list, or names others than `layers`."""
        value = self.get(name)
        if isinstance(value, list) and all(type(each) is int and each in layers for each in value):
            return value
        raise self._refusal(
            f"{name} must be a list of layers from {layers.start} to {layers.stop - 1}",
            **{name: value},
        )

    def within(self, name: str) -> _Config:
        """Return the fields of a nested object, whose unknown ones are refused as this one's are."""
        value = self.get(name)
        if not isinstance(value, dict):
            raise self._refusal(
                "the model's configuration lacks an object", needed=name, found=value
            )
        return _Config(value, f"{self._path}: {name}", self.dtype)

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

    def heads(self) -> KVHeads:
        """Return the KV heads of a layer."""
        if self.architecture == "minicpm3":  # whose latents are cached as heads, V as wide as K
            size = self.number("qk_nope_head_dim") + self.number("qk_rope_head_dim")
            return KVHeads(self.number(*ALL_HEADS), size, size)
        head_dim = self._head_dim()
        return KVHeads(
            self._num_kv_heads(), head_dim, self.optional("v_head_dim", head_dim, least=1)
        )

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
        if text not in self._assumptions:
            self._assumptions.append(text)
        return heads

    def _head_dim(self) -> int:
        names = ("head_dim", "attention_head_dim", "d_kv", "kv_channels", "hidden_size_per_head")
        own = next((name for name in names if self.get(name) is not None), None)
        self._read |= {*names}
        if own:
            return self.number(own)
        size, heads = (
            self.number("hidden_size", "n_embd", "n_embed", "d_model"),
            self.number(*ALL_HEADS),
        )
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
        kinds = self.get("layers_block_type")  # Nemotron-H as transformers saves it has no number
        has_number = any(map(self.get, (*decoder, *LAYERS)))
        is_counted = isinstance(kinds, list) and not has_number
        num_layers = len(kinds) if is_counted else self.number(*decoder, *LAYERS)
        if num_layers > MAX_LAYERS:
            raise self._refusal(f"num_layers is 1 to {MAX_LAYERS}", num_layers=num_layers)
        if self.get("block_configs"):
            return self._blocks(num_layers)
        if self.architecture.startswith("lfm2"):
            self._read |= {"conv_L_cache", "conv_dim", "conv_dim_out"}
        made: dict[tuple[str, KVHeads | None], tuple[Cached, ...]] = {}
        layers = []
        kinds_of_layers = self._kinds(num_layers)
        own_sizes = {**self._sizes_by_kind(kinds_of_layers), **self._sizes_by_layer()}
        for layer, kind in enumerate(kinds_of_layers):
            key = (kind, own_sizes.get(layer))
            if key not in made:
                made[key] = tuple(
                    self._cached(each, key[1]) for each in kind.split("+") if each != "none"
                )
            layers.append(made[key])
        shared = self._num_sharing_layers()
        if shared >= num_layers:
            raise self._refusal(
                "not all layers can share another one's cache",
                num_kv_shared_layers=shared,
                layers=num_layers,
            )
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
            ratios = [rates.get(str(each), 0) for each in types]
        ratios = self.marks("compress_ratios", ratios, (0, 1, 4, 128), num_layers)
        wanted = {
            "head_dim": 512,
            "qk_rope_head_dim": 64,
            "sliding_window": 128,
            "index_head_dim": 128,
        }
        found = {name: self.number(name) for name in wanted}
        if found != wanted:
            raise self._refusal("compressed latents of other sizes are not known", found=found)
        return ratios

    def _sizes_by_kind(self, kinds: Sequence[str]) -> dict[int, KVHeads]:
        """Return the heads of windows, where the configuration gives them heads of their own."""
        windows = [layer for layer, kind in enumerate(kinds) if kind == "window"]
        if self.architecture in MIMO and self.get("swa_num_key_value_heads") is not None:
            self._read |= {"swa_num_attention_heads"}
            head_dim = self.number("swa_head_dim")
            value_dim = self.optional("swa_v_head_dim", head_dim, least=1)
            heads = KVHeads(self.number("swa_num_key_value_heads"), head_dim, value_dim)
            return dict.fromkeys(windows, heads)
        if self.architecture.startswith("step3p") and self.get("attention_other_setting"):
            own = self.within("attention_other_setting")
            if own.get("attention_type") != "sliding_attention":
                raise self._refusal(
                    "other heads are known of windows only", attention_other_setting=own._fields
                )
            own._read |= {"num_attention_heads", "true_head_dim"}
            head_dim = own.number("head_dim")
            heads = KVHeads(own.number("num_attention_groups"), head_dim, head_dim)
            own.refuse_unread_fields()
            return dict.fromkeys(windows, heads)
        return {}

    def _sizes_by_layer(self) -> dict[int, KVHeads]:
        """Return the heads of layers that have their own, as `per_layer_config` says."""
        found = self.get("per_layer_config")
        if not found:
            return {}
        if not isinstance(found, dict) or not all(
            str(layer).isdecimal() and isinstance(changes, dict) for layer, changes in found.items()
        ):
            raise self._refusal("per_layer_config has no object for each layer", found=found)
        sizes = {}
        for layer, changes in found.items():
            own = _Config({**self._fields, **changes}, f"{self._path}: layer {layer}", self.dtype)
            unknown = changes.keys() - {
                *("head_dim", "num_attention_groups", "num_attention_heads"),
                *("num_key_value_heads", "v_head_dim"),
            }
            if any(ATTENTION_FIELDS.search(name) for name in unknown):
                raise self._refusal(
                    "a layer of per_layer_config has fields of its own that are not known",
                    fields=sorted(unknown),
                )
            sizes[int(layer)] = own.heads()
        return sizes

    def _num_sharing_layers(self) -> int:
        """Return the number of last layers that read another layer's cache, and have none."""
        if self.architecture not in ("gemma3n", *GEMMA_4):
            return 0
        return self.optional("num_kv_shared_layers", 0)

    @property
    def num_draft_layers(self) -> int:
        """The number of layers that predict further tokens, and of which the engine caches nothing unless it drafts."""
        found = {name: self.optional(name, 0) for name in DRAFTS if name not in self._defaults}
        number = max(found.values(), default=0)
        if number > MAX_LAYERS:
            raise self._refusal(f"a model has at most {MAX_LAYERS} draft layers", **found)
        return number

    def drafts(self) -> list[tuple[Cached, ...]]:
        """Return what each draft layer caches; nothing if there are none, or if it is not known."""
        if self.architecture not in DRAFTED:
            return []
        indexer = (self._indexer(),) if self.get("index_topk") else ()
        return [(self._cached("full", None), *indexer)] * self.num_draft_layers

    def groups(
        self, layers: Iterable[tuple[Cached, ...]], *, first: int = 0
    ) -> tuple[LayerGroup, ...]:
        """Return groups of layers that cache alike. `first` is the number of the first layer."""
        found: dict[Cached, list[int]] = {}
        for layer, each in enumerate(layers, first):
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
                is_cut=each.is_cut,
            )
            for each in order
        )

    def _token(self, own: KVHeads | None = None) -> Parts:
        """Return K and V of a token, or its latent. `own`: a layer's own heads."""
        if self.is_mla:
            return parts_of_token(1, self.latent_size, self.dtype, is_mla=True)
        heads, key_dim, value_dim = own or self.heads()
        item = DType(self.dtype).item_size_bytes
        return (("k", heads, key_dim, item), ("v", heads, value_dim, item))

    def _cached(self, kind: str, own: KVHeads | None) -> Cached:
        """Return what a layer of a kind caches, with its `own` heads if it has any."""
        if kind in ATTENTION:
            name, keeps, names = ATTENTION[kind]
            size = self.number(*names) if names else 0
            if kind == "window" and self.architecture.startswith("cohere2"):
                size += 1  # its windows have the token itself beside this number of others
            is_global = kind == "full" and own is None
            token = self._global_token() if is_global else self._token(own)
            return Cached(name.format(size), token, keeps, size)
        makers: dict[str, Callable[[], tuple[str, StateParts]]] = {
            "delta": self._delta_net,
            "kda": self._kimi_delta,
            "lightning": self._lightning,
            "mamba": self._mamba,
            "convolution": self._convolution,
        }
        name, state = makers[kind]()
        self._read |= {"mamba_ssm_dtype", "mamba_ssm_cache_dtype"}
        given = self.get(STATE_TYPES.get(self.architecture, ""))
        # Kimi's kernels keep the recurrent state in float32, whatever the model's type
        recurrent = str(given or ("float32" if kind == "kda" else self.dtype))
        items = {part: DType(self.dtype).item_size_bytes for part, *_ in state}
        if TEMPORAL in items:
            items[TEMPORAL] = DType(recurrent).item_size_bytes
        parts = tuple((part, units, size, items[part]) for part, units, size in state)
        # vLLM's engines cut these by heads only where they know the order of their channels
        is_cut = kind not in ("lightning", "convolution")
        return Cached(f"{name} state", parts, "state", is_cut=is_cut)

    def _global_token(self) -> Parts:
        """Return K and V of a layer that keeps every token, whose heads differ from a window's in Gemma 4."""
        if self.architecture not in GEMMA_4:
            return self._token()
        heads = self.get("num_global_key_value_heads") if self.get("attention_k_eq_v") else None
        heads = self.number("num_global_key_value_heads") if heads else self._num_kv_heads()
        self.get("num_global_key_value_heads")
        head_dim = self.optional("global_head_dim", 512, least=1)
        return parts_of_token(heads, head_dim, self.dtype, is_mla=False)

    def _indexed_layers(self, num_layers: int) -> list[int]:
        """Return the layers of sparse attention that have an indexer's keys. Others share a layer's choice."""
        every = range(num_layers)
        if self.architecture.startswith("minimax_m3"):
            self._read |= {"index_block_size", "index_local_blocks", "index_topk_blocks"}
            self._read |= {"index_head_dim"}
            if not self.get("sparse_attention_config"):  # as transformers saves it
                kinds = self.get("layer_types") or []
                return [
                    layer for layer in every if kinds[layer : layer + 1] == ["minimax_m3_sparse"]
                ]
            own = self.within("sparse_attention_config")
            freq = own.get("sparse_attention_freq")
            named = own.marks("sparse_attention_freq", freq, (0, 1), num_layers)
            return [layer for layer in every if named[layer]]
        if not self.get("index_topk"):
            return []
        types, pattern = self.get("indexer_types"), self.get("index_topk_pattern")
        if named := types or pattern:
            self._read |= {"index_topk_freq", "index_skip_topk_offset"}
            marks = {"full": True, "F": True, "shared": False, "S": False}
            each_one = [*named] if isinstance(named, list | str) else []
            found = [marks.get(str(each)) for each in each_one]
            if len(found) < num_layers or None in found:
                raise self._refusal(
                    "the layers that share an indexer are not named as full and shared", found=named
                )
            return [layer for layer in every if found[layer]]
        period = self.optional("index_topk_freq", 1, least=1)
        offset = self.optional("index_skip_topk_offset", 2)
        return [layer for layer in every if max(layer - offset + 1, 0) % period == 0]

    def _indexer(self) -> Cached:
        """Keys of DeepSeek's indexer in fp8, a float32 scale for each 128 elements; MiniMax-M3's as they are."""
        if self.get("sparse_attention_config"):
            size = self.within("sparse_attention_config").number("sparse_index_dim")
        else:
            size = self.number("index_head_dim")
        if self.architecture.startswith("minimax_m3"):
            return Cached("indexer", (("index", 1, size, DType(self.dtype).item_size_bytes),))
        return Cached("indexer", (("index", 1, size, 1), ("index-scales", 1, size // 128 * 4, 1)))

    def _blocks(self, num_layers: int) -> list[tuple[Cached, ...]]:
        """Return what each layer of a searched architecture (Nemotron NAS) caches, whose heads differ by layer."""
        blocks = self.get("block_configs")
        if not isinstance(blocks, list) or len(blocks) != num_layers:
            raise self._refusal("block_configs names every layer", layers=num_layers)
        layers: list[tuple[Cached, ...]] = []
        item, head_dim = DType(self.dtype).item_size_bytes, self._head_dim()
        for block in blocks:
            fields = block.get("attention") if isinstance(block, dict) else None
            if not isinstance(fields, dict) or not fields:
                raise self._refusal("a block of block_configs has no attention", block=block)
            attention = _Config(fields, self._path, self.dtype)
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

    def _delta_net(self) -> tuple[str, StateParts]:
        """Convolution of Q, K and V, and state `[value heads, value dim x key dim]`."""
        number = self.number
        key_dim, value_dim = number("linear_key_head_dim"), number("linear_value_head_dim")
        values = number("linear_num_value_heads")
        keys, width = number("linear_num_key_heads"), number("linear_conv_kernel_dim") - 1
        convolution = _convolved(width, Q=keys * key_dim, K=keys * key_dim, V=values * value_dim)
        return "gated delta net", (*convolution, (TEMPORAL, values, value_dim * key_dim))

    def _kimi_delta(self) -> tuple[str, StateParts]:
        """Convolution of Q, K and V, and state `[heads, head dim x head dim]`."""
        if self.get("linear_attn_config"):
            own = self.within("linear_attn_config")
            heads, dim = own.number("num_heads"), own.number("head_dim")
            width = own.number("short_conv_kernel_size") - 1
            self._read |= {"linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim"}
        else:  # as transformers saves it
            heads, dim = self.number("linear_num_heads"), self.number("linear_head_dim")
            width = self.number("linear_conv_kernel_dim") - 1
        convolution = _convolved(width, Q=heads * dim, K=heads * dim, V=heads * dim)
        return "Kimi delta attention", (*convolution, (TEMPORAL, heads, dim * dim))

    def _lightning(self) -> tuple[str, StateParts]:
        """State `[heads, head dim x head dim]` of all attention heads."""
        dim = self._head_dim()
        return "lightning attention", ((TEMPORAL, self.number(*ALL_HEADS), dim * dim),)

    def _convolution(self) -> tuple[str, StateParts]:
        """Convolution of LFM2, which has no other state."""
        self.get("conv_dim_out")
        channels = self.number("conv_dim", "hidden_size")
        return "short convolution", _convolved(self.number("conv_L_cache") - 1, x=channels)

    def _mamba(self) -> tuple[str, StateParts]:
        """Mamba 2: convolution of x, B and C, the latter of each group of heads, and state `[heads, head dim x state]`.
        Mamba 1, which has no heads: convolution of x, and state `[channels, state]`.
        """
        number = self.number
        width = number("mamba_d_conv", "conv_kernel") - 1
        size = number("mamba_d_state", "ssm_state_size", "state_size")
        own = ("num_heads",) if self.architecture == "mamba2" else ()
        found = ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", *own)
        names = [name for name in found if self.get(name)]
        if not names:
            channels = self._mamba_channels()
            return "Mamba", (*_convolved(width, x=channels), (TEMPORAL, channels, size))
        heads = number(*names)
        dims = ("mamba_d_head", "mamba_head_dim", "mamba_headdim", *(("head_dim",) if own else ()))
        self._read |= {"mamba_expand", "expand"}
        is_given = any(self.get(name) not in (None, "auto") for name in dims)
        dim = number(*dims) if is_given else self._mamba_expanded() // heads
        inner = self.optional("mamba_d_ssm", heads * dim, least=1)
        groups = number("mamba_n_groups", "n_groups", "mamba_ngroups")
        # with more ranks than groups, each holds the group of its heads whole
        sides = tuple((f"conv-{name}", groups, size * width) for name in ("B", "C"))
        return "Mamba", (*_convolved(width, x=inner), *sides, (TEMPORAL, heads, dim * size))

    def _mamba_channels(self) -> int:
        if self.architecture in ("mamba", "falcon_mamba") and self.get("intermediate_size"):
            return self.number("intermediate_size")
        return self._mamba_expanded()

    def _mamba_expanded(self) -> int:
        """Return the channels of a Mamba layer: the model's, by a factor."""
        return self.number("mamba_expand", "expand") * self.number("hidden_size")

    def _kinds(self, num_layers: int) -> list[str]:
        """Return the data that each layer caches, as values of `KINDS`; several with a plus between them."""
        if self.get("linear_attn_config"):
            return self._kimi_kinds(num_layers)
        is_minimax = self.architecture in ("minimax_m1", "minimax_text_01", "minimax_m2")
        if is_minimax and (ones := self.get("attn_type_list")):
            ones = self.marks("attn_type_list", ones, (0, 1), num_layers)
            return ["full" if each else "lightning" for each in ones]
        names: tuple[str, ...]
        names = ("layer_types", "layers_block_type", "hybrid_override_pattern", "layer_pattern")
        if self.architecture in MIMO and self.get("hybrid_layer_pattern"):
            self._read |= {*names, "attention_chunk_size"}
            names = ()  # vLLM reads the pattern, and transformers may save other types beside it
        named = next(filter(None, map(self.get, names)), None)
        if not named:
            return self._unnamed_kinds(range(num_layers))
        self._read |= {"full_attention_interval", "attn_layer_indices", "full_attn_idxs"}
        self._read |= {"hybrid_layer_pattern", "hybrid_layer_ids"}  # the same again
        self._read |= {"attn_layer_period", "attn_layer_offset", "no_rope_layers", "attn_type_list"}
        self._read |= {"no_rope_layer_interval", "global_attn_every_n_layers"}
        self._read |= {"prefix_dense_sliding_window_pattern", *PERIODS}
        if self.architecture in (*MIMO, "zamba2"):
            self._read |= {
                "attention_chunk_size",
                "attention_hidden_size",
            }  # of masks, and of weights
        named = named if isinstance(named, list | str) else [named]
        return self._kinds_named(named, num_layers)

    def _kinds_named(self, named: Sequence[str], num_layers: int) -> list[str]:
        known = dict(KINDS)
        if linear := LINEAR.get(self.architecture):
            known["linear_attention"] = linear
        if self.architecture in ("zamba2", "falcon_h1"):
            known["hybrid"] = "full+mamba"
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
        own, every = self.within("linear_attn_config"), range(1, num_layers + 1)
        linear, full = (
            own.layer_numbers(name, every) for name in ("kda_layers", "full_attn_layers")
        )
        if sorted([*linear, *full]) != [*every]:
            raise self._refusal(
                "linear_attn_config does not name each layer once", layers=num_layers
            )
        return ["kda" if layer in linear else "full" for layer in every]

    def _unnamed_kinds(self, layers: range) -> list[str]:
        """Return the kinds of layers of architectures whose configurations have a period, or nothing, not a list."""
        optional = self.optional
        architecture = self.architecture
        if architecture == "jamba":
            period = optional("attn_layer_period", 8, least=1)
            offset = optional("attn_layer_offset", 0)
            return ["full" if i % period == offset else "mamba" for i in layers]
        if architecture == "bamba":
            is_named = self.get("attn_layer_indices") is not None
            own = self.layer_numbers("attn_layer_indices", layers) if is_named else []
            return ["full" if i in own else "mamba" for i in layers]
        if architecture in ("qwen3_next", "qwen3_5", "qwen3_5_moe"):
            interval = optional("full_attention_interval", 4, least=1)
            return ["full" if (i + 1) % interval == 0 else "delta" for i in layers]
        if architecture in MIMO and (named := self.get("hybrid_layer_pattern")):
            named = self.marks("hybrid_layer_pattern", named, (0, 1), len(layers))
            return ["window" if each else "full" for each in named]
        if architecture == "bailing_hybrid":
            self.number("kv_lora_rank")  # of the others
            size = self.number("layer_group_size")
            return ["full" if (i + 1) % size == 0 else "lightning" for i in layers]
        if architecture in ("lfm2", "lfm2_moe") and self.get("full_attn_idxs") is not None:
            full = self.layer_numbers("full_attn_idxs", layers)
            return ["full" if i in full else "convolution" for i in layers]
        if architecture == "llama4":
            interval = optional("no_rope_layer_interval", 4, least=1)
            ropes = [min((i + 1) % interval, 1) for i in layers]
            if named := self.get("no_rope_layers"):
                ropes = self.marks("no_rope_layers", named, (0, 1), len(layers))
            has_chunks = self.get("attention_chunk_size") is not None
            return ["chunk" if rope and has_chunks else "full" for rope in ropes]
        return self._windows(architecture, layers)

    def _windows(self, architecture: str, layers: range) -> list[str]:
        if not self._pattern and (architecture in LINEAR or architecture.startswith("lfm2")):
            raise self._refusal(UNNAMED, needed="layer_types")
        window = self.get("sliding_window") or self.get("sliding_window_size")
        if not window or self.get("use_sliding_window") is False:
            self._read |= {*PERIODS}
            if self._pattern == "irregular" or not {*self._pattern} <= {"full_attention", *WINDOWS}:
                return self._default_kinds(layers)
            return ["full" for _ in layers]
        period = next(filter(None, map(self.get, PERIODS)), None)
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
        if self.get("use_sliding_window"):  # Qwen 2: the first layers keep everything
            first = self.optional("max_window_layers", 0)
            return ["window" if i >= first else "full" for i in layers]
        return self._default_kinds(layers) if self._pattern else ["window" for _ in layers]

    def _default_kinds(self, layers: range) -> list[str]:
        """Return the kinds that transformers' class names where a file names none."""
        if self._pattern == "irregular":
            raise self._refusal(UNNAMED, needed="layer_types")
        size = len(self._pattern)
        if {*self._pattern} - {*FULL_NAMES}:
            self._used["layer_types"] = " ".join(self._pattern)
        return self._kinds_named([self._pattern[i % size] for i in layers], len(layers))
