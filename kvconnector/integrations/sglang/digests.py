"""Digests of prompts, for which no scheduler waits.

Theory: a decode engine compares the digest of a prompt's tokens (`identity.Identity`). To hash 1000 tokens
takes about 10 us, 128,000 more than a millisecond, in which SGLang's scheduler would begin no step. So a long prompt's
digest is made by a thread of its own, from the moment at which its request is admitted: long before the prompt is
computed. Hashing releases the interpreter's lock. One thread serves all requests in the order of their admission, and
the scheduler waits for it only if a prompt is computed sooner than hashed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from kvconnector.integrations.identity import digest_of

LONG_TOKENS = 4096
"""From this length on the thread makes the digest; below, handing it over takes longer than hashing."""


class PromptDigests:
    """Makes the digests of one rank's prompts, until `close`. Its thread starts with the first long prompt."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "kvconnector-digests")

    def begin(self, tokens: Sequence[int]) -> Callable[[], str]:
        """Begin to make a prompt's digest, if it is long. Nothing may change the tokens any more.

        Returns:
            What returns the digest, `identity.digest_of` of the tokens. It waits if the thread is not done.
        """
        if len(tokens) < LONG_TOKENS:
            return partial(digest_of, tokens)
        return self._thread.submit(digest_of, tokens).result

    def close(self) -> None:
        """Stop the thread. Digests that it has not begun are not made: asking for one raises `CancelledError`."""
        self._thread.shutdown(cancel_futures=True)
