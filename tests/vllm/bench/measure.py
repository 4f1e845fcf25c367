"""Requests to pairs of engines that run side by side and take turns with the same prompts."""

import random
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from tests.vllm.bench.report import BEST, FIRST, RIGHT, SECOND
from tests.vllm.harness.model import VOCAB_SIZE
from tests.vllm.harness.pair import Pair
from tests.vllm.harness.report import NoAnswerError

BURSTS = 3
CHURN_REQUESTS = 32
CHURN_TOKENS = range(45, 900)
WARM_UP = 2
SLEEPS = 3


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The requests of a run. `step_tokens`: the engines' `max_num_batched_tokens`. `churn_tokens` run through every
    pool first, so that free blocks are scattered. A prompt is chosen of `candidates`. Without `burst_requests` no
    requests come at once. `is_told`: the prefill engine's token is the prompt's next one, as the decode engine's. With
    windows it is the one before, since the prefill engine leaves the last token to the decode engine.
    """

    lengths: list[int]
    step_tokens: int
    repetitions: int = 25
    burst_requests: int
    burst_tokens: int
    churn_tokens: int
    answer_tokens: int = 8
    candidates: int = 32
    is_told: bool = True


class Asked(NamedTuple):
    """A case: `prompts` requests at once, each of `tokens` tokens."""

    title: str
    prompts: int
    tokens: int


@dataclass(frozen=True)
class Contender:
    """A pair whose engines are asked one after the other or, streamed, at once. `in_tier`: the share of a prompt that
    the decode engine's tier has; None without a tier. `can_sleep`: the engines are in sleep mode.
    """

    pair: Pair
    answer_tokens: int
    is_streamed: bool = False
    in_tier: float | None = None
    is_told: bool = True
    can_sleep: bool = False

    def handed_over(self, prompts):
        """Prefill and decode prompts. Returns both engines' answers, and the seconds to each first token, from the
        prefill engine's last answer or, if not streamed, from the request to the decode engine.
        """
        pair = self.pair
        if self.is_streamed:
            asked = [
                pair.begin_streamed(prompt, max_tokens=self.answer_tokens) for prompt in prompts
            ]
            answers = [_good(pair.decode.answer(decode)) for _, decode in asked]
            offers = [_good(pair.prefill.answer(prefill)) for prefill, _ in asked]
            answered = max(offer.first for offer in offers)
            return offers, answers, [answer.first - answered for answer in answers]
        requests = [pair.begin_prefill(prompt) for prompt in prompts]
        offers = [_good(pair.offered(request)) for request in requests]
        answers = self.decoded(prompts, [offer.params for offer in offers])
        return offers, answers, [answer.first_token_s for answer in answers]

    def decoded(self, prompts, params=None):
        params = params or [None] * len(prompts)
        return _all(self.pair.decode, zip(prompts, params, strict=True), self.answer_tokens)

    def forget(self, prompts):
        """Empty every cache, except for the tokens that the decode engine's tier should have."""
        for engine in (self.pair.prefill, self.pair.decode):
            engine.forget(has_tier=self.in_tier is not None)
        heads = [prompt[: round(len(prompt) * self.in_tier)] for prompt in prompts if self.in_tier]
        if heads:
            _all(self.pair.decode, [(head, None) for head in heads], 1)
            self.pair.decode.forget()


def _all(engine, asks, *options, **more):
    requests = [engine.submit(*ask, *options, **more) for ask in asks]
    return [_good(engine.answer(request)) for request in requests]


def _good(answer):
    if answer.reason != "length":
        raise NoAnswerError(f"a request ended with {answer.reason}")
    return answer


