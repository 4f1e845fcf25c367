"""`Watermark`: the progress of a prompt at its producer, in whole steps and in layers of the newest step."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

MAX_LAYERS = 1 << 16
ALL_LAYERS = range(MAX_LAYERS)
"""All global layer indices."""
MIN_PIECE_BYTES = 2 << 20
"""The size of the smallest piece of an unfinished step that is reported and read."""
MAX_AHEAD_TOKENS, MAX_AHEAD_LAYERS = 1 << 21, 1 << 10
"""The largest values for which a lease board's entry has room. Steps beyond these are reported as a whole."""

_Count = Annotated[int, Meta(ge=0, lt=1 << 31)]


class Watermark(msgspec.Struct, frozen=True, array_like=True, order=True, gc=False):
    """The written part of a prompt: the first `num_tokens` tokens of all layers, and from the newest step the tokens up
    to `ahead_tokens` of the layers with global indices below `ahead_layers`. Further progress compares greater.
    """

    num_tokens: _Count = 0
    ahead_tokens: _Count = 0
    ahead_layers: _Count = 0

    @property
    def step_stop(self) -> int:
        """Number of tokens that all layers have once the newest step is computed."""
        return max(self.num_tokens, self.ahead_tokens)

    @property
    def token_stop(self) -> int:
        """Number of tokens that at least one layer has."""
        return self.step_stop if self.ahead_layers else self.num_tokens

    def layer_stop(self, token_stop: int) -> int:
        """Return the global index below which all layers have the first `token_stop` tokens."""
        if token_stop <= self.num_tokens:
            return ALL_LAYERS.stop
        return self.ahead_layers if token_stop <= self.ahead_tokens else 0

    def continues(self, before: Watermark) -> bool:
        """Return True if an engine can get here from `before` without computing reported tokens again."""
        steps = (self.num_tokens, self.ahead_tokens), (before.num_tokens, before.ahead_tokens)
        is_same_step = steps[0] == steps[1] and self.ahead_layers >= before.ahead_layers
        return is_same_step or self.num_tokens >= before.token_stop


NO_TOKENS = Watermark()
