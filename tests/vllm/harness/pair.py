"""A prefill and a decode engine, and what a router does between them."""

import random
import time
from dataclasses import replace
from functools import cached_property

from tests.vllm.harness.digests import Wanted, difference, merged
from tests.vllm.harness.engine import Engine
from tests.vllm.harness.model import VOCAB_SIZE

ANSWER_TIMEOUT_S = 60.0
QUIET_TIMEOUT_S = 45.0
POLL_S = 0.01
CONTROL_TOKENS = 600
MAX_TOKENS = 16
ADDRESS_KEYS = ("remote_engine_id", "remote_host", "remote_port")
REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class NoAnswerError(Exception):
    """An engine did not answer in time, or is gone."""


def prompt_of(num_tokens, seed=0):
    """Random token ids, the same for the same arguments."""
    source = random.Random(f"{num_tokens}-{seed}")
    return [source.randrange(1, VOCAB_SIZE) for _ in range(num_tokens)]


class Asker:
    """Requests to one engine, and their answers in whatever order they come."""

    def __init__(self, engine):
        self.engine = engine
        self._answers = {}
        self._count = 0

    def submit(self, prompt, params=None, max_tokens=MAX_TOKENS, logprobs=None):
        """Queue a request; its id."""
        self._count += 1
        request_id = f"request-{self._count}"
        self.engine.send("submit", request_id, prompt, max_tokens, params, logprobs)
        return request_id

    def answer(self, request_id, timeout_s=ANSWER_TIMEOUT_S):
        """Wait for a request's end."""
        deadline = time.monotonic() + timeout_s
        while request_id not in self._answers:
            self.event(deadline - time.monotonic(), f"{request_id}'s answer")
        return self._answers.pop(request_id)

    def ask(self, *arguments, **options):
        """`submit` and `answer`."""
        return self.answer(self.submit(*arguments, **options))

    def call(self, command, reply, *arguments):
        """A command that is answered by an event."""
        self.engine.send(command, *arguments)
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while True:
            kind, value = self.event(deadline - time.monotonic(), reply)
            if kind == reply:
                return value

    def forget(self):
        """Empty the engine's prefix cache, once the blocks of its last request are free."""
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while not self.call("reset_cache", "reset"):
            if time.monotonic() > deadline:
                raise NoAnswerError("an engine's prefix cache cannot be emptied")
            time.sleep(POLL_S)

    def event(self, timeout_s, awaited):
        """The next event of a living engine."""
        kind, value = self.engine.receive(max(0.0, timeout_s))
        if kind in {"gone", "failed"}:
            raise NoAnswerError(f"the engine is gone: {str(value).strip().splitlines()[-1:]}")
        if kind == "nothing":
            raise NoAnswerError(f"no {awaited} in time")
        if kind == "finished":
            request_id, answer = value
            self._answers[request_id] = answer
        return kind, value


