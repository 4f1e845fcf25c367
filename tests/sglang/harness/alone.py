"""One engine of SGLang that computes alone, for as many cases as have its model."""

from contextlib import suppress

from tests.vllm.harness.report import NoAnswerError


class Alone:
    """The engine alone of the last case's model. `start` makes one from the arguments of `of`."""

    def __init__(self, start):
        self._start, self._engine, self._made_from, self._known = start, None, None, {}

    def of(self, *made_from):
        """Return the engine for these arguments."""
        if made_from != self._made_from:
            self.close()
            self._made_from, self._known = made_from, {}
            self._engine = self._start(*made_from)
            self._engine.wait_until_ready()
        return self

    def ask(self, prompt, **options):
        """Return its answer, which is remembered if it was asked before."""
        key = repr((prompt, options))
        if key not in self._known:
            self._known[key] = self._engine.ask(prompt, **options)
        return self._known[key]

    def post(self, path, body):
        """Send an order to the engine, once."""
        if (path, repr(body)) not in self._known:
            self._known[path, repr(body)] = True
            self._engine.post(path, body)

    def close(self):
        """End it."""
        if self._engine is not None:
            with suppress(NoAnswerError, OSError):
                self._engine.kill()
            self._engine = self._made_from = None
