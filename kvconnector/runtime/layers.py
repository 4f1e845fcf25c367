"""Layers of the step that an engine computes, reported to consumers while it computes the next ones."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from kvconnector.datapath.pools import Pools
from kvconnector.session.orders import HoldRequest
from kvconnector.session.watermark import (
    MAX_AHEAD_LAYERS,
    MAX_AHEAD_TOKENS,
    MAX_PIECES,
    MIN_PIECE_BYTES,
)


class StepLayers:
    """What one step computes of prompts that consumers follow. `events` are the step's orders.

    A step is reported in a few pieces of some megabytes; one that is smaller than two of them is reported as a whole.
    """

    def __init__(self, events: Sequence[object], pools: Pools) -> None:
        self._prompts = [
            event
            for event in events
            if isinstance(event, HoldRequest)
            and event.error is None
            and event.num_tokens < event.ahead_tokens < MAX_AHEAD_TOKENS
        ]
        layers: set[int] = set()
        nbytes = 0
        for prompt in self._prompts:
            for group, blocks in zip(pools.groups, prompt.blocks, strict=False):
                if blocks.wire_ids:
                    held = group.geometry
                    layers |= {each for each in held.layers if each + 1 < MAX_AHEAD_LAYERS}
                    token_bytes = sum(part.token_bytes for part in held.parts) // held.dcp_size
                    num_tokens = prompt.ahead_tokens - prompt.num_tokens
                    nbytes += num_tokens * len(held.layers) * token_bytes
        ends = sorted(layers)
        num_pieces = min(MAX_PIECES, nbytes // MIN_PIECE_BYTES, len(ends))
        self._ends = set[int]()
        """The last layer of each piece."""
        if num_pieces > 1:
            step = -(-len(ends) // num_pieces)
            self._ends = {*ends[step - 1 :: step], ends[-1]}

    def written(self, layer: int) -> list[object]:
        """Return the events of a layer that is written, as are those before it."""
        if layer not in self._ends:
            return []
        return [replace(prompt, ahead_layers=layer + 1) for prompt in self._prompts]
