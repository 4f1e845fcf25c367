"""What a model's configuration and its repository say that changes the numbers in a cache, but no shape: the text in
which engines of every kind state it for `ModelDescription`.

Engines load one `config.json` by classes of their own, of several releases of transformers. They move values between
attributes (`rope_scaling` and `rope_theta`, or `rope_parameters`), add defaults, and add what a model's code wants to
find. Two texts must be equal if the numbers are, and should differ if these do. So defaults and what has no effect are
left out, everything else is kept under its name, and a field outside the position encoding counts only if both engines
state it.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

ORIGINAL_LENGTH = "original_max_position_embeddings"
YARN = ("yarn", "deepseek_yarn", "deepseek_llama_scaling")
"""Names of YaRN's. Code of a model replaces the first by another one in its configuration."""
SCALING: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", "alpha", "max_trained_positions"),
    "ntk": ("factor", "mixed_b"),
    "llama3": ("factor", ORIGINAL_LENGTH, "low_freq_factor", "high_freq_factor"),
    "longrope": (ORIGINAL_LENGTH, "short_factor", "long_factor", "short_mscale", "long_mscale"),
    "yarn": (
        *("factor", ORIGINAL_LENGTH, "beta_fast", "beta_slow", "truncate", "apply_yarn_scaling"),
        *("mscale", "mscale_all_dim", "attention_factor", "attn_factor", "extrapolation_factor"),
    ),
}
"""The parameters of scaling that each type of position encoding uses. Others may be given, without effect."""
OF_SCALING = frozenset(name for names in SCALING.values() for name in names)
OF_LENGTH = ("dynamic", "longrope")
"""Types whose numbers depend on `max_position_embeddings`, too."""
DEFAULTS: Mapping[str, object] = {
    "beta_fast": 32,
    "beta_slow": 1,
    "truncate": True,
    "apply_yarn_scaling": True,
    "attn_factor": 1,
    "extrapolation_factor": 1,
    "partial_rotary_factor": 1,
    "mscale_all_dim": 0,
}
"""What both engines take a parameter for that is not given."""
SECTIONS = ("mrope_section", "mrope_interleaved")
"""Parameters that only matter for images. An engine that serves a multimodal model for text alone drops them."""
NAMED_ELSEWHERE = frozenset(
    {
        *("rope_type", "type", "rope_theta", "partial_rotary_factor", "xdrope_section", *SECTIONS),
        # sizes, which the parts of a cache state, and what a model's code adds to what is given
        *("rope_dim", "num_kv_heads", "num_key_value_heads", "use_fope", "is_deepseek_v4"),
        "finetuned",  # history
    }
)
SHARES = ("partial_rotary_factor", "rotary_pct", "rotary_emb_fraction")
SHARE_SIZES = ("rotary_dim", "attn_rotary_emb")
"""Names by which a configuration says how much of a head is rotated."""
FIELDS = (
    # positions
    *("rope_interleave", "rope_ratio", "no_rope_layers", "no_rope_layer_interval"),
    *("rope_local_base_freq", "compress_rope_theta"),
    # norms
    *("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "norm_eps"),
    # attention
    *("query_pre_attn_scalar", "attn_logit_softcapping", "attention_multiplier", "clip_qkv"),
    *("sliding_window", "attention_chunk_size", "index_topk"),
    *("attn_temperature_tuning", "floor_scale", "attn_scale"),
    # multipliers
    *("embedding_multiplier", "residual_multiplier", "key_multiplier", "scale_emb", "scale_depth"),
    # experts
    *("num_experts_per_tok", "norm_topk_prob", "routed_scaling_factor"),
)
"""Fields of a configuration that change keys and values, of any layer, but no shape."""
MAX_LISTED = 8
"""Numbers of a list that are named one by one."""
MAX_TEXT = 1024
"""The most characters of a position encoding."""
MAX_KINDS = 64
"""The most kinds of layers whose position encodings are stated."""
COMMIT = re.compile(r"[0-9a-f]{40}\Z")
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?\Z", re.ASCII)
SNAPSHOT = re.compile(
    r"models--(?P<name>[\w.-]+)/snapshots/(?P<commit>[0-9a-f]{40})(?:/|\Z)", re.ASCII
)
"""A folder of the hub's cache, in which a path of a model may lie."""


def position_encodings(
    config: Any, *, yarn_scale: float | None = None
) -> tuple[tuple[str, str], ...]:
    """Return how a model encodes positions, as its loaded configuration says it: equal for two engines if they rotate
    equally.

    Args:
        config: The configuration of the model that decodes text, as transformers or an engine's own class made it.
        yarn_scale: The number by which the engine really multiplies what YaRN has rotated, of an engine that makes
            something else of a configuration than others; None if it does what the configuration says.

    Returns:
        One text without a name, for example `yarn(rope_theta=1000000, factor=4,
        original_max_position_embeddings=32768)`; one for each kind of layers, with its name, if they differ; none if
        the configuration says nothing.
    """
    found = {
        kind: _encoding(config, given, yarn_scale)
        for kind, given in rope_parameters(config).items()
    }
    texts = {*found.values()}
    if len(texts) > 1:
        return tuple(sorted(found.items())[:MAX_KINDS])
    return tuple(("", text) for text in texts)


def config_fields(config: Any) -> tuple[tuple[str, str], ...]:
    """Return those of `FIELDS` that a configuration has, and the sections of a position encoding, each with its value
    as text.

    Args:
        config: As for `position_encodings`.
    """
    found = {name: _value(config, name) for name in FIELDS}
    for given in rope_parameters(config).values():
        section = given.get("mrope_section", given.get("xdrope_section"))
        if section is not None:
            interleaved = bool(given.get("mrope_interleaved", False))
            found |= {"mrope_section": section, "mrope_interleaved": interleaved}
    return tuple((name, _text(value)) for name, value in sorted(found.items()) if value is not None)


def revision_of(model: str, revision: str | None) -> str:
    """Return which revision of which repository an engine has loaded.

    Nothing is asked over a network: what the hub's library resolved is in the revision, in a path of its cache, or in
    the cache itself.

    Args:
        model: The name of a repository, or a path.
        revision: What the engine was asked for, or what it made of that.

    Returns:
        `REPOSITORY@COMMIT`; `REPOSITORY@REVISION` with what was asked for if the commit is not known; "" for a path
        that is none of the hub's cache.
    """
    if found := SNAPSHOT.search(model):
        return f"{found['name'].replace('--', '/', 1)}@{found['commit']}"
    if os.path.exists(model) or not REPOSITORY.match(model):
        return ""
    asked = str(revision or "main")
    commit = str(getattr(revision, "resolved", "")) or asked
    if not COMMIT.match(commit):
        commit = _cached_commit(model, asked) or asked
    return f"{model}@{commit}" if commit.isprintable() else ""


def _cached_commit(repository: str, revision: str) -> str:
    """Return the commit that a revision had when its configuration was last loaded here; "" if that is not known."""
    try:
        hub = importlib.import_module("huggingface_hub")
        path = hub.try_to_load_from_cache(repository, "config.json", revision=revision)
    except (ImportError, ValueError, OSError):  # no hub's library, or no name of its repositories
        return ""
    found = SNAPSHOT.search(path) if isinstance(path, str) else None
    return found["commit"] if found else ""


def rope_parameters(config: Any) -> dict[str, Mapping[str, Any]]:
    """Return the parameters of a position encoding as a configuration has them, for each kind of layers, or for all of
    them under the name "".

    Args:
        config: As for `position_encodings`.
    """
    given = _value(config, "rope_parameters") or _value(config, "rope_scaling")
    if not isinstance(given, Mapping):
        given = {}
    kinds = {str(kind): each for kind, each in given.items() if isinstance(each, Mapping)}
    if kinds:
        return kinds
    return {"": given} if given or _value(config, "rope_theta") is not None else {}


def longrope_length(config: Any) -> int | None:
    """Return the length in tokens that a model with LongRoPE was first trained with: its short factors are for prompts
    that are no longer. None for other position encodings.
    """
    for given in rope_parameters(config).values():
        if (given.get("rope_type") or given.get("type")) in {"longrope", "su"}:
            length = given.get(ORIGINAL_LENGTH) or _value(config, ORIGINAL_LENGTH)
            return length if isinstance(length, int) else None
    return None


def _encoding(config: Any, given: Mapping[str, Any], yarn_scale: float | None) -> str:
    kind = str(given.get("rope_type") or given.get("type") or "default")
    kind = {**dict.fromkeys(YARN, "yarn"), "su": "longrope", "mrope": "default"}.get(kind, kind)
    if kind == "yarn":
        given = {**given, **_scale_of_yarn(given, yarn_scale)}
    used = SCALING.get(kind, tuple(OF_SCALING))
    values = {
        "rope_theta": given.get("rope_theta", _value(config, "rope_theta")),
        "partial_rotary_factor": _share(config, given),
    }
    if kind in OF_LENGTH:
        values["max_position_embeddings"] = _value(config, "max_position_embeddings")
    values |= {
        name: value
        for name, value in sorted(given.items())
        if name not in NAMED_ELSEWHERE and (name in used or name not in OF_SCALING)
    }
    if ORIGINAL_LENGTH in SCALING.get(kind, ()) and values.get(ORIGINAL_LENGTH) is None:
        outside = _value(config, ORIGINAL_LENGTH)
        values[ORIGINAL_LENGTH] = outside or _value(config, "max_position_embeddings")
    stated = [
        f"{name}={_text(value)}"
        for name, value in values.items()
        if value is not None and value != DEFAULTS.get(name)
    ]
    return _bounded(f"{kind}({', '.join(stated)})", MAX_TEXT)


def _scale_of_yarn(given: Mapping[str, Any], used: float | None) -> dict[str, Any]:
    """Return the parameters that say by how much YaRN multiplies: `attention_factor` if that is not what follows from
    the others. Of an engine whose scale is known, what it was made from does not matter.
    """
    values: dict[str, Any] = dict(given) if used is None else {**given, "attention_factor": used}
    names = ("attention_factor", "factor", "mscale", "mscale_all_dim")
    numbers: list[Any] = [values.get(name) for name in names]
    own, factor, mscale, of_all = numbers
    stated: dict[str, Any] = {}
    if used is not None:
        stated = {"attention_factor": used, "attn_factor": None}
        # only an engine whose scale is known reads it; others have it in their configuration all the same
        if given.get("extrapolation_factor", 1) != 1:
            stated |= {"extrapolation_factor": None, "extrapolated": given["extrapolation_factor"]}
    needed = (own, factor, mscale or 1, of_all or 1)
    if not all(isinstance(each, int | float) for each in needed):
        return stated
    implied = _mscale(factor, 1.0)
    if mscale and of_all:
        implied = _mscale(factor, mscale) / _mscale(factor, of_all)
    if math.isclose(own, implied, rel_tol=1e-6):
        stated["attention_factor"] = None
    return stated


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _share(config: Any, given: Mapping[str, Any]) -> Any:
    """Return the part of each head that is rotated, as one of several names gives it; None for all of it."""
    if (own := given.get("partial_rotary_factor")) is not None:
        return own
    for name in SHARES:
        if (share := _value(config, name)) is not None:
            return share
    size = next(filter(None, (_value(config, name) for name in SHARE_SIZES)), None)
    width = _value(config, "head_dim")
    return size / width if isinstance(size, int) and isinstance(width, int) and width else None


def _value(config: Any, name: str) -> Any:
    """Return a field of a configuration; None if it has none, or one for each layer."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # transformers' for a field that differs between layers
        return None


def _text(value: Any) -> str:
    """Return a value as text that is equal for equal numbers, and short."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return f"{value:.9g}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        texts = [_text(each) for each in value]
        if len(texts) <= MAX_LISTED:
            return f"[{' '.join(texts)}]"
        return f"{len(texts)} values with digest {_digest(texts)}"
    return _bounded(json.dumps(value, sort_keys=True, default=str).strip('"'), 64)


def _bounded(text: str, most: int) -> str:
    """Return a text, or its beginning and its digest if it is too long."""
    return text if len(text) <= most else f"{text[: most - 32]}... digest {_digest(text)}"


def _digest(value: object) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=8).hexdigest()
