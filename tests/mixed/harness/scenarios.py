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


def crowd(pair, outcome):
    """More requests at once than an engine runs get the right tokens."""
    prompts = [prompt_of(40 + 37 * number, seed=6) for number in range(8)]
    expected = [pair.alone(prompt) for prompt in prompts]
    asked = [pair.submit(prompt) for prompt in prompts]
    for prompt, own, both in zip(prompts, expected, asked, strict=True):
        pair.judge(outcome, f"{len(prompt)} tokens", pair.results(both), own)
    pair.check_idle(outcome)


def prefix_hits(pair, outcome):
    """Either engine has a part of the prompt in its prefix cache, or both have."""
    prompt = prompt_of(200, seed=2)
    pair.compare(outcome, "first", prompt, keeps=True)
    pair.compare(outcome, "the same again", prompt, keeps=True)
    pair.compare(outcome, "longer", prompt + prompt_of(70, seed=3), keeps=True)
    pair.compare(outcome, "another tail", prompt[:100] + prompt_of(50, seed=4), keeps=True)
    pair.check_idle(outcome)


def mixed_up(pair, outcome):
    """A router confuses two requests: the decode engine does not answer with another prompt's cache."""
    one, other = prompt_of(90, seed=7), prompt_of(90, seed=8)
    _, answer = pair.ask(one, decoded=other)
    outcome.check("refused", pair.refuses(answer))
    outcome.check("and says why", "computed a different prompt" in pair.decode.log_text())
    pair.compare(outcome, "afterwards", other)
    pair.check_idle(outcome)


def unknown_elsewhere(pair, outcome):
    """What the other kind of prefill engine does not send is refused by name, and others go on."""
    asked = pair.submit(prompt_of(30), return_logprob=True)
    outcome.check("refused", "log probabilities" in pair.decode.result(asked.decode).error)
    pair.compare(outcome, "afterwards", prompt_of(40))


def lost_prefill(pair, outcome):
    """The prefill engine is lost while the decode engine waits for its prompt: the request fails in time."""
    pair.compare(outcome, "before", prompt_of(40))
    pair.prefill.pause()
    asked = pair.submit(prompt_of(400, seed=9))
    pair.prefill.kill()
    outcome.check("failed", pair.refuses(pair.decode.result(asked.decode)))
    outcome.check("idle", pair.decode.check_idle(), "")
