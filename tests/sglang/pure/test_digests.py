"""A scheduler does not wait while the digest of a long prompt is made."""

import threading
import time
from contextlib import closing

import pytest

from kvconnector.integrations.identity import digest_of
from kvconnector.integrations.sglang.digests import LONG_TOKENS, PromptDigests

LIMIT_S = 20.0


@pytest.fixture
def digests():
    with closing(PromptDigests()) as made:
        yield made


class Slow:
    """Tokens that are read only once `may_begin` is set. `reader`: the thread that read them."""

    def __init__(self, tokens):
        self._tokens, self.may_begin, self.reader = tokens, threading.Event(), None

    def __len__(self):
        return len(self._tokens)

    def __iter__(self):
        self.reader = threading.current_thread()
        assert self.may_begin.wait(LIMIT_S)
        return iter(self._tokens)


@pytest.mark.parametrize("num_tokens", [0, 3, LONG_TOKENS - 1, LONG_TOKENS, 3 * LONG_TOKENS])
def test_a_digest_is_that_of_the_tokens_however_long_the_prompt(digests, num_tokens):
    tokens = range(7, 7 + num_tokens)
    assert digests.begin(tokens)() == digest_of(tokens)


def test_a_long_prompt_is_read_by_another_thread_while_the_scheduler_goes_on(digests):
    prompt = Slow(range(LONG_TOKENS))
    digest = digests.begin(prompt)  # returns, although nothing may read the tokens yet
    until_s = time.monotonic() + LIMIT_S
    while prompt.reader is None:
        assert time.monotonic() < until_s, "nobody reads the prompt"
        time.sleep(0.001)
    assert prompt.reader is not threading.current_thread()
    prompt.may_begin.set()
    assert digest() == digest_of([*range(LONG_TOKENS)])


def test_a_prompt_that_nobody_asks_about_holds_up_no_other(digests):
    digests.begin(range(LONG_TOKENS))
    assert digests.begin(range(1, 1 + LONG_TOKENS))() == digest_of(range(1, 1 + LONG_TOKENS))
