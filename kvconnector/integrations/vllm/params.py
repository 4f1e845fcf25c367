"""The `kv_transfer_params` of requests: what they ask of this engine, and if an offer's tokens are the request's own.

A client writes these parameters, or a router that passes on what a client wrote. `decoded` is the only function that
looks at them: it decodes every value that this integration uses, strictly, and refuses the whole mapping if one has the
wrong type or range. What it returns is safe to use without another check, and the mapping is not read again.

Each engine renders and tokenizes a request by itself. Many templates leave the reasoning out of a chat's earlier
answers, so the next turn's prompt has other tokens than the decode engine's cache of this turn. A router may also
confuse two requests, or the two engines may have different templates. None of this shows in the number of tokens, so an
offer has a digest of them. What else a cache depends on is its *context*: the adapter, the cache salt, images and
embeddings. Two prompts with equal placeholders and other images have equal tokens.

A decode engine that offers a turn of a chat also states digests at the end of its prompt and shortly before. If the
next turn's prompt has another answer than the decode engine generated, or another beginning of it, the rest is loaded.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import torch
import vllm
from msgspec import Meta

from kvconnector.errors import RemoteProtocolError
from kvconnector.integrations.identity import (
    DIGEST_BYTES,
    Identity,
    content_digest,
    context_differences,
    digest_of,
)
from kvconnector.planning import MAX_TOKENS
from kvconnector.runtime import TransferParams

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

TOKENS_DIGEST = "remote_tokens_digest"
"""Our key for the digest. A router may leave it out: then tokens are not compared."""
FIRST_TOKEN = "remote_first_token"
"""Our key for the prompt's first token: `[token, digest of its sampling parameters]`."""
CONTEXT = "remote_prompt_context"
"""Our key for the context, a text for each part that a prompt has. If it is left out, nothing of it is compared."""
PREFIXES = "remote_prefix_digests"
"""Our key for `[number of tokens, digest of these and of their context]` of shorter prefixes of an offer's tokens."""
BEFORE_END = (0, 1, 4, 16, 64)
"""Tokens between the end of a turn's prompt and the end of each prefix. A template may end a prompt with the beginning
of an answer, and leave that out later; and a first token that came from another engine counts as the prompt's last.
"""
NOTHING: Mapping[str, Any] = {}


class RequestParams(msgspec.Struct, frozen=True, kw_only=True):
    """What a request's parameters ask of this engine.

    `mapping` is what `runtime.Scheduler` takes: the parameters without keys that have no value. `offer` is what the
    engine is to load, if anything. `for_decoder`: another engine continues the request. `names_transfer`: a router has
    drawn a name, which `runtime.Scheduler` decodes. `first_token` is as it came, and decoded by `FirstTokens`.
    """

    mapping: Mapping[str, Any] = NOTHING
    offer: TransferParams | None = None
    for_decoder: bool = False
    names_transfer: bool = False
    tokens_digest: str | None = None
    context: Mapping[str, str] | None = None
    prefixes: tuple[tuple[int, str], ...] = ()
    first_token: Any = None


NO_PARAMS = RequestParams()


ShortText = Annotated[str, Meta(max_length=512)]
TokenCount = Annotated[int, Meta(ge=0, lt=1 << 31)]


class _Keys(msgspec.Struct, frozen=True):
    """The keys of this integration alone. `runtime.params` has those of offers and of streams."""

    do_remote_prefill: bool = False
    do_remote_decode: bool = False
    remote_tokens_digest: Annotated[str, Meta(max_length=2 * DIGEST_BYTES)] | None = None
    remote_first_token: Any = None
    remote_prompt_context: Annotated[dict[str, ShortText], Meta(max_length=8)] | None = None
    remote_prefix_digests: Annotated[
        tuple[tuple[TokenCount, ShortText], ...], Meta(max_length=8)
    ] = ()


def decoded(params: object, *, is_bidirectional: bool) -> RequestParams:
    """Decode a request's parameters. Keys that others add are ignored, and a key without a value counts as left out.

    Args:
        params: What came with the request: any JSON, or any Python object from a caller in this process.
        is_bidirectional: True if this engine loads the earlier turns of a chat from a decode engine.

    Raises:
        RemoteProtocolError: this is no mapping, a key is missing, or a value has the wrong type or range.
    """
    if params is None:
        return NO_PARAMS
    if not isinstance(params, Mapping):
        raise RemoteProtocolError(
            "kv_transfer_params must be a mapping", found=type(params).__name__
        )
    given = {key: value for key, value in params.items() if value is not None}
    if not given:
        return NO_PARAMS
    try:
        keys = msgspec.convert(given, _Keys)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        # ValueError: JSON may have text that is no UTF-8, half of a surrogate pair
        raise RemoteProtocolError(f"kv_transfer_params cannot be used: {error}") from error
    is_offered = keys.do_remote_prefill
    if keys.do_remote_decode and not is_offered:
        # a later turn of a chat: the decode engine has the earlier turns' blocks
        is_offered = is_bidirectional and bool(given.get("remote_block_ids"))
    mapping = given | {"do_remote_prefill": is_offered}
    return RequestParams(
        mapping=mapping,
        offer=TransferParams.from_mapping(mapping) if is_offered else None,
        for_decoder=keys.do_remote_decode,
        names_transfer="transfer_id" in given,
        tokens_digest=keys.remote_tokens_digest,
        context=keys.remote_prompt_context,
        prefixes=keys.remote_prefix_digests,
        first_token=keys.remote_first_token,
    )


