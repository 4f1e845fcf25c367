"""A request of a consumer whose blocks are on a producer, as its engine's scheduler half sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvconnector.layout import GroupBlocks
from kvconnector.planning import KeepsEncoder, KeepsState, Retention
from kvconnector.runtime.params import TransferParams
from kvconnector.session.orders import LoadRequest


def tokens_to_load(
    kept: Retention, num_computed_tokens: int, stop: int, num_encoder_tokens: int
) -> range:
    """Return what a group lacks before token `stop`, or all of the encoder's input: no part of it is found cached."""
    if isinstance(kept, KeepsEncoder):
        return kept.missing(0, num_encoder_tokens)
    return kept.missing(num_computed_tokens, stop)


@dataclass(slots=True)
class RemoteRequest:
    """`is_finished`: the engine has done with it, and only the load is still to end. One that is followed waits until
    the producer `has_begun`.
    """

    params: TransferParams
    retentions: tuple[Retention, ...]
    stage: Literal["wanted", "loading", "over"] = "wanted"
    is_finished: bool = False
    has_begun: bool = False
    num_computed_tokens: int = 0

    def resume_at(self, limit: int) -> int:
        """The position, up to `limit`, in front of which the producer has all that is needed; 0 if there is none."""
        available = min(self.params.remote_num_tokens, limit)
        states = {
            self.params.first_block(group) + len(ids)
            for group, ids in enumerate(self.params.remote_block_ids)
            if isinstance(self.retentions[group], KeepsState)
        }
        if not states or self.params.is_followed:
            return available  # its states will be those in front of the last token
        position = states.pop()
        return position if not states and position <= available else 0

    def load_order(
        self,
        request_id: str,
        ids: Sequence[Sequence[int]],
        firsts: Sequence[int],
        ranges: Sequence[range],
        stop: int,
    ) -> LoadRequest:
        """Return the order to load these tokens of each group, up to token `stop`. Raises BlockIdError: block ids that
        no pool has.
        """
        # a state is the token in front of those that are loaded
        starts = [
            stop - 1 if isinstance(retention, KeepsState) else first
            for retention, first in zip(self.retentions, firsts, strict=True)
        ]
        return LoadRequest(
            request_id=request_id,
            token_ranges=tuple((tokens.start, tokens.stop) for tokens in ranges),
            local_blocks=tuple(map(GroupBlocks.of, ids, starts)),
            remote_blocks=self.params.blocks(),
        )
