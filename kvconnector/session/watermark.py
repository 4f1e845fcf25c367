"""How much of a prompt a producer worker has computed: whole steps, and the first layers of the newest one."""

from __future__ import annotations

from typing import NamedTuple

from kvconnector.planning import ALL_LAYERS
from kvconnector.session.orders import HoldRequest
from kvconnector.wire.messages import Progress

MIN_PIECE_BYTES = 2 << 20
"""The least that is reported, and read, at a time of a step that is still computed."""
MAX_PIECES = 8
"""Pieces in which a step is reported at most: each costs a few messages and a read."""
MAX_AHEAD_TOKENS, MAX_AHEAD_LAYERS = 1 << 21, 1 << 10
"""The lease board has no room for more: what is beyond is told when its step is over."""


class Watermark(NamedTuple):
    """All layers have the first `num_tokens` tokens. The layers below `ahead_layers`, a global index, have the first
    `ahead_tokens`: so far the newest step has come.
    """

    num_tokens: int = 0
    ahead_tokens: int = 0
    ahead_layers: int = 0

    @classmethod
    def of(cls, said: Progress | HoldRequest) -> Watermark:
        """What an engine says of its prompt, to its workers or to a consumer."""
        return cls(said.num_tokens, said.ahead_tokens, said.ahead_layers)

    @property
    def token_stop(self) -> int:
        """Behind the last token that some layer has."""
        return max(self.num_tokens, self.ahead_tokens if self.ahead_layers else 0)

    def layer_stop(self, token_stop: int) -> int:
        """Below which global index all layers have the tokens up to `token_stop`."""
        if token_stop <= self.num_tokens:
            return ALL_LAYERS.stop
        return self.ahead_layers if token_stop <= self.ahead_tokens else 0

    def continues(self, before: Watermark) -> bool:
        """Whether an engine that was at `before` can be here without computing tokens again of which it told layers."""
        is_same_step = self[:2] == before[:2] and self.ahead_layers >= before.ahead_layers
        return is_same_step or self.num_tokens >= before.token_stop
