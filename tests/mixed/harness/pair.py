"""A prefill engine of one kind and a decode engine of the other, with a router's part between them."""

import secrets
from dataclasses import dataclass

from tests.mixed.harness.engines import CPU, MinillmEngine, Names, SglangEngine, VllmEngine, Wanted
from tests.vllm.harness.digests import difference

ROOM_BITS = 62
MAX_TOKENS = 12
SIDES = ("prefill", "decode")


@dataclass(frozen=True)
class Asked:
    """A request at both engines: its room, the tokens of its prompt, and the engines' own requests. `early` is
    the prefill engine's answer, if that came before the decode engine was asked.
    """

    room: int
    num_tokens: int
    prefill: object
    decode: object
    early: object = None


class Pair:
    """The two engines of `case`, in `folder`, and one of SGLang alone: `alone`. That of vLLM also computes alone."""

    def __init__(self, case, model, folder, host, alone, *, device=CPU):
        self._alone, self._host, self._folder, self._device = alone, host, folder, device
        self._model, self._known = model, {}
        self.prefill, self.decode = (
            self._engine(side, *getattr(case, side), case.environment) for side in SIDES
        )

    def _engine(self, side, kind, options, environment):
        wanted = Wanted(side, self._model, self._folder, options, environment, self._device)
        if kind == "sglang":
            return SglangEngine(self._host, wanted)
        return {"vllm": VllmEngine, "minillm": MinillmEngine}[kind](wanted)

    def wait_until_ready(self):
        """Wait for both engines."""
        self.prefill.wait_until_ready()
        self.decode.wait_until_ready()

    def close(self):
        """End both engines."""
        self.prefill.stop()
        self.decode.stop()

    def alone(self, prompt, *, keeps=False):
        """Return the tokens that an engine of the pair, not one of SGLang's, gives alone, and those of SGLang's alone.

        The former then forgets the prompt, unless it `keeps` its prefix cache.
        """
        key = tuple(prompt)
        if key not in self._known:
            both = (each for each in (self.prefill, self.decode) if hasattr(each, "forget"))
            one = next(both)
            own = one.ask(prompt, max_tokens=MAX_TOKENS).tokens
            if not keeps:
                one.forget()
            of_sglang = self._alone.ask(prompt, max_tokens=MAX_TOKENS).tokens
            self._known[key] = own, of_sglang
        return self._known[key]

    def submit(self, prompt, *, decoded=None, is_late=False, **options):
        """Ask both engines at once, as a router does, or with `is_late` the decode engine once the prompt is computed.
        `decoded`: what the decode engine is asked for, if a router confuses two requests.
        """
        names = Names(secrets.randbits(ROOM_BITS) + 1)
        prefill = self.prefill.begin_prefill(prompt, names)
        early = self.prefill.result(prefill) if is_late else None
        options = {"max_tokens": MAX_TOKENS, **options}
        decode = self.decode.begin_decode(decoded or prompt, names, self.prefill, **options)
        return Asked(names.room, len(prompt), prefill, decode, early)

    def results(self, asked):
        """Wait for the answers of both engines."""
        answer = self.decode.result(asked.decode)
        return asked.early or self.prefill.result(asked.prefill), answer

    def ask(self, prompt, **options):
        """Ask both engines. Returns their answers."""
        return self.results(self.submit(prompt, **options))

    def compare(self, outcome, what, prompt, *, keeps=False, **options):
        """Ask both engines, and compare tokens and, unless prefix caches are kept, what their caches have."""
        expected = self.alone(prompt, keeps=keeps)
        asked = self.submit(prompt, **options)
        answers = self.results(asked)
        self.judge(outcome, what, answers, expected, computed=int(keeps))
        engines = self.prefill, self.decode
        if not keeps and all(hasattr(engine, "digests") for engine in engines):
            found = [
                engine.digests(asked.room, answer, asked.num_tokens)
                for engine, answer in zip(engines, answers, strict=True)
            ]
            outcome.compare_bytes(what, difference(*found))

    @staticmethod
    def judge(outcome, what, answers, expected, *, computed=0):
        """Compare the tokens with those of each kind of engine alone. If these differ, either will do. Of the prompt,
        vLLM's decode engine may compute no more tokens than are `computed`.
        """
        if expected[0] != expected[1]:
            outcome.differs_alone.append(f"{what}: the two kinds differ without a transfer")
        for side, answer in zip(SIDES, answers, strict=True):
            if getattr(answer, "error", ""):
                outcome.complaints.append(f"{what}, {side}: {answer.error}")
        answer = answers[1]
        right = expected[1] if answer.tokens == expected[1] else expected[0]
        outcome.compare(what, answer, right)
        found = getattr(answer, "computed_tokens", None) or 0
        if found > computed:
            outcome.complaints.append(f"{what}: the decode engine computed {found} tokens of it")

    @staticmethod
    def refuses(answer):
        """Returns True if an answer has no tokens, but an error."""
        return bool(getattr(answer, "error", "")) or answer.reason == "error"

    def check_idle(self, outcome):
        """Complain about what an engine still holds."""
        for side in SIDES:
            if held := getattr(self, side).check_idle():
                outcome.complaints.append(f"{side}: {held}")
