"""Engines of both kinds on both sides, random pairs of them and requests that end early, for some minutes."""

import os
import random
import secrets
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass

from tests.mixed.harness.engines import Names, SglangEngine, VllmEngine, Wanted
from tests.mixed.harness.pair import MAX_TOKENS, ROOM_BITS, Pair
from tests.sglang.harness.model import model_of
from tests.vllm.harness.pair import prompt_of
from tests.vllm.harness.report import NoAnswerError

DURATION_S = float(os.environ.get("KVC_SOAK_S", "60"))
KINDS = {"vllm": (VllmEngine, {"block_size": 64}), "sglang": (SglangEngine, {"page-size": 16})}
SIDES = ("prefill", "decode")
LENGTHS = (7, 16, 33, 64, 79, 130, 200, 257, 333, 500)
CLEAR = 0.02
"""The least gap of log probabilities in the answers to prompts that are used: other steps round differently."""
AT_ONCE = 4
FATES = {
    "answered": 12,
    "asked late": 3,  # the decode engine, up to a second after the prefill engine
    "cancelled at decode": 2,
    "cancelled at prefill": 2,
    "cancelled at both": 2,
    "prefill alone": 1,  # the router is lost
    "decode alone": 1,
}
"""What becomes of a request, and how often."""
LATE_S = 1.0


@dataclass
class Sent:
    """A request: the two engines, their own requests, of which either may be None, and what becomes of it."""

    what: str
    fate: str
    engines: dict
    expected: list
    asked: dict

    @property
    def cancelled(self):
        """Return the sides at which it is cancelled."""
        if self.fate == "cancelled at both":
            return SIDES
        return (self.fate.rpartition(" ")[2],) if self.fate.startswith("cancelled") else ()


def soak(environment):
    """Return a case's function."""

    def run(folder, outcome, host):
        model = str(model_of(folder.parent / "models"))  # made already, in a process of its own
        with ExitStack() as stack:
            engines = {}
            for side in SIDES:
                for kind, (make, options) in KINDS.items():
                    own = folder / f"{side}-{kind}"
                    own.mkdir()
                    engine = make_engine(make, host, Wanted(side, model, own, options, environment))
                    stack.callback(engine.stop)
                    engines[side, kind] = engine
            for engine in engines.values():
                engine.wait_until_ready()
            prompts = clear_prompts(engines["decode", "vllm"], host, model, folder)
            drawn = random.Random(0)
            ends_s, found = time.monotonic() + DURATION_S, Counter()
            while time.monotonic() < ends_s and not outcome.complaints:
                sent = [send(engines, drawn, *drawn.choice(prompts)) for _ in range(AT_ONCE)]
                for each in sent:
                    finish(each, outcome, found)
            for (side, kind), engine in engines.items():
                if held := engine.check_idle():
                    outcome.complaints.append(f"{side} {kind}: {held}")
            outcome.figures |= found

    return run


def make_engine(make, host, wanted):
    return make(host, wanted) if make is SglangEngine else make(wanted)


def clear_prompts(vllm, host, model, folder):
    """Return prompts and their tokens, of which both kinds of engine are sure."""
    alone = SglangEngine(host, Wanted("alone", model, folder))
    try:
        alone.wait_until_ready()
        found = []
        for length in LENGTHS:
            for seed in range(40):
                prompt = prompt_of(length, seed)
                answer = vllm.ask(prompt, max_tokens=MAX_TOKENS, logprobs=2)
                is_clear = answer.least_gap > CLEAR
                if is_clear and alone.ask(prompt, max_tokens=MAX_TOKENS).tokens == answer.tokens:
                    found.append((prompt, answer.tokens))
                    break
        vllm.forget()
        return found
    finally:
        alone.kill()


def send(engines, drawn, prompt, expected):
    """Ask a random pair of engines, and cancel the request if that is its fate."""
    fate = drawn.choices([*FATES], FATES.values())[0]
    kinds = {side: drawn.choice([*KINDS]) for side in SIDES}
    chosen = {side: engines[side, kind] for side, kind in kinds.items()}
    what = f"{len(prompt)} tokens, {'-'.join(kinds.values())}, {fate}"
    names = Names(secrets.randbits(ROOM_BITS) + 1)
    sent = Sent(what, fate, chosen, expected, dict.fromkeys(SIDES))
    if fate != "decode alone":
        sent.asked["prefill"] = chosen["prefill"].begin_prefill(prompt, names)
    if fate == "asked late":
        time.sleep(drawn.uniform(0.0, LATE_S))
    if fate != "prefill alone":
        options = {"max_tokens": MAX_TOKENS}
        sent.asked["decode"] = chosen["decode"].begin_decode(
            prompt, names, chosen["prefill"], **options
        )
    if sent.cancelled:
        time.sleep(drawn.choice((0.0, 0.01, 0.05, 0.2)))
        for side in sent.cancelled:
            chosen[side].cancel(sent.asked[side])
    return sent


def finish(sent, outcome, found):
    """Wait for the answers of a request and judge them: no answer may have wrong tokens."""
    answers = {}
    for side, asked in sent.asked.items():
        if asked is not None and not sent.engines[side].is_without_answer(asked):
            try:
                answers[side] = sent.engines[side].result(asked)
            except NoAnswerError as error:
                outcome.complaints.append(f"{sent.what}: {side}: {error}")
    found[sent.fate] += 1
    prefill, answer = answers.get("prefill"), answers.get("decode")
    if prefill is not None and Pair.refuses(prefill):
        outcome.check(f"{sent.what}: prefill: {getattr(prefill, 'error', '')}", may_fail(sent))
    if answer is None:
        return
    if Pair.refuses(answer):
        found[f"{sent.fate}: failed"] += 1
        outcome.check(f"{sent.what}: {getattr(answer, 'error', answer.reason)}", may_fail(sent))
        return
    if "decode" in sent.cancelled:  # it may have ended before its last token
        outcome.check(sent.what, answer.tokens, sent.expected[: len(answer.tokens)])
        return
    outcome.compare(sent.what, answer, sent.expected)


def may_fail(sent):
    return bool(sent.cancelled) or sent.fate.endswith("alone")
