"""Requests to pairs of engines that live side by side, and take turns with the same prompts."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from secrets import token_hex

from tests.vllm.bench.server import Ask, Told
from tests.vllm.harness.pair import (
    ADDRESS_KEYS,
    ANSWER_TIMEOUT_S,
    REMOTE_DECODE,
    Asker,
    NoAnswerError,
)

ANSWER_TOKENS = 8
CHURN_REQUESTS = 32
WARM_UP = 2
CANDIDATES = 32


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is asked. `step_tokens`: the engines' `max_num_batched_tokens`. `churn_tokens` run through every pool first,
    so that free blocks lie scattered.
    """

    lengths: Sequence[int]
    step_tokens: int
    repetitions: int = 25
    bursts: int = 3
    burst_requests: int
    burst_tokens: int
    churn_tokens: int
    churn_longest: int
    vocabulary: int


@dataclass
class Size:
    """Requests of one length, times in seconds.

    `first_s`: from the prefill engine's answer to the decode engine's first token. `best_s`: the decode engine's first
    tokens to the same requests once more, when it has everything in its prefix cache. `right`: requests whose first
    token is the prefill engine's own.
    """

    transfer_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    best_s: list[float] = field(default_factory=list)
    right: int = 0


@dataclass
class Found:
    """Of one contender. Each burst is the first tokens' times, in order; `best_bursts` is from the prefix cache."""

    first_contact_s: list[float] = field(default_factory=list)
    sizes: dict[int, Size] = field(default_factory=dict)
    bursts: list[list[float]] = field(default_factory=list)
    best_bursts: list[list[float]] = field(default_factory=list)
    error: str = ""


Handover = tuple[list[Told], list[Told], list[float]]
"""Both engines' answers, and the seconds from the prefill engine's last one to each first token of the other."""


@dataclass(frozen=True)
class Engines:
    """A pair that is asked one after the other. `address`: how a decode engine finds the prefill engine."""

    prefill: Asker
    decode: Asker
    address: dict[str, object] = field(default_factory=dict)

    def handed_over(self, prompts):
        """Prefill there; with all answers, decode here."""
        asks = [Ask(prompt, 1, dict(REMOTE_DECODE)) for prompt in prompts]
        offers = _told(self.prefill, asks)
        self.address.update({key: (offers[0].params or {})[key] for key in ADDRESS_KEYS})
        answers = self.decoded(prompts, [offer.params for offer in offers])
        return offers, answers, [answer.first_token_s for answer in answers]

    def decoded(self, prompts, params=()):
        """The decode engine's answers, with parameters or from its own prefix cache."""
        asks = map(Ask, prompts, repeat(ANSWER_TOKENS), params or repeat(None))
        return _told(self.decode, list(asks))

    def forget(self):
        """Empty both prefix caches."""
        self.prefill.forget()
        self.decode.forget()

    def transfer_s(self):
        """Of the loads since the last call."""
        return self.decode.call("stats", "stats")


class Streamed(Engines):
    """A pair whose engines are asked at once, as by a router that knows the prefill engine by an earlier answer."""

    def handed_over(self, prompts):
        """The time begins where the other way's does: when the prefill engine has answered."""
        prefills, decodes = [], []
        for prompt in prompts:
            names = {"transfer_id": token_hex(8), "transfer_secret": token_hex(16)}
            prefills.append(Ask(prompt, 1, REMOTE_DECODE | names))
            params = {"do_remote_prefill": True, **self.address, **names}
            decodes.append(Ask(prompt, ANSWER_TOKENS, params))
        self.prefill.engine.send("ask", prefills)
        answers = self.decode.call("ask", "told", decodes)
        offers = self.prefill.event(ANSWER_TIMEOUT_S, "answer")[1]
        _good(offers + answers)
        answered = max(offer.first for offer in offers)
        return offers, answers, [answer.first - answered for answer in answers]


def _told(asker, asks):
    return _good(asker.call("ask", "told", asks))