class Turns:
    """Every contender runs each case in its turn; one that fails is left out, with the reason in `errors`. `keep` is
    called after each case.

    `samples` are by case, contender and figure: seconds, or for `RIGHT` True if a request's first token was the prefill
    engine's own.
    """

    def __init__(self, contenders, plan, say, keep):
        self._contenders = contenders
        self._plan = plan
        self._say = say
        self._keep = keep
        self._source = random.Random(7)
        self._turn = 0
        self.errors = {}
        self.samples = defaultdict(lambda: {name: defaultdict(list) for name in contenders})

    def run(self):
        plan = self._plan
        # the first contender of each pair
        pairs = {each.pair: name for name, each in reversed(self._contenders.items())}.values()
        self._each(lambda contender: contender.pair.wait_until_ready(), pairs)
        self._say("the engines are ready")
        self._each(self._churn, pairs)
        least, prompt = plan.lengths[0], self._prompt(plan.lengths[0])
        contact = Asked(f"first contact, {least} tokens", 1, least)
        self._each(partial(_first_contact, prompt), pairs, contact)
        for length in plan.lengths:
            case = Asked(f"{length} tokens", 1, length)
            for number in range(WARM_UP + plan.repetitions):
                prompt = self._clear_prompt(length)
                if number == WARM_UP:  # the warm-up does not count
                    del self.samples[case]
                self._each(partial(_request, prompt), case=case)
            self._keep(self)
        if plan.burst_requests:
            self._bursts(plan)
        if any(each.can_sleep for each in self._contenders.values()):
            self._sleeps(plan.lengths[0])

    def _bursts(self, plan):
        title = f"{plan.burst_requests} x {plan.burst_tokens} tokens at once, the last one's"
        burst = Asked(title, plan.burst_requests, plan.burst_tokens)
        for _ in range(BURSTS):
            prompts = [self._prompt(plan.burst_tokens) for _ in range(plan.burst_requests)]
            self._each(partial(_burst, prompts), case=burst)
        self._keep(self)

    def _sleeps(self, length):
        """Ask all contenders for a prompt right after those that can sleep have slept, each engine once."""
        sleepers = [name for name, each in self._contenders.items() if each.can_sleep]
        case = Asked(f"{length} tokens, the first ones after each engine has slept", 1, length)
        for _ in range(SLEEPS):
            prompt = self._clear_prompt(length)
            self._each(_sleep, sleepers)
            self._each(partial(_request, prompt), case=case)
        self._keep(self)

    def _each(self, do, among=None, case=None):
        if case:  # those that are timed begin in turns, whatever else is asked between them
            self._turn += 1
        names = [name for name in among or self._contenders if name not in self.errors]
        for name in names if self._turn % 2 else reversed(names):
            try:
                found = do(self._contenders[name]) or {}
            except (NoAnswerError, OSError) as error:  # OSError: the engine is gone
                self.errors[name] = str(error)
                self._say(f"{name}: {error}")
            else:
                for what, samples in found.items():
                    self.samples[case][name][what] += samples

    def _clear_prompt(self, length):
        """Choose among prompts that differ in their last token the one whose two likeliest next tokens are furthest
        apart, by the first prefill engine that answers, so that rounding does not decide the first token.
        """
        head = self._prompt(length - 1)
        prompts = [head + self._prompt(1) for _ in range(self._plan.candidates)]
        if len(prompts) == 1:
            return prompts[0]
        gaps = []

        def ask(contender):
            if not gaps:
                engine = contender.pair.prefill
                _all(engine, [(head, None)], 1)  # for the prefix cache
                answers = _all(engine, [(prompt, None) for prompt in prompts], 1, logprobs=2)
                gaps.extend(answer.least_gap for answer in answers)

        self._each(ask)
        return max(zip(gaps, prompts, strict=True))[1] if gaps else prompts[0]

    def _prompt(self, length, source=None):
        source = source or self._source
        return [source.randrange(1, VOCAB_SIZE) for _ in range(length)]

    def _churn(self, contender):
        source = random.Random(3)
        left = self._plan.churn_tokens
        while left > 0:
            asks = []
            for _ in range(CHURN_REQUESTS):
                length = source.choice(CHURN_TOKENS)
                asks.append((self._prompt(length, source), None, source.randrange(2, 24)))
                left -= length
            for engine in (contender.pair.prefill, contender.pair.decode):
                _all(engine, asks)


def _first_contact(prompt, contender):
    return {FIRST: contender.handed_over([prompt])[2]}


def _request(prompt, contender):
    contender.forget([prompt])
    (offer,), (answer,), first_s = contender.handed_over([prompt])
    (again,) = contender.decoded([prompt])
    return {
        FIRST: first_s,
        SECOND: [first_s[0] + answer.second - answer.first],
        BEST: [again.first_token_s],
        RIGHT: [answer.tokens[0] == offer.tokens[0]] if contender.is_told else [],
        # they came with a step's output, long before the last token
        **contender.pair.decode.call("stats"),
    }


def _burst(prompts, contender):
    contender.forget(prompts)
    first_s = max(contender.handed_over(prompts)[2])
    best_s = max(each.first_token_s for each in contender.decoded(prompts))
    contender.pair.decode.call("stats")  # so that they are not the next request's
    return {FIRST: [first_s], BEST: [best_s]}


def _sleep(contender):
    for engine in (contender.pair.prefill, contender.pair.decode):
        engine.call("sleep")
