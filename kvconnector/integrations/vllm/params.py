"""The `kv_transfer_params` of requests: what they ask of this engine, and if an offer's tokens are the request's own.

A client writes these parameters, or a router that passes on what a client wrote. `decoded` is the only function that
looks at them: it decodes every value that this integration uses, strictly, and refuses the whole mapping if one has the
wrong type or range. What it returns is safe to use without another check, and the mapping is not read again.

Each engine renders and tokenizes a request by itself. Many templates leave the reasoning out of a chat's earlier
answers, so the next turn's prompt has other tokens than the decode engine's cache of this turn. A router may also
confuse two requests, or the two engines may have different templates. None of this shows in the number of tokens, so an
offer has a digest of them.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvconnector.errors import RemoteProtocolError
from kvconnector.runtime import TransferParams

TOKENS_DIGEST = "remote_tokens_digest"
"""Our key for the digest. A router may leave it out: then tokens are not compared."""
FIRST_TOKEN = "remote_first_token"
"""Our key for the prompt's first token: `[token, digest of its sampling parameters]`."""
_DIGEST_BYTES = 16
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
    first_token: Any = None


NO_PARAMS = RequestParams()


class _Keys(msgspec.Struct, frozen=True):
    """The keys of this integration alone. `runtime.params` has those of offers and of streams."""

    do_remote_prefill: bool = False
    do_remote_decode: bool = False
    remote_tokens_digest: Annotated[str, Meta(max_length=2 * _DIGEST_BYTES)] | None = None
    remote_first_token: Any = None


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
    except (msgspec.ValidationError, RecursionError) as error:
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
        first_token=keys.remote_first_token,
    )


def digest_of(tokens: Sequence[int]) -> str:
    """Return the digest of token ids in their order."""
    return hashlib.blake2b(array("q", tokens), digest_size=_DIGEST_BYTES).hexdigest()


def is_of_other_tokens(asked: RequestParams, prompt: Sequence[int]) -> bool:
    """Returns True if an offer states that its tokens are not the first ones of this prompt."""
    offer, stated = asked.offer, asked.tokens_digest
    if offer is None or stated is None or offer.is_followed:
        return False  # its router has left the digest out, or the prompt is streamed
    return stated != digest_of(prompt[: offer.remote_num_tokens])
