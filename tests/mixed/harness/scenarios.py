"""The scenarios of the cases: each drives a pair of engines and adds to the outcome what went wrong."""

from tests.vllm.harness.pair import prompt_of

LENGTHS = (7, 16, 64, 79, 130, 500)
"""Prompt lengths: less than a page, pages of either engine, chunks, and parts of both."""


def tokens(pair, outcome):
    """Prompts of several lengths get the right tokens: of engines that are asked at once, and one after the other."""
    for length in LENGTHS:
        pair.compare(outcome, f"{length} tokens", prompt_of(length))
    if pair.prefill.answers_before_it_is_read:
        pair.compare(outcome, "read later", prompt_of(100, seed=1), is_late=True)
    pair.check_idle(outcome)


def mixed_up(pair, outcome):
    """A router confuses two requests: the decode engine does not answer with another prompt's cache."""
    one, other = prompt_of(90, seed=7), prompt_of(90, seed=8)
    _, answer = pair.ask(one, decoded=other)
    outcome.check("refused", pair.refuses(answer))
    outcome.check("and says why", "computed another prompt" in pair.decode.log_text())
    pair.compare(outcome, "afterwards", other)
    pair.check_idle(outcome)


def unknown_elsewhere(pair, outcome):
    """What the other kind of prefill engine does not send is refused by name, and others go on."""
    asked = pair.submit(prompt_of(30), return_logprob=True)
    outcome.check("refused", "log probabilities" in pair.decode.result(asked.decode).error)
    pair.compare(outcome, "afterwards", prompt_of(40))
