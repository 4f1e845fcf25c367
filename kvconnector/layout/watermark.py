"""The part of a prompt that a producer worker has computed: whole steps, and the first layers of the newest one."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

MAX_LAYERS = 1 << 16
ALL_LAYERS = range(MAX_LAYERS)
"""By their global indices."""
MIN_PIECE_BYTES = 2 << 20
"""The least that is reported, and read, at a time of a step that is still computed."""
MAX_AHEAD_TOKENS, MAX_AHEAD_LAYERS = 1 << 21, 1 << 10
"""The lease board has no room for more: tokens and layers above are reported with their whole step."""

_Count = Annotated[int, Meta(ge=0, lt=1 << 31)]


class Watermark(msgspec.Struct, frozen=True, array_like=True, order=True, gc=False):
    """All layers have the first `num_tokens` tokens. Of the newest step, which computes those up to `ahead_tokens`, the
    layers below the global index `ahead_layers` are written. Compares by what is computed.
    """

    num_tokens: _Count = 0
    ahead_tokens: _Count = 0
    ahead_layers: _Count = 0

    @property
    def step_stop(self) -> int:
        """The tokens that all layers have once the newest step is computed."""
        return max(self.num_tokens, self.ahead_tokens)

    @property
    def token_stop(self) -> int:
        """The tokens that some layer has."""
        return self.step_stop if self.ahead_layers else self.num_tokens

    def layer_stop(self, token_stop: int) -> int:
        """The global index below which all layers have the tokens up to `token_stop`."""
        if token_stop <= self.num_tokens:
            return ALL_LAYERS.stop
        return self.ahead_layers if token_stop <= self.ahead_tokens else 0

    def continues(self, before: Watermark) -> bool:
        """Returns True if an engine that was at `before` can be here without computing reported tokens again."""
        steps = (self.num_tokens, self.ahead_tokens), (before.num_tokens, before.ahead_tokens)
        is_same_step = steps[0] == steps[1] and self.ahead_layers >= before.ahead_layers
        return is_same_step or self.num_tokens >= before.token_stop


NO_TOKENS = Watermark()
