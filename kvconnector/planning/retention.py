"""`Retention`: the tokens that a cache group keeps, and those that it lacks before the next one can be computed. For a
compressed group (`GroupGeometry.row_tokens`) the answer is in rows, although the question is in tokens.

After a prefix hit different groups may lack different tokens, so each group decides on its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, runtime_checkable

from kvconnector.errors import GeometryError, require_at_least

Keeps: TypeAlias = Literal["all", "window", "chunk", "encoder", "state"]
"""The name of a retention, for messages between processes."""


@runtime_checkable
class Retention(Protocol):
    """The tokens of a sequence that one cache group keeps."""

    def missing(self, num_computed_tokens: int, stop: int) -> range:
        """Return the tokens that the group lacks before token `stop` can be computed; `range(stop, stop)` for none.

        The group has those of the first `num_computed_tokens` tokens that it keeps, as far as token `stop` needs them.
        """


@dataclass(frozen=True, slots=True)
class KeepsAll:
    """Full attention: every token, or every whole row of `row_tokens` tokens. Tokens after the last whole row are in
    no row: a model that compresses keeps what it needs of them in groups of windows, chunks or states.
    """

    row_tokens: int = 1

    def __post_init__(self) -> None:
        require_at_least(1, GeometryError, row_tokens=self.row_tokens)

    def missing(self, num_computed_tokens: int, stop: int) -> range:
        return range(min(num_computed_tokens, stop) // self.row_tokens, stop // self.row_tokens)


@dataclass(frozen=True, slots=True)
class KeepsWindow:
    """A sliding window: a query sees the last `window_tokens` tokens, its own included."""

    window_tokens: int

    def __post_init__(self) -> None:
        require_at_least(1, GeometryError, window_tokens=self.window_tokens)

    def missing(self, num_computed_tokens: int, stop: int) -> range:
        oldest = max(0, stop - self.window_tokens + 1)
        return range(min(max(num_computed_tokens, oldest), stop), stop)


@dataclass(frozen=True, slots=True)
class KeepsChunk:
    """Chunked local attention: a query sees its own chunk of `chunk_tokens` tokens, up to itself. So does a compressor
    whose rows do not overlap: it needs the tokens of the row that it has begun, which are none at the end of a row.
    """

    chunk_tokens: int

    def __post_init__(self) -> None:
        require_at_least(1, GeometryError, chunk_tokens=self.chunk_tokens)

    def missing(self, num_computed_tokens: int, stop: int) -> range:
        oldest = stop // self.chunk_tokens * self.chunk_tokens
        return range(min(max(num_computed_tokens, oldest), stop), stop)


@dataclass(frozen=True, slots=True)
class KeepsEncoder:
    """Cross-attention: every token of the encoder's input. The group numbers these, not the decoder's tokens, so `stop`
    is the length of that input, and `num_computed_tokens` is `stop` or 0.
    """

    def missing(self, num_computed_tokens: int, stop: int) -> range:
        return range(min(num_computed_tokens, stop), stop)


@dataclass(frozen=True, slots=True)
class KeepsState:
    """A recurrent state: it summarises all tokens before its position, and serves no other position. It counts as one
    token, the last of these, and a block of its group holds one. The same is used for anything else of which a request
    has one indivisible block of bytes, such as a ring of recent tokens: a part whose only head has the block's bytes.
    """

    def missing(self, num_computed_tokens: int, stop: int) -> range:
        return range(max(0, stop - 1) if num_computed_tokens != stop else stop, stop)


def from_whole_block(tokens: range, cached_tokens: int, held: range, block_tokens: int) -> range:
    """Return the range that a consumer reads: from a whole block of its prefix cache on, if the producer has it.

    The prefix cache treats the block in which a window begins as complete, like any other block.

    Args:
        tokens: What the consumer lacks. Of a compressed group all tokens are rows.
        cached_tokens: Those of a block of its prefix cache.
        held: The producer's blocks, counted from the first token. None of them are completed if they end elsewhere than
            blocks of the consumer's would.
        block_tokens: Those of a block of the consumer's pools.
    """
    first = tokens.start // cached_tokens * cached_tokens
    is_held = held.stop == -(-tokens.stop // block_tokens) and held.start * block_tokens <= first
    return range(first, tokens.stop) if tokens and is_held else tokens


def retention_named(keeps: Keeps, extent_tokens: int = 0, row_tokens: int = 1) -> Retention:
    """Return the retention of this name. `extent_tokens` is the length of a window or a chunk; rows of several tokens
    are kept all.

    Raises:
        GeometryError: A window or a chunk has no tokens, or a group that keeps only some has rows of several.
    """
    if keeps != "all" and row_tokens != 1:
        raise GeometryError(
            "a group with rows of several tokens must keep all tokens",
            keeps=keeps,
            row_tokens=row_tokens,
        )
    match keeps:
        case "window":
            return KeepsWindow(extent_tokens)
        case "chunk":
            return KeepsChunk(extent_tokens)
        case "encoder":
            return KeepsEncoder()
        case "state":
            return KeepsState()
    return KeepsAll(row_tokens)
