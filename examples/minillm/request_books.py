"""The sequences that own a request's blocks, and how blocks are described when they are offered and loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvconnector.cache.block_manager import Sequence as TokenSequence
from kvconnector.cache.block_manager import SequenceGroup, SequenceStatus
from kvconnector.planning import KeepsAll, KeepsChunk, KeepsState, KeepsWindow, Retention


@dataclass(frozen=True, slots=True)
class BlockOffer:
    """Blocks for a consumer: `block_ids[group]` hold the sequence from its block `first_blocks[group]` on."""

    block_ids: list[list[int]]
    first_blocks: list[int]


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """Blocks to load into, as in `BlockOffer`; `computed_tokens[group]` tokens of each group need not be loaded."""

    block_ids: list[list[int]]
    first_blocks: list[int]
    computed_tokens: list[int]


@dataclass(slots=True, eq=False)
class RequestBooks:
    """One request: its tokens, its encoder's input, and where in its tokens its states are kept for a consumer.

    `siblings` are the sequences of answers that have not begun; they share the prompt's blocks while it is computed.
    `kept` is a fork of the tokens as they were at `keep_state_at`, with the blocks that held the states there.
    """

    tokens: TokenSequence
    siblings: list[TokenSequence]
    encoder: TokenSequence | None
    keep_state_at: int | None
    kept: TokenSequence | None = None

    @property
    def group(self) -> SequenceGroup:
        """All sequences that own blocks."""
        seqs = [self.tokens, *self.siblings]
        seqs += [] if self.kept is None else [self.kept]
        return self._group_of(seqs)

    @property
    def first(self) -> SequenceGroup:
        """The sequence that is computed."""
        return self._group_of([self.tokens])

    def _group_of(self, seqs: list[TokenSequence]) -> SequenceGroup:
        return SequenceGroup(f"sequence {self.tokens.seq_id}", seqs, encoder_seq=self.encoder)

    def set_status(self, status: SequenceStatus) -> None:
        """Set the status of all answers."""
        for seq in (self.tokens, *self.siblings):
            seq.status = status

    def first_stop(self, resume_at: int) -> int | None:
        """Return the last token at which a step from `resume_at` must end because it replaces kept states, or None."""
        if self.keep_state_at is None or self.keep_state_at <= resume_at:
            return None
        return self.keep_state_at


def forgetting(retention: Retention) -> dict[str, Any]:
    """Return a block manager's options for a group that forgets tokens, or has rows of several."""
    match retention:
        case KeepsAll(row_tokens=row_tokens):
            return {"row_tokens": row_tokens}
        case KeepsWindow(window_tokens=window):
            return {"sliding_window": window}
        case KeepsChunk(chunk_tokens=chunk):
            return {"attention_chunk_size": chunk}
        case KeepsState():
            return {"is_recurrent": True}
    return {}
