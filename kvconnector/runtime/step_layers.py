"""Reports the layers of an engine's step to consumers while the engine computes the next ones."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from kvconnector.datapath.pools import Pools
from kvconnector.layout.watermark import MAX_AHEAD_LAYERS, MAX_AHEAD_TOKENS, MIN_PIECE_BYTES
from kvconnector.session.orders import GrowRequest, Order

MAX_PIECES = 8
"""Most pieces in which a step is reported: each costs a few messages and a read."""


class StepLayers:
    """The layers of one step that computes prompts which consumers follow.

    A step is reported in a few pieces of some megabytes, or as a whole if it is smaller than two of them. Layers may
    come in any order: a piece is reported once all its layers, and those before it, are written.

    Args:
        orders: The step's orders. Those that grow a prompt beyond its whole steps are reported by layers.
        pools: The caches of this rank.
    """

    def __init__(self, orders: Sequence[Order], pools: Pools) -> None:
        self._prompts = [
            order
            for order in orders
            if isinstance(order, GrowRequest)
            and order.error is None
            and order.watermark.num_tokens < order.watermark.ahead_tokens < MAX_AHEAD_TOKENS
        ]
        layers: set[int] = set()
        nbytes = 0
        for prompt in self._prompts:
            first, stop = prompt.watermark.num_tokens, prompt.watermark.ahead_tokens
            for group, blocks in zip(pools.groups, prompt.blocks, strict=False):
                if blocks.wire_ids:
                    held = group.geometry
                    layers |= {each for each in held.layers if each + 1 < MAX_AHEAD_LAYERS}
                    token_bytes = sum(part.token_bytes for part in held.parts) // held.dcp_size
                    num_rows = stop // held.row_tokens - first // held.row_tokens
                    nbytes += num_rows * len(held.layers) * token_bytes
        num_pieces = min(MAX_PIECES, nbytes // MIN_PIECE_BYTES, len(layers))
        size = -(-len(layers) // max(1, num_pieces))
        cuts = range(0, len(layers), size) if num_pieces > 1 else ()
        self._pieces = [sorted(layers)[cut : cut + size] for cut in cuts]
        """Layers that are not reported yet, the lowest first."""
        self._written = set[int]()

    def written(self, layer: int) -> list[GrowRequest]:
        """Record that a layer is written. Returns the orders that report a piece if this completes one."""
        self._written.add(layer)
        layer_stop = 0
        while self._pieces and self._written.issuperset(self._pieces[0]):
            layer_stop = self._pieces.pop(0)[-1] + 1
        if not layer_stop:
            return []
        return [
            replace(prompt, watermark=replace(prompt.watermark, ahead_layers=layer_stop))
            for prompt in self._prompts
        ]
