"""What a prefill engine says of a prompt at its end: the prompt's identity, and the first token for engines of another
kind, which cannot read SGLang's row of metadata. Pure.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec

from kvconnector.integrations.identity import (
    GREEDY,
    Identity,
    PromptEnd,
    content_digest,
    drawing_digest,
)
from kvconnector.integrations.sglang.media import media_name
from kvconnector.wire.messages import MAX_EXTRA_BYTES

MAX_ADAPTER = 512
"""Characters of an adapter's name that are compared, as in the other kind of engine."""
MAX_WEIGHTS = 16
"""Characters of a version of the weights: what is said at a prompt's end is short."""
SEVERAL_WEIGHTS = "several versions"
TOP_K_ALL = 1 << 30
"""SGLang's `top_k` for the whole vocabulary; its 1 stands for greedy sampling."""
_UNSHARED = (
    "json_schema",
    "regex",
    "ebnf",
    "structural_tag",
    "logit_bias",
    "custom_params",
    "watermark",
    "beam_width",
    "min_new_tokens",
)
"""Sampling parameters that may change the first token in ways that the two kinds of engine do not share."""


def context_of(req: Any, *, adapter: str, namespace: str) -> dict[str, str]:
    """Return what a request's cache depends on besides its tokens, as `identity.Identity` has it, without embeddings.

    SGLang's `extra_key` is left out. It only names a part of the prefix cache, and each server appends to it.

    Args:
        req: SGLang's request.
        adapter: The name by which its client asked for its adapter; "" if it has none, or one whose name is not known.
        namespace: See `media.feature_namespace`.
    """
    context = {}
    if req.lora_id is not None:
        name = adapter[:MAX_ADAPTER].encode(errors="replace")
        context["adapter"] = content_digest(name) if name else ""
    if req.cache_salt:
        context["salt"] = content_digest(req.cache_salt.encode("utf-8", "surrogatepass"))
    if req.multimodal_inputs is not None:
        context["media"] = media_name(req.multimodal_inputs.mm_items, namespace)
    return context


def digest_of_drawing(params: Any) -> str:
    """Return `drawing_digest` of SGLang's normalized sampling parameters; "" if another kind of engine may not use a
    token that was drawn with them.
    """
    if any(getattr(params, name, None) for name in _UNSHARED) or params.repetition_penalty != 1.0:
        return ""
    if params.top_k == 1:
        return GREEDY
    top_k = 0 if params.top_k == TOP_K_ALL else params.top_k
    shape = params.temperature, params.top_p, top_k, params.min_p
    return drawing_digest([*shape, params.repetition_penalty, None, None, None, None])


def name_of_weights(versions: Collection[str]) -> str:
    """Return how both engines name the weights that a prompt was computed with; "" if nothing is known of them.

    Args:
        versions: The server's `weight_version` at each of the prompt's steps.
    """
    if len({*versions}) > 1:
        return SEVERAL_WEIGHTS
    version = next(iter(versions), "")
    if len(version) <= MAX_WEIGHTS and version.isascii():
        return version
    return content_digest(version.encode("utf-8", "surrogatepass"))[:MAX_WEIGHTS]


def prompt_end_of(req: Any, computed: Identity, weights: str = "") -> bytes:
    """Return the end of a request's prompt, encoded: what was computed, and the token that was sampled.

    Args:
        req: SGLang's request, whose prompt is computed.
        computed: The prompt's identity.
        weights: See `name_of_weights`.
    """
    drawn = digest_of_drawing(req.sampling_params)
    if getattr(req, "custom_logit_processor", None):
        drawn = ""
    token = int(req.output_ids[0]) if drawn and req.output_ids else None
    end = PromptEnd(token, drawn, computed.num_tokens, computed, weights)
    encoded = msgspec.msgpack.encode(end)
    # which is too long only with an adapter, a salt, images and embeddings all at once
    if len(encoded) > MAX_EXTRA_BYTES:
        return msgspec.msgpack.encode(msgspec.structs.replace(end, weights=""))
    return encoded
