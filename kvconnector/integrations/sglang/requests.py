"""A request's pages, slots and row as blocks of each cache group. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvconnector.errors import BlockIdError
from kvconnector.layout import GroupBlocks


@dataclass(frozen=True, slots=True)
class Layout:
    """The cache groups of an engine: "kv", "swa" or "mamba" each, and the rows of metadata as the last one, "row".

    SGLang names what is read at the end by position, one entry for each group that is not "kv".
    """

    kinds: tuple[str, ...]
    page_size: int

    @property
    def kv_groups(self) -> tuple[int, ...]:
        """Groups of pages that hold every token: the model's and its draft model's share page ids."""
        return tuple(index for index, kind in enumerate(self.kinds) if kind == "kv")

    def last_blocks(
        self, states: Sequence[Any], row: int, num_tokens: int
    ) -> dict[int, GroupBlocks]:
        """The blocks of the groups that are read at the end of a prompt, by the groups' numbers.

        Args:
            states: For each of SGLang's states the ids that it names, as numbers or arrays: pages of a window's
                tail, or one slot.
            row: The row of metadata.
            num_tokens: The prompt's length.

        Raises:
            BlockIdError: not as many states as groups, or pages beyond the prompt's.
        """
        named = [[int(each) for some in state for each in np.ravel(some)] for state in states]
        named.append([row])
        others = [index for index, kind in enumerate(self.kinds) if kind != "kv"]
        slots = {
            len(ids)
            for index, ids in zip(others, named, strict=False)
            if self.kinds[index] != "swa"
        }
        if len(named) != len(others) or slots != {1} or num_tokens < 1:
            raise BlockIdError(
                "a request names its pages of every window and its slot of every state, and has a token",
                named=named,
                groups=[self.kinds[index] for index in others],
                num_tokens=num_tokens,
            )
        end = -(-num_tokens // self.page_size)
        return {
            index: GroupBlocks.of(
                ids, end - len(ids) if self.kinds[index] == "swa" else num_tokens - 1
            )
            for index, ids in zip(others, named, strict=True)
        }

    def to_load(
        self,
        pages: Sequence[int],
        states: Sequence[Any],
        row: int,
        *,
        prefix_tokens: int,
        num_tokens: int,
        window_tokens: int | None,
    ) -> tuple[list[range], list[GroupBlocks]]:
        """The tokens that a decode engine reads of each group, and the blocks that they go to.

        Args:
            pages: Of the tokens past its prefix.
            states: As in `last_blocks`.
            row: The row of metadata.
            prefix_tokens: Tokens that it has cached, in whole pages.
            num_tokens: The prompt's length.
            window_tokens: Of these last tokens a window's pages are needed. Pages of two sizes begin at different
                tokens before.

        Raises:
            BlockIdError: as `last_blocks`; also a prefix that ends within a page, and a window of unknown length.
        """
        if prefix_tokens % self.page_size or ("swa" in self.kinds and not window_tokens):
            raise BlockIdError(
                "a prefix ends with a page, and a window has a length",
                prefix_tokens=prefix_tokens,
                page_size=self.page_size,
                window_tokens=window_tokens,
            )
        kv = GroupBlocks.of(list(pages), prefix_tokens // self.page_size)
        blocks = dict.fromkeys(self.kv_groups, kv) | self.last_blocks(states, row, num_tokens)
        ranges, found = [], []
        for index, kind in enumerate(self.kinds):
            start = num_tokens - 1
            if kind == "kv":
                start = prefix_tokens
            elif kind == "swa":
                kept = blocks[index].first_block * self.page_size
                start = max(kept, num_tokens - (window_tokens or 0))
            ranges.append(range(min(start, num_tokens), num_tokens))
            found.append(blocks[index])
        return ranges, found
