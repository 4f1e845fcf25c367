"""The `kv_transfer_params` of requests: which offer a request names, and if its tokens are the request's own.

Each engine renders and tokenizes a request by itself. Many templates leave the reasoning out of a chat's earlier
answers, so the next turn's prompt has other tokens than the decode engine's cache of this turn. A router may also
confuse two requests, or the two engines may have different templates. None of this shows in the number of tokens, so an
offer has a digest of them.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

Params = Mapping[str, Any]
TOKENS_DIGEST = "remote_tokens_digest"
"""Our key for the digest. A router may leave it out: then tokens are not compared."""
_ADDRESS_KEYS = ("remote_engine_id", "remote_host", "remote_port")
_DIGEST_BYTES = 16


def transfer_of(params: Params) -> Any:
    """Return the name of a request's transfer: the offer's, or the router's while the prompt is being computed."""
    return params.get("remote_request_id" if params.get("remote_block_ids") else "transfer_id")


def offer_of(params: Params, *, is_bidirectional: bool) -> Params | None:
    """Return a request's parameters if they make this engine load an offer or a streamed prompt; else None."""
    if not transfer_of(params) or any(params.get(key) is None for key in _ADDRESS_KEYS):
        return None
    if params.get("do_remote_prefill"):
        return params
    is_offered = bool(params.get("remote_block_ids"))
    if is_offered and params.get("do_remote_decode") and is_bidirectional:
        # a later turn of a chat: the decode engine has the earlier turns' blocks
        return {**params, "do_remote_prefill": True, "do_remote_decode": False}
    return None


def digest_of(tokens: Sequence[int]) -> str:
    """Return the digest of token ids in their order."""
    return hashlib.blake2b(array("q", tokens), digest_size=_DIGEST_BYTES).hexdigest()


def is_of_other_tokens(offer: Params, prompt: Sequence[int]) -> bool:
    """Returns True if a valid offer states that its tokens are not the first ones of this prompt."""
    stated = offer.get(TOKENS_DIGEST)
    if stated is None or not offer.get("remote_block_ids"):
        return False  # its router has left the digest out, or the prompt is streamed
    return bool(stated != digest_of(prompt[: offer["remote_num_tokens"]]))