def identities(
    request: Request, backoff_tokens: int, contexts: PromptContexts
) -> tuple[Identity, ...]:
    """Return the identities of a request's prompt without its last 0 to `backoff_tokens` tokens: how many of them a
    prefill engine leaves to this one shows only when it has computed the prompt.
    """
    stop = request.num_prompt_tokens
    counts = range(max(1, stop - backoff_tokens), stop + 1)
    digests = _running_digests(request.all_token_ids, counts)
    return tuple(
        Identity(count, digest, contexts.short(request, count)) for count, digest in digests
    )


def _running_digests(tokens: Sequence[int], counts: Iterable[int]) -> list[tuple[int, str]]:
    """Return (count, `digest_of` the first `count` tokens), for ascending counts."""
    found, hashed, done = [], hashlib.blake2b(digest_size=DIGEST_BYTES), 0
    for count in counts:
        hashed.update(array("q", tokens[done:count]))
        done = count
        found.append((count, hashed.hexdigest()))
    return found


def prefix_digests(
    tokens: Sequence[int], counts: Iterable[int], context_of: Callable[[int], Mapping[str, str]]
) -> list[tuple[int, str]]:
    """Return (count, digest) of prefixes of a sequence, the longest first. A digest covers the first `count` tokens and
    their context, which `context_of` returns.
    """
    found, hashed, done = [], hashlib.blake2b(digest_size=DIGEST_BYTES), 0
    for count in sorted(set(counts)):
        if 0 < count <= len(tokens):
            hashed.update(array("q", tokens[done:count]))
            done, whole = count, hashed.copy()
            whole.update(msgspec.json.encode(sorted(context_of(count).items())))
            found.append((count, whole.hexdigest()))
    return found[::-1]


class PromptContexts:
    """What the caches of requests depend on besides tokens, and its comparison with what offers state.

    Args:
        namespace: A text that two engines have in common if they name equal media alike; "" if this one's names are no
            digests of the media. Media are compared only between engines with the same namespace.
    """

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace

    def of(self, request: Request, num_tokens: int) -> dict[str, str]:
        """Return the context of a request's first tokens: a text for each part that it has."""
        context = {}
        if request.lora_request is not None:
            name = request.lora_request.lora_name[:512]
            context["adapter"] = name.encode(errors="replace").decode()
        if request.cache_salt:
            context["salt"] = content_digest(request.cache_salt.encode("utf-8", "surrogatepass"))
        media = [
            (each.identifier, each.mm_position.offset, each.mm_position.length)
            for each in request.mm_features
            if each.mm_position.offset < num_tokens
        ]
        if media:
            context["media"] = (
                f"{self._namespace}:{content_digest(repr(media).encode(errors='replace'))}"
            )
        if request.prompt_embeds is not None:
            rows = request.prompt_embeds[:num_tokens].contiguous().cpu()
            context["embeds"] = content_digest(rows.view(torch.uint8).numpy().tobytes())
        return context

    def short(self, request: Request, num_tokens: int) -> dict[str, str]:
        """Return `of` with a digest of the adapter's name, so that it fits into the end of a prompt's report."""
        context = self.of(request, num_tokens)
        if "adapter" in context:
            context["adapter"] = content_digest(context["adapter"].encode())
        return context


def media_namespace(vllm_config: VllmConfig) -> str:
    """Return the namespace of `PromptContexts`. vLLM names media by digests of their content, the model's path and the
    processor's options, by an algorithm that may change with a release. Without any cache it draws names.
    """
    model = vllm_config.model_config
    media = model.multimodal_config
    if media is None:
        return ""
    caches = vllm_config.cache_config.enable_prefix_caching or media.mm_processor_cache_gb > 0
    release = ".".join(vllm.__version__.split(".")[:2])
    named = [release, model.model, media.mm_hasher_algorithm, media.mm_processor_kwargs]
    return content_digest(repr(named).encode(errors="replace")) if caches else ""


def usable_tokens(
    asked: RequestParams, request: Request, contexts: PromptContexts
) -> tuple[int, str]:
    """Return how many of an offer's tokens are the first ones of a request's prompt, and a text of what differs; "" if
    they are all. What an offer does not state is not compared.
    """
    offer, prompt = asked.offer, request.all_token_ids
    if offer is None or offer.is_followed:
        return MAX_TOKENS, ""  # the producer states them at the prompt's end: see `check_identity`
    stop, other = offer.remote_num_tokens, []
    if asked.tokens_digest is not None and asked.tokens_digest != digest_of(prompt[:stop]):
        other = ["first tokens"]
    if asked.context is not None:
        other += context_differences(asked.context, contexts.of(request, stop))
    if not other:
        return stop, ""
    own = prefix_digests(
        prompt,
        (count for count, _ in asked.prefixes if count < stop),
        partial(contexts.of, request),
    )
    longest = max((count for count, digest in own if (count, digest) in asked.prefixes), default=0)
    return longest, " and ".join(other)
