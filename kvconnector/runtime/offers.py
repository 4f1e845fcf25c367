"""Checks offers: an engine's pools have the blocks, and these hold the tokens."""

from __future__ import annotations

from collections.abc import Sequence

from kvconnector.errors import BlockIdError, LocalError, require_at_least
from kvconnector.layout import GroupBlocks
from kvconnector.planning import KeepsState, Retention
from kvconnector.runtime.engine import WorkerMetadata
from kvconnector.runtime.remote_request import tokens_to_load
from kvconnector.topology import EngineGeometry
from kvconnector.wire.messages import MAX_EXTRA_BYTES


class OfferCheck:
    """The pools of one engine and what its cache groups keep, against which offers are checked."""

    def __init__(
        self,
        engine: EngineGeometry,
        retentions: Sequence[Retention],
        workers: Sequence[WorkerMetadata],
    ) -> None:
        # ranks may have pools of different sizes, and an id stands for a block in each
        num_blocks = [min(found) for found in zip(*(w.num_blocks for w in workers), strict=True)]
        sizes = [group.virtual_block_tokens for group in engine.ranks[0].groups]
        self._groups = list(zip(sizes, retentions, num_blocks, strict=True))

    def check(
        self,
        request_id: str,
        blocks: Sequence[GroupBlocks],
        num_tokens: int,
        num_encoder_tokens: int,
        extra: bytes = b"",
    ) -> None:
        """Raises BlockIdError: ids outside the pool, one twice, or too few for the tokens. LocalError: the engine's
        `extra` is too long, or not bytes.
        """
        if not isinstance(extra, bytes) or len(extra) > MAX_EXTRA_BYTES:
            raise LocalError(
                f"an offer's extra is at most {MAX_EXTRA_BYTES} bytes", request=request_id
            )
        require_at_least(
            0, BlockIdError, num_tokens=num_tokens, num_encoder_tokens=num_encoder_tokens
        )
        what = f"the blocks of request {request_id}"
        for index, (group, (size, retention, limit)) in enumerate(
            zip(blocks, self._groups, strict=True)
        ):
            if group.num_blocks and (highest := int(group.block_ids.max())) >= limit:
                raise BlockIdError(
                    f"{what} are outside the pool", group=index, highest=highest, num_blocks=limit
                )
            tokens = tokens_to_load(retention, 0, num_tokens, num_encoder_tokens)
            if isinstance(retention, KeepsState) and 0 <= group.first_block < num_tokens:
                # of an earlier position: the consumer goes on there
                tokens = range(group.first_block, group.first_block + 1)
            group.covering(tokens, size, what=what)  # raises