def _good(answers):
    for answer in answers:
        if answer.reason != "length":
            raise NoAnswerError(f"a request ended with {answer.reason}")
    return answers


class Turns:
    """Every pair does each thing in its turn; one that fails is left out. `keep` gets what is found so far."""

    def __init__(self, contenders, plan, say, keep):
        self._contenders = contenders
        self._plan = plan
        self._say = say
        self._keep = keep
        self._source = random.Random(7)
        self._turn = 0
        self.found = {name: Found() for name in contenders}

    def run(self):
        """Everything in the plan."""
        plan = self._plan
        pairs = [name for name, each in self._contenders.items() if not isinstance(each, Streamed)]
        if plan.churn_tokens:
            self._each(self._churn, pairs)
        prompt = self._prompt(plan.lengths[0])
        self._each(partial(_first_contact, prompt), pairs)
        for length in plan.lengths:
            self._length(length)
        for _ in range(plan.bursts):
            prompts = [self._prompt(plan.burst_tokens) for _ in range(plan.burst_requests)]
            self._each(partial(_burst, prompts))
            self._keep(self.found)
        return self.found

    def _length(self, length):
        for number in range(WARM_UP + self._plan.repetitions):
            prompt = self._clear_prompt(length)
            if number in (0, WARM_UP):  # what was before does not count
                for found in self.found.values():
                    found.sizes[length] = Size()
            self._each(partial(_request, prompt))
        self._say(f"{length} tokens: done")
        self._keep(self.found)

    def _each(self, do, among=None):
        self._turn += 1
        names = [name for name in among or self.found if not self.found[name].error]
        for name in names if self._turn % 2 else reversed(names):
            try:
                do(self._contenders[name], self.found[name])
            except NoAnswerError as error:
                self.found[name].error = str(error)
                self._say(f"{name}: {error}")

    def _clear_prompt(self, length):
        """Of prompts that differ in their last token the one whose two likeliest next tokens are furthest apart, by the
        first prefill engine that answers: so rounding does not decide the first token.
        """
        head = self._prompt(length - 1)
        prompts = [head + self._prompt(1) for _ in range(CANDIDATES)]
        gaps = []

        def ask(pair, _found):
            if not gaps:
                _told(pair.prefill, [Ask(head, 1)])  # all of them have it from the prefix cache
                asks = [Ask(prompt, 1, logprobs=2) for prompt in prompts]
                gaps.extend(answer.least_gap for answer in _told(pair.prefill, asks))

        self._each(ask)
        return max(zip(gaps, prompts, strict=True))[1] if gaps else prompts[0]

    def _prompt(self, length):
        return [self._source.randrange(4, self._plan.vocabulary) for _ in range(length)]

    def _churn(self, pair, _found):
        source = random.Random(3)
        left = self._plan.churn_tokens
        while left > 0:
            asks = []
            for _ in range(CHURN_REQUESTS):
                length = source.randrange(self._plan.churn_longest // 20, self._plan.churn_longest)
                prompt = [source.randrange(4, self._plan.vocabulary) for _ in range(length)]
                asks.append(Ask(prompt, source.randrange(2, 24)))
                left -= length
            for asker in (pair.prefill, pair.decode):
                _told(asker, asks)


def _first_contact(prompt, pair, found):
    found.first_contact_s = pair.handed_over([prompt])[2]


def _request(prompt, pair, found):
    pair.forget()
    (offer,), (answer,), first_s = pair.handed_over([prompt])
    (again,) = pair.decoded([prompt])
    size = found.sizes[len(prompt)]
    size.first_s += first_s
    size.best_s.append(again.first_token_s)
    size.right += answer.tokens[0] == offer.tokens[0]
    size.transfer_s += pair.transfer_s()  # it came with a step's output, long before the last


def _burst(prompts, pair, found):
    pair.forget()
    found.bursts.append(sorted(pair.handed_over(prompts)[2]))
    found.best_bursts.append(sorted(answer.first_token_s for answer in pair.decoded(prompts)))
