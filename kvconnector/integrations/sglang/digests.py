"""The identities of prompts, made in threads so that SGLang's scheduler does not wait.

A decode engine compares digests of what a prompt's cache depends on (`identity.Identity`). Hashing 1,000 tokens takes
about 10 us, and 128,000 more than a millisecond, in which SGLang's scheduler would begin no step. So a thread hashes
long prompts, without the interpreter's lock. It begins when a request is admitted, long before its prompt is computed,
and takes the requests in that order. The scheduler waits only for a prompt that was computed sooner than hashed.
Embeddings come as lists of numbers and may take seconds, so a second thread hashes them and no other prompt waits.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import blake2b

from kvconnector.integrations.identity import DIGEST_BYTES, Identity, digest_of
from kvconnector.integrations.sglang.media import without_media

LONG_TOKENS = 4096
"""From this length on the thread makes the digest; below, handing it over takes longer than hashing."""


class PromptIdentities:
    """Makes the identities of one rank's prompts, until `close`. Its threads start when they are needed."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "kvconnector-digests")
        self._slow_thread = ThreadPoolExecutor(1, "kvconnector-embeds")

    def begin(
        self,
        tokens: Sequence[int],
        context: Mapping[str, str],
        embeds: Sequence[Sequence[float]] | None = None,
    ) -> Callable[[], Identity]:
        """Begin to make a prompt's identity. Nothing may change the arguments any more.

        Args:
            tokens: The prompt.
            context: What its cache depends on besides, without embeddings.
            embeds: The embeddings that stand for its tokens, if there are any.

        Returns:
            A function that returns the identity. It waits if the thread is not done.
        """
        if len(tokens) < LONG_TOKENS and embeds is None:
            return partial(identity_of, tokens, context)
        thread = self._thread if embeds is None else self._slow_thread
        return thread.submit(identity_of, tokens, context, embeds).result

    def close(self) -> None:
        """Stop the threads. Asking for an identity that they had not begun raises `CancelledError`."""
        for thread in (self._thread, self._slow_thread):
            thread.shutdown(cancel_futures=True)


def identity_of(
    tokens: Sequence[int],
    context: Mapping[str, str],
    embeds: Sequence[Sequence[float]] | None = None,
) -> Identity:
    """Return the identity that `PromptIdentities.begin` begins to make."""
    if "media" in context:
        # the context names the media themselves, and each server may put other numbers in their places
        tokens = without_media(tokens)
    named = dict(context)
    if embeds is not None:
        named["embeds"] = _digest_of_embeddings(embeds)
    return Identity(len(tokens), digest_of(tokens), named)


def _digest_of_embeddings(embeds: Sequence[Sequence[float]]) -> str:
    """Return the digest of a prompt's embeddings; "" if they are no numbers, with which SGLang will not compute."""
    digest = blake2b(digest_size=DIGEST_BYTES)
    try:
        for row in embeds:  # one after another, so that other threads may run
            digest.update(array("d", row))
    except (TypeError, ValueError, OverflowError):
        return ""
    return digest.hexdigest()
