"""The identities of prompts, for which no scheduler waits.

Theory: a decode engine compares what a prompt's cache depends on (`identity.Identity`), of which digests are made. To
hash 1000 tokens takes about 10 us, 128,000 more than a millisecond, in which SGLang's scheduler would begin no step. So
the digest of a long prompt is made by a thread of its own, from the moment at which its request is admitted: long
before the prompt is computed. Hashing releases the interpreter's lock. One thread serves all requests in the order of
their admission, and the scheduler waits for it only if a prompt is computed sooner than hashed. Embeddings, which come
as lists of numbers, may take seconds: another thread hashes them, so that no prompt waits for them.
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
            What returns the identity. It waits if the thread is not done.
        """
        if len(tokens) < LONG_TOKENS and embeds is None:
            return partial(identity_of, tokens, context)
        thread = self._thread if embeds is None else self._slow_thread
        return thread.submit(identity_of, tokens, context, embeds).result

    def close(self) -> None:
        """Stop the threads. What they have not begun is not made: asking for it raises `CancelledError`."""
        for thread in (self._thread, self._slow_thread):
            thread.shutdown(cancel_futures=True)


def identity_of(
    tokens: Sequence[int],
    context: Mapping[str, str],
    embeds: Sequence[Sequence[float]] | None = None,
) -> Identity:
    """Return the identity that `PromptIdentities.begin` begins to make."""
    if (
        "media" in context
    ):  # which have a name in the context: servers may put other numbers in their places
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
