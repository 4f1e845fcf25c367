"""A prefill and a decode engine, with a router's part between them."""

import random
from functools import cached_property

from tests.vllm.harness.digests import difference, merged
from tests.vllm.harness.engine import Engine, run_steps
from tests.vllm.harness.model import VOCAB_SIZE
from tests.vllm.harness.report import NoAnswerError, becomes
from vllm_1p1d.router import REMOTE_DECODE

QUIET_TIMEOUT_S = 45.0
CONTROL_TOKENS = 600
MTP_LAYER = "model.layers.4.self_attn.attn"
"""The layer of the model of the kind "mtp" that drafts, after its own layers."""
ADDRESS_KEYS = ("remote_engine_id", "remote_host", "remote_port")


def prompt_of(num_tokens, seed=0):
    source = random.Random(f"{num_tokens}-{seed}")
    return [source.randrange(1, VOCAB_SIZE) for _ in range(num_tokens)]


class Pair:
    """Both engines, until `close`. `address`: the prefill engine's, as a router knows it from an offer."""

    def __init__(self, prefill, decode, candidates=1, run=run_steps):
        self.specs = (prefill, decode)
        self._candidates = candidates
        self.prefill, self.decode = (Engine(spec, run) for spec in self.specs)
        self.address = {}
        # tokens in the decode engine's tier, and their digests by layer and head
        self._tier = [], {}
        self._transfers = 0

    def wait_until_ready(self):
        self.prefill.wait_until_ready()
        self.decode.wait_until_ready()

    def close(self):
        self.prefill.stop()
        self.decode.stop()

    def restart_prefill(self):
        """Kill the prefill engine, and start one with the same name and port."""
        self.prefill.kill()
        self.prefill = Engine(self.specs[0], run_steps)
        self.prefill.wait_until_ready()

    @property
    def _drafts(self):
        """The name of the model's own layer that drafts, if only one engine drafts with it; else ""."""
        drafts = [spec.arguments.get("speculative_config", {}) for spec in self.specs]
        methods = {each.get("method") for each in drafts}
        return MTP_LAYER if methods == {"mtp", None} else ""

    def alone(self, prompt):
        """Ask only the decode engine, and empty its prefix cache. Returns the tokens."""
        tokens = self.decode.ask(prompt).tokens
        self.decode.forget()
        return tokens

    def differs_alone(self, prompt, expected):
        """Describe how vLLM itself, without a transfer, gives tokens other than `expected`; "" if it does not."""
        self.prefill.forget()
        if self.prefill.ask(prompt, max_tokens=1).tokens != expected[:1]:
            return "the prefill engine's own first token is another one"
        if self._differs_from_own_cache:
            return "from its own prefix cache the decode engine gives other tokens"
        return ""

    @cached_property
    def _differs_from_own_cache(self):
        """Returns True if the decode engine does so when it computes only the last token, as after a transfer."""
        decode = self.specs[1]
        block = decode.block_size * decode.arguments.get("decode_context_parallel_size", 1)
        prompt = self.clear_prompt(CONTROL_TOKENS // block * block + 1)
        expected = self.alone(prompt)
        self.decode.ask(prompt, max_tokens=1)
        again = self.decode.ask(prompt)
        self.decode.forget()
        return again.cached_tokens > 0 and again.tokens != expected

    def clear_prompt(self, length, seed=0, candidates=1):
        """Choose the prompt whose two likeliest tokens are furthest apart, so that rounding decides nothing."""
        candidates = max(candidates, self._candidates)
        if candidates == 1:
            return prompt_of(length, seed)
        prompts = [prompt_of(length, 1000 * seed + each) for each in range(candidates)]
        requests = [self.decode.submit(prompt, logprobs=2) for prompt in prompts]
        gaps = [self.decode.answer(request).least_gap for request in requests]
        self.decode.forget()
        return prompts[gaps.index(max(gaps))]

    def begin_prefill(self, prompt, **names):
        return self.prefill.submit(prompt, {**REMOTE_DECODE, **names}, max_tokens=1)

    def offered(self, request):
        """Wait for the prefill engine's answer with parameters, and remember the address as a router does."""
        answer = self.prefill.answer(request)
        if not answer.params:
            raise NoAnswerError(f"the prefill engine gave no parameters ({answer.reason})")
        self.address = {key: answer.params[key] for key in ADDRESS_KEYS}
        return answer

    def prefilled(self, prompt):
        return self.offered(self.begin_prefill(prompt)).params

    def compared(self, prompt, cached=0, *, is_whole=False, **options):
        """Prefill on one engine and decode on the other. Returns the answer, and how the caches differ after `cached`
        tokens that the decode engine had; "" if they are equal. `is_whole`: it loads the last token, too.
        """
        prefill = self.prefill.answer(self.begin_prefill(prompt))
        decode = self.decode.submit(prompt, prefill.params, **options)
        return self._compared(prompt, prefill, decode, cached, is_whole)

    def _compared(self, prompt, prefill, decode, cached=0, is_whole=False):
        end = len(prompt) - (not is_whole)  # the decode engine computes the last token
        expected = self.prefill.call("digests", prefill.block_ids, cached, end)
        answer = self.decode.answer(decode)
        found = self.decode.call("digests", answer.block_ids, cached, end)
        if cached >= end:
            return answer, ""
        expected = merged(expected)
        tokens, in_tier = self._tier
        if tokens == prompt[: len(tokens)]:
            for layer, digests in in_tier.items():
                both = digests.keys() & expected[layer]
                expected[layer] |= {token: digests[token] for token in both}
        return answer, difference(expected, merged(found), self._drafts)

    def fill_tier(self, prompt, cached):
        """Put the first `cached` tokens into the decode engine's tier alone. Returns how they differ from the prefill
        engine's, which may compute them for this, since a step of another length can round differently.
        """
        self._tier = [], {}
        if not cached:
            return ""
        prefill = self.offered(self.begin_prefill(prompt[: cached + 1]))
        expected = merged(self.prefill.call("digests", prefill.block_ids, 0, cached))
        answer = self.decode.ask(prompt[: cached + 1], prefill.params)
        found = merged(self.decode.call("digests", answer.block_ids, 0, cached))
        self.decode.forget()
        self._tier = prompt[:cached], expected
        return difference(expected, found)

    def begin_streamed(self, prompt, *, decoded=None, **options):
        """Ask both engines at once, as a router that knows the address does; the decode engine for `decoded`, if a
        router confuses two requests. Returns the ids of both.
        """
        self._transfers += 1
        names = {"transfer_id": f"stream-{self._transfers}", "transfer_secret": "5" * 32}
        params = {"do_remote_prefill": True, **self.address, **names}
        decode = self.decode.submit(decoded or prompt, params, **options)
        return self.begin_prefill(prompt, **names), decode

    def streamed(self, prompt, *, is_whole=False):
        """Do what `compared` does, but ask both engines at once."""
        prefill, decode = self.begin_streamed(prompt)
        prefill = self.prefill.answer(prefill)
        return self._compared(prompt, prefill, decode, is_whole=is_whole)

    def leftovers(self, *names):
        """Wait until the named engines, or both, hold nothing; returns a complaint for each thing that stays."""
        found = []
        for name in names or ("prefill", "decode"):
            engine = getattr(self, name)
            becomes(lambda: not engine.call("report")["requests"], QUIET_TIMEOUT_S)  # noqa: B023
            report = engine.call("report")
            if report["requests"]:
                found.append(f"{name} still holds {report['requests']} requests")
            if report["used_blocks"]:
                found.append(f"{name} leaks {report['used_blocks']} blocks")
        return found
