"""Requests to pairs of engines that live side by side, and take turns with the same prompts."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from tests.vllm.bench.server import Ask
from tests.vllm.harness.pair import REMOTE_DECODE, Answer, Asker, NoAnswerError

ANSWER_TOKENS = 8
CHURN_REQUESTS = 32
CANDIDATES = 32


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is asked. `churn_tokens` run through every pool first, so that free blocks lie scattered."""

    lengths: Sequence[int]
    repetitions: int
    warm_up: int
    bursts: int
    burst_requests: int
    burst_tokens: int
    churn_tokens: int
    churn_longest: int
    vocabulary: int


@dataclass
class Size:
    """Requests of one length, times in seconds.

    `first_s`: the decode engine's first tokens. `best_s`: the same requests once more, when it has everything in its
    prefix cache. `right`: requests whose first token is the prefill engine's own.
    """

    transfer_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    best_s: list[float] = field(default_factory=list)
    right: int = 0


@dataclass
class Found:
    """Of one connector. Each burst is the first tokens' times, in order; `best_bursts` is from the prefix cache."""

    first_contact_s: float = 0.0
    sizes: dict[int, Size] = field(default_factory=dict)
    bursts: list[list[float]] = field(default_factory=list)
    best_bursts: list[list[float]] = field(default_factory=list)
    error: str = ""


@dataclass(frozen=True)
class Engines:
    """A pair."""

    prefill: Asker
    decode: Asker

    def prefilled(self, prompts: Sequence[list[int]]) -> list[Answer]:
        """The prefill engine's answers."""
        return _told(self.prefill, [Ask(prompt, 1, dict(REMOTE_DECODE)) for prompt in prompts])

    def decoded(self, prompts: Sequence[list[int]], offers: Sequence[Answer] = ()) -> list[Answer]:
        """The decode engine's, with offers or without."""
        params = [offer.params for offer in offers] or [None] * len(prompts)
        asks = [Ask(p, ANSWER_TOKENS, o) for p, o in zip(prompts, params, strict=True)]
        return _told(self.decode, asks)

    def transfer_s(self) -> list[float]:
        """Of the loads since the last call."""
        found: list[float] = self.decode.call("stats", "stats")
        return found


def _told(asker: Asker, asks: list[Ask]) -> list[Answer]:
    answers: list[Answer] = asker.call("ask", "told", asks)
    for answer in answers:
        if answer.reason != "length":
            raise NoAnswerError(f"a request ended with {answer.reason}")
    return answers


class Turns:
    """Every pair does each thing in its turn; one that fails is left out. `keep` gets what is found so far."""

    def __init__(
        self,
        pairs: Mapping[str, Engines],
        plan: Plan,
        say: Callable[[str], None],
        keep: Callable[[dict[str, Found]], None],
    ) -> None:
        self._pairs = pairs
        self._plan = plan
        self._say = say
        self._keep = keep
        self._source = random.Random(7)
        self._turn = 0
        self.found = {name: Found() for name in pairs}

    def run(self) -> dict[str, Found]:
        """Everything in the plan."""
        plan = self._plan
        if plan.churn_tokens:
            self._each(self._churn)
        prompt = self._prompt(plan.lengths[0])
        self._each(partial(_first_contact, prompt))
        for length in plan.lengths:
            self._length(length)
        for _ in range(plan.bursts):
            prompts = [self._prompt(plan.burst_tokens) for _ in range(plan.burst_requests)]
            self._each(partial(_burst, prompts))
            self._keep(self.found)
        return self.found

    def _length(self, length: int) -> None:
        for number in range(self._plan.warm_up + self._plan.repetitions):
            prompt = self._clear_prompt(length)
            if number == self._plan.warm_up:  # what was before does not count
                self._each(partial(_restart, length))
            self._each(partial(_request, prompt))
        self._each(partial(_keep_transfers, length))
        self._say(f"{length} tokens: done")
        self._keep(self.found)

    def _each(self, do: Callable[[Engines, Found], None]) -> None:
        self._turn += 1
        names = [name for name in self._pairs if not self.found[name].error]
        for name in names if self._turn % 2 else reversed(names):
            try:
                do(self._pairs[name], self.found[name])
            except NoAnswerError as error:
                self.found[name].error = str(error)
                self._say(f"{name}: {error}")

    def _clear_prompt(self, length: int) -> list[int]:
        """Of prompts that differ in their last token the one whose two likeliest next tokens are furthest apart, by the
        first prefill engine that answers: so rounding does not decide the first token.
        """
        head = self._prompt(length - 1)
        prompts = [head + self._prompt(1) for _ in range(CANDIDATES)]
        gaps: list[float] = []

        def ask(pair: Engines, _found: Found) -> None:
            if not gaps:
                _told(pair.prefill, [Ask(head, 1)])  # all of them have it from the prefix cache
                asks = [Ask(prompt, 1, logprobs=2) for prompt in prompts]
                gaps.extend(answer.least_gap for answer in _told(pair.prefill, asks))

        self._each(ask)
        return max(zip(gaps, prompts, strict=True))[1] if gaps else prompts[0]

    def _prompt(self, length: int) -> list[int]:
        return [self._source.randrange(4, self._plan.vocabulary) for _ in range(length)]

    def _churn(self, pair: Engines, _found: Found) -> None:
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


def _first_contact(prompt: list[int], pair: Engines, found: Found) -> None:
    offers = pair.prefilled([prompt])
    found.first_contact_s = pair.decoded([prompt], offers)[0].first_token_s


def _restart(length: int, pair: Engines, found: Found) -> None:
    found.sizes[length] = Size()
    pair.transfer_s()


def _request(prompt: list[int], pair: Engines, found: Found) -> None:
    (offer,) = offers = pair.prefilled([prompt])
    (answer,) = pair.decoded([prompt], offers)
    (again,) = pair.decoded([prompt])
    size = found.sizes.setdefault(len(prompt), Size())
    size.first_s.append(answer.first_token_s)
    size.best_s.append(again.first_token_s)
    size.right += answer.tokens[0] == offer.tokens[0]


def _keep_transfers(length: int, pair: Engines, found: Found) -> None:
    found.sizes[length].transfer_s = pair.transfer_s()


def _burst(prompts: list[list[int]], pair: Engines, found: Found) -> None:
    offers = pair.prefilled(prompts)
    found.bursts.append(sorted(answer.first_token_s for answer in pair.decoded(prompts, offers)))
    found.best_bursts.append(sorted(answer.first_token_s for answer in pair.decoded(prompts)))
