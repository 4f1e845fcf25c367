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
    """The cache groups of an engine: "kv", "swa" or "mamba" each, and the rows of metadata as the last one.

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
        """The blocks of the groups that are read at the end of a prompt.

        Args:
            states: For each of SGLang's states the ids that it names, as numbers or arrays: pages of a window's
                tail, or one slot.
            row: The row of metadata.
            num_tokens: The prompt's length.

        Returns:
            By the groups' numbers.

        Raises:
            BlockIdError: not as many states as groups, or pages beyond the prompt's.
        """
        others = [index for index, kind in enumerate(self.kinds) if kind != "kv"]
        if len(states) != len(others) or num_tokens < 1:
            raise BlockIdError(
                "a request names its blocks of every state, and has a token",
                states=len(states),
                groups=[self.kinds[index] for index in others],
                num_tokens=num_tokens,
            )
        blocks = {len(self.kinds): GroupBlocks.of([row], num_tokens - 1)}
        for index, state in zip(others, states, strict=True):
            ids = [int(each) for some in state for each in np.ravel(some)]
            if self.kinds[index] == "swa":
                first = -(-num_tokens // self.page_size) - len(ids)
            else:
                first = num_tokens - 1
                if len(ids) != 1:
                    raise BlockIdError("a request has one state", given=len(ids))
            blocks[index] = GroupBlocks.of(ids, first)
        return blocks

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
        """The tokens that a decode engine reads, and where to.

        Args:
            pages: Of the tokens past its prefix.
            states: As in `last_blocks`.
            row: The row of metadata.
            prefix_tokens: Tokens that it has cached, in whole pages.
            num_tokens: The prompt's length.
            window_tokens: Of these last tokens a window's pages are needed. Pages of two sizes begin at different
                tokens before.

        Returns:
            Of each group the tokens and the blocks.

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
        last = self.last_blocks(states, row, num_tokens)
        kv = GroupBlocks.of(list(pages), prefix_tokens // self.page_size)
        ranges, blocks = [], []
        for index in range(len(self.kinds) + 1):
            own = last.get(index, kv)
            start = num_tokens - 1
            if index not in last:
                start = prefix_tokens
            elif index < len(self.kinds) and self.kinds[index] == "swa":
                start = max(own.first_block * self.page_size, num_tokens - (window_tokens or 0))
            ranges.append(range(min(start, num_tokens), num_tokens))
            blocks.append(own)
        return ranges, blocks
