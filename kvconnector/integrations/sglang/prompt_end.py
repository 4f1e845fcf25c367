"""What is said of a prompt at its end: its identity, and to engines of another kind, which cannot read SGLang's row of
metadata, the first token. Pure.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvconnector.integrations.identity import (
    GREEDY,
    Identity,
    PromptEnd,
    content_digest,
    drawing_digest,
)

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


def context_of(req: Any) -> dict[str, str]:
    """Return what a request's cache depends on besides its tokens, as `identity.Identity` has it."""
    context = {}
    if req.lora_id is not None:
        context["adapter"] = content_digest(f"sglang {req.lora_id}".encode(errors="replace"))
    if req.cache_salt:
        context["salt"] = content_digest(req.cache_salt.encode("utf-8", "surrogatepass"))
    if req.multimodal_inputs is not None:
        context["media"] = "sglang:"  # named in no way that another kind of engine has
    if req.input_embeds is not None:
        context["embeds"] = "sglang"
    return context


def shared_identity(identity: Identity) -> Identity:
    """Return what two servers of SGLang both know of a prompt's identity. Each draws a name of its own for an adapter,
    and may put other numbers in the place of the same image.
    """
    own_words = [name for name in ("adapter", "media", "embeds") if name in identity.context]
    has_media = "media" in own_words or "embeds" in own_words
    return Identity(
        identity.num_tokens,
        "" if has_media else identity.tokens_digest,
        identity.context | dict.fromkeys(own_words, ""),
    )


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


def prompt_end_of(req: Any, tokens_digest: str) -> bytes:
    """Return the end of a request's prompt, encoded: what was computed, and the token that was sampled.

    Args:
        req: SGLang's request, whose prompt is computed.
        tokens_digest: `identity.digest_of` of its prompt.
    """
    num_tokens = len(req.origin_input_ids)
    computed = Identity(num_tokens, tokens_digest, context_of(req))
    drawn = digest_of_drawing(req.sampling_params)
    token = int(req.output_ids[0]) if drawn and req.output_ids else None
    return msgspec.msgpack.encode(PromptEnd(token, drawn, num_tokens, computed))
