"""A request's pages, slots and row as blocks of each cache group. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvconnector.errors import BlockIdError
from kvconnector.layout import GroupBlocks

NO_BLOCKS = GroupBlocks.of(())


@dataclass(frozen=True, slots=True)
class Layout:
    """The cache groups of an engine: "kv" for those of pages that hold every token, the model's and its draft model's,
    which share page ids; then a "swa" or "mamba" for each of SGLang's states; last the "row" of metadata.
    """

    kinds: tuple[str, ...]
    page_size: int

    def growing(self, pages: GroupBlocks) -> tuple[GroupBlocks, ...]:
        """Return the blocks of each group while a prompt is computed: the others are read at its end."""
        return tuple(pages if kind == "kv" else NO_BLOCKS for kind in self.kinds)

    def blocks(
        self, pages: GroupBlocks, states: Sequence[Any], row: int, num_tokens: int
    ) -> tuple[GroupBlocks, ...]:
        """Return the blocks of each group at the end of a prompt.

        Args:
            pages: Those of its tokens.
            states: For each of SGLang's states the ids that it names, as numbers or arrays: pages of a window's
                tail, or one slot.
            row: The row of metadata.
            num_tokens: The prompt's length.

        Raises:
            BlockIdError: not as many states as groups, or pages beyond the prompt's.
        """
        named = [[int(each) for some in state for each in np.ravel(some)] for state in states]
        named.append([row])
        kinds = [kind for kind in self.kinds if kind != "kv"]
        slots = {len(ids) for kind, ids in zip(kinds, named, strict=False) if kind != "swa"}
        if len(named) != len(kinds) or slots != {1} or num_tokens < 1:
            raise BlockIdError(
                "a request names its pages of every window and its slot of every state, and has a token",
                named=named,
                groups=kinds,
                num_tokens=num_tokens,
            )
        end = -(-num_tokens // self.page_size)
        last = [
            GroupBlocks.of(ids, end - len(ids) if kind == "swa" else num_tokens - 1)
            for kind, ids in zip(kinds, named, strict=True)
        ]
        return (pages,) * (len(self.kinds) - len(last)) + tuple(last)

    def to_load(
        self,
        pages: Sequence[int],
        states: Sequence[Any],
        row: int,
        *,
        prefix_tokens: int,
        num_tokens: int,
        window_tokens: int | None,
    ) -> tuple[tuple[tuple[int, int], ...], tuple[GroupBlocks, ...]]:
        """Return the tokens `[start, stop)` that a decode engine reads of each group, and the blocks that they go to.

        Args:
            pages: Of the tokens past its prefix.
            states: As in `blocks`.
            row: The row of metadata.
            prefix_tokens: Tokens that it has cached, in whole pages.
            num_tokens: The prompt's length.
            window_tokens: Of these last tokens a window's pages are needed. Pages of two sizes begin at different
                tokens before.

        Raises:
            BlockIdError: as `blocks`; also a prefix that ends within a page, and a window of unknown length.
        """
        if prefix_tokens % self.page_size or ("swa" in self.kinds and not window_tokens):
            raise BlockIdError(
                "a prefix ends with a page, and a window has a length",
                prefix_tokens=prefix_tokens,
                page_size=self.page_size,
                window_tokens=window_tokens,
            )
        kv = GroupBlocks.of(pages, prefix_tokens // self.page_size)
        blocks = self.blocks(kv, states, row, num_tokens)
        starts = [
            prefix_tokens
            if kind == "kv"
            else max(held.first_block * self.page_size, num_tokens - (window_tokens or 0))
            if kind == "swa"
            else num_tokens - 1
            for kind, held in zip(self.kinds, blocks, strict=True)
        ]
        return tuple((min(start, num_tokens), num_tokens) for start in starts), blocks