class Pair:
    """Both engines, from `start` to `stop`."""

    def __init__(self, prefill, decode, candidates=1):
        self.specs = (prefill, decode)
        self._candidates = candidates
        self.prefill = Asker(Engine(prefill))
        try:
            self.decode = Asker(Engine(decode))
        except BaseException:
            self.prefill.engine.kill()
            raise
        self._transfers = 0

    def __enter__(self):
        try:
            for asker in (self.prefill, self.decode):
                asker.engine.wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind, error, trace):
        self.stop()

    def stop(self):
        """End both."""
        for asker in (self.prefill, self.decode):
            asker.engine.stop()

    def restart_prefill(self):
        """Kill the prefill engine, and start one with the same name and port."""
        self.prefill.engine.kill()
        self.prefill = Asker(Engine(replace(self.specs[0])))
        self.prefill.engine.wait_until_ready()

    def alone(self, prompt):
        """What the decode engine answers without a prefill engine. Its prefix cache is empty afterwards."""
        tokens = self.decode.ask(prompt).tokens
        self.decode.forget()
        return tokens

    def differs_alone(self, prompt, expected):
        """How vLLM itself gives other tokens than the decode engine alone, without a transfer; "" if it does not."""
        self.prefill.forget()
        if self.prefill.ask(prompt, max_tokens=1).tokens != expected[:1]:
            return "the prefill engine's own first token is another one"
        if self._differs_from_own_cache:
            return "from its own prefix cache the decode engine gives other tokens"
        return ""

    @cached_property
    def _differs_from_own_cache(self):
        """Whether the decode engine does so, with one token of a prompt to compute, as behind a transfer."""
        decode = self.specs[1]
        block = decode.block_size * decode.arguments.get("decode_context_parallel_size", 1)
        prompt = self.clear_prompt(CONTROL_TOKENS // block * block + 1)
        expected = self.alone(prompt)
        self.decode.ask(prompt, max_tokens=1)
        again = self.decode.ask(prompt)
        self.decode.forget()
        return again.cached_tokens > 0 and again.tokens != expected

    def clear_prompt(self, length, seed=0):
        """Of several prompts the one whose likeliest tokens are furthest apart, so that rounding decides nothing."""
        if self._candidates == 1:
            return prompt_of(length, seed)
        prompts = [prompt_of(length, 1000 * seed + each) for each in range(self._candidates)]
        requests = [self.decode.submit(prompt, logprobs=2) for prompt in prompts]
        gaps = [self.decode.answer(request).least_gap for request in requests]
        self.decode.forget()
        return prompts[gaps.index(max(gaps))]

    def prefilled(self, prompt):
        """The parameters that the prefill engine answers with."""
        answer = self.prefill.ask(prompt, dict(REMOTE_DECODE), max_tokens=1)
        if not answer.params:
            raise NoAnswerError(f"the prefill engine gave no parameters ({answer.reason})")
        return answer.params

    def disaggregated(self, prompt):
        """Prefill there, decode here."""
        return self.decode.ask(prompt, self.prefilled(prompt))

    def compared(self, prompt, cached=0):
        """`disaggregated`, and how the caches differ behind `cached` tokens that the decode engine had; "" if not."""
        prefill = self.prefill.ask(prompt, dict(REMOTE_DECODE), max_tokens=1)
        return self._compared(prompt, prefill, self.decode.submit(prompt, prefill.params), cached)

    def _compared(self, prompt, prefill, decode, cached=0):
        end = len(prompt) - 1  # the last token is for the decode engine
        expected = _digests(self.prefill, Wanted(prefill.block_ids, cached, end))
        answer = self.decode.answer(decode)
        found = _digests(self.decode, Wanted(answer.block_ids, cached, end))
        return answer, difference(expected, found) if cached < end else ""

    def begin_streamed(self, prompt, address):
        """Ask both engines at once, as a router does that knows the prefill engine by an earlier offer: the names of
        both requests.
        """
        self._transfers += 1
        names = {"transfer_id": f"stream-{self._transfers}", "transfer_secret": "5" * 32}
        theirs = {"do_remote_prefill": True, **{key: address[key] for key in ADDRESS_KEYS}, **names}
        decode = self.decode.submit(prompt, theirs)
        return self.prefill.submit(prompt, {**REMOTE_DECODE, **names}, max_tokens=1), decode

    def streamed(self, prompt, address):
        """`compared`, where both engines are asked at once."""
        prefill, decode = self.begin_streamed(prompt, address)
        return self._compared(prompt, self.prefill.answer(prefill), decode)

    def report(self, asker):
        """The state of an engine."""
        return asker.call("report", "report")

    def leftovers(self, *names):
        """What these engines, or both, still hold when nothing is asked of them, after waiting for it to go."""
        found = []
        for name in names or ("prefill", "decode"):
            asker = getattr(self, name)
            deadline = time.monotonic() + QUIET_TIMEOUT_S
            while (report := self.report(asker))["requests"] and time.monotonic() < deadline:
                time.sleep(0.05)
            if report["requests"]:
                found.append(f"{name} still holds {len(report['requests'])} requests")
            used = report["total_blocks"] - 1 - report["free_blocks"]
            if used:
                found.append(f"{name} leaks {used} blocks")
        return found


def _digests(asker, wanted):
    return merged(asker.call("digest", "digests", wanted))
