"""Translates a request's pages, state slots and metadata row to blocks of the cache groups. Pure."""

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
    """The cache groups of an engine, in registration order.

    `kinds` starts with a "kv" for the model's pages and one for its draft model's, which have the same page ids. A
    "swa" (sliding window) or "mamba" (recurrent state) follows for each of SGLang's states, and "row", the metadata,
    comes last. A page has `page_size` tokens.
    """

    kinds: tuple[str, ...]
    page_size: int

    def growing(self, pages: GroupBlocks) -> tuple[GroupBlocks, ...]:
        """Return each group's readable blocks while the prompt is computed: only "kv" groups are read that early."""
        return tuple(pages if kind == "kv" else NO_BLOCKS for kind in self.kinds)

    def blocks(
        self, pages: GroupBlocks, states: Sequence[Any], row: int, num_tokens: int
    ) -> tuple[GroupBlocks, ...]:
        """Return each group's blocks once the whole prompt is computed.

        Args:
            pages: The pages of its tokens.
            states: SGLang's ids for each state, as numbers or arrays: the last pages of a window, or one slot.
            row: The request's row of metadata.
            num_tokens: The prompt's length in tokens.

        Raises:
            BlockIdError: `states` does not fit the groups, the prompt is empty, or a window has more pages than it.
        """
        named = [[int(each) for some in state for each in np.ravel(some)] for state in states]
        named.append([row])
        kinds = [kind for kind in self.kinds if kind != "kv"]
        slots = {len(ids) for kind, ids in zip(kinds, named, strict=False) if kind != "swa"}
        if len(named) != len(kinds) or slots != {1} or num_tokens < 1:
            raise BlockIdError(
                "a request needs a token, its pages in every window and one slot in every state",
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
        """Return the token range `[start, stop)` that a decode engine reads in each group, and its blocks for them.

        Args:
            pages: The pages of the tokens after the cached prefix.
            states: As in `blocks`.
            row: The request's row of metadata.
            prefix_tokens: Length of the cached prefix in tokens, a multiple of the page size.
            num_tokens: The prompt's length in tokens.
            window_tokens: The length of the sliding window in tokens. No older token of a window is read, though the
                window's first page may hold some.

        Raises:
            BlockIdError: as `blocks`; also if the prefix ends inside a page, or the window's length is unknown.
        """
        if prefix_tokens % self.page_size or ("swa" in self.kinds and not window_tokens):
            raise BlockIdError(
                "a cached prefix must end at a page boundary, and a window needs a length",
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
