"""Which prompts are the same, and that a scheduler does not wait while the digest of a long one is made."""

import threading
import time
from array import array
from contextlib import closing

import pytest

from kvconnector.integrations.identity import Identity, digest_of
from kvconnector.integrations.sglang.digests import LONG_TOKENS, PromptIdentities
from kvconnector.integrations.sglang.media import FIRST_MEDIA_TOKEN

LIMIT_S = 20.0


@pytest.fixture
def digests():
    with closing(PromptIdentities()) as made:
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
    assert digests.begin(tokens, {})() == Identity(num_tokens, digest_of(tokens), {})


def test_a_long_prompt_is_read_by_another_thread_while_the_scheduler_goes_on(digests):
    prompt = Slow(range(LONG_TOKENS))
    digest = digests.begin(prompt, {})  # returns, although nothing may read the tokens yet
    until_s = time.monotonic() + LIMIT_S
    while prompt.reader is None:
        assert time.monotonic() < until_s, "nobody reads the prompt"
        time.sleep(0.001)
    assert prompt.reader is not threading.current_thread()
    prompt.may_begin.set()
    assert digest().tokens_digest == digest_of([*range(LONG_TOKENS)])


def test_a_prompt_that_nobody_asks_about_holds_up_no_other(digests):
    digests.begin(range(LONG_TOKENS), {})
    own = digests.begin(range(1, 1 + LONG_TOKENS), {})()
    assert own.tokens_digest == digest_of(range(1, 1 + LONG_TOKENS))


def test_no_prompt_waits_for_embeddings(digests):
    slow = Slow([[0.5]] * 3)
    embedded = digests.begin([1, 1, 1], {}, slow)
    assert digests.begin(range(LONG_TOKENS), {})().num_tokens == LONG_TOKENS
    slow.may_begin.set()
    assert embedded().context.keys() == {"embeds"}


def test_tokens_in_the_place_of_media_do_not_count_and_all_others_do(digests):
    """Two servers may put other ones there; that the media are the same, their names in the context say."""
    prompt = array("q", [5, FIRST_MEDIA_TOKEN + 7, FIRST_MEDIA_TOKEN + (1 << 62), 6])
    other = array("q", [5, FIRST_MEDIA_TOKEN, FIRST_MEDIA_TOKEN, 6])
    context = {"media": "sglang n:a"}
    one, same, longer, moved, text = (
        digests.begin(tokens, context)()
        for tokens in (prompt, other, other[:3] + other[2:], other[1:] + other[:1], [5, 1, 1, 6])
    )
    assert one == same
    assert one.context == context
    assert len({each.tokens_digest for each in (one, longer, moved, text)}) == 4
    assert digests.begin(prompt, {})() != digests.begin(other, {})()


def test_embeddings_are_compared_by_their_numbers_in_another_thread(digests):
    one, same, other, broken = (
        digests.begin([1, 1], {}, embeds)()
        for embeds in (
            [[0.5, 1.0], [2.0, 3.0]],
            [[0.5, 1.0], [2.0, 3.0]],
            [[0.5, 1.0], [2.0, 3.5]],
            [["x"], None],
        )
    )
    assert one == same
    assert one.context.keys() == {"embeds"}
    assert len({one.context["embeds"], other.context["embeds"], ""}) == 3
    assert broken.context == {"embeds": ""}
