"""What the cache of a prompt depends on, and what a prefill engine says of it at the end of a streamed prompt. Pure,
and for engines of every kind.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Mapping, Sequence

import msgspec

from kvconnector.errors import OtherPromptError, RemoteProtocolError

_WORDS = {
    "adapter": "adapter",
    "salt": "cache salt",
    "media": "images or other media",
    "embeds": "embeddings",
}

DIGEST_BYTES = 16
OF_SGLANG = "sglang "
"""What SGLang's names of media begin with. No other engine's do."""


def digest_of(tokens: Sequence[int]) -> str:
    """Return the digest of token ids in their order."""
    return hashlib.blake2b(array("q", tokens), digest_size=DIGEST_BYTES).hexdigest()


def content_digest(content: bytes) -> str:
    """Return the digest of a part of a prompt's context, such as a cache salt."""
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).hexdigest()


def drawing_digest(drawn: Sequence[object]) -> str:
    """Return a digest that is equal for two requests if their first tokens are drawn from the same distribution.

    Args:
        drawn: Temperature, top_p, top_k (0: the whole vocabulary), min_p, repetition penalty, bias by token, permitted
            tokens, stop tokens that may not come first, and the adapter. Of greedy sampling, see `GREEDY`.
    """
    return hashlib.blake2b(json.dumps(drawn, sort_keys=True).encode(), digest_size=8).hexdigest()


GREEDY = drawing_digest([0.0, 1.0, 0, 0.0, 1.0, None, None, None, None])
"""The digest of greedy sampling without anything else."""


class Identity(msgspec.Struct, frozen=True, array_like=True):
    """What the cache of a prompt's first `num_tokens` tokens depends on: their digest, and their context, a name for
    each part that the prompt has. If a part's name is "", it is only known that the prompt has that part.
    """

    num_tokens: int
    tokens_digest: str
    context: dict[str, str]


class PromptEnd(msgspec.Struct, frozen=True, array_like=True):
    """What a prefill engine says of a streamed prompt with its last report, in `HoldRequest.extra`: the first token and
    the digest of its sampling parameters, if there is one to use, and what was computed. `weights` is the name that the
    engine's operator gave to its weights. What an earlier release or another kind of engine leaves out is not compared.
    """

    token: int | None = None
    sampling_digest: str = ""
    num_tokens: int = 0
    identity: Identity | None = None
    weights: str = ""

    @classmethod
    def decode(cls, extra: bytes) -> PromptEnd:
        """Decode an extra. Raises RemoteProtocolError: no release sends these bytes."""
        if not extra:
            return cls()
        try:
            return msgspec.msgpack.decode(extra, type=cls)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise RemoteProtocolError(f"the end of a prompt cannot be used: {error}") from error


def check_identity(extra: bytes, own: Sequence[Identity]) -> None:
    """Compare what a prefill engine says of a streamed prompt with the identities of this engine's own. What it does
    not say, as earlier releases do, is not compared.

    Raises:
        OtherPromptError: it has computed another prompt.
        RemoteProtocolError: see `PromptEnd.decode`.
    """
    theirs = PromptEnd.decode(extra).identity
    if theirs is not None:
        compare_identities(theirs, own)


def compare_identities(theirs: Identity, own: Sequence[Identity]) -> None:
    """Raise OtherPromptError unless `theirs` is the one of `own` that has as many tokens."""
    ours = next((each for each in own if each.num_tokens == theirs.num_tokens), None)
    if ours is None:
        raise OtherPromptError(
            "the prefill engine computed a prompt of a different length",
            theirs=theirs.num_tokens,
            ours=own[-1].num_tokens,
        )
    other = ["tokens"] if theirs.tokens_digest != ours.tokens_digest else []
    if other := other + context_differences(theirs.context, ours.context):
        raise OtherPromptError(
            "the prefill engine computed a different prompt", differs_in=" and ".join(other)
        )


def context_differences(offered: Mapping[str, str], own: Mapping[str, str]) -> list[str]:
    """Return the parts, in words, in which an offer's context is not the request's own."""
    return [
        _WORDS.get(name, name)
        for name in sorted(offered.keys() | own.keys())
        if offered.get(name) != own.get(name) and not _are_other_names(name, offered, own)
    ]


def _are_other_names(name: str, offered: Mapping[str, str], own: Mapping[str, str]) -> bool:
    """Return True if both have a part, and nothing says that the two engines would name equal ones alike."""
    if name not in offered or name not in own:
        return False
    names = offered[name], own[name]
    if name != "media":
        return not all(names)
    if names[0].startswith(OF_SGLANG) != names[1].startswith(OF_SGLANG):
        return False  # the two kinds of engine give an image different tokens, too
    spaces = [each.rpartition(":")[0].removeprefix(OF_SGLANG) for each in names]
    return spaces[0] != spaces[1] or not all(spaces)
