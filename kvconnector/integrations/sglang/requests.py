"""Translates a request's pages, state slots and metadata row to blocks of the cache groups. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kvconnector.errors import BlockIdError
from kvconnector.layout import GroupBlocks

NO_BLOCKS = GroupBlocks.of(())


PAGED = {"kv": 1, "dsa": 1, "c4": 4, "c128": 128}
"""Tokens that one row stands for, in the groups whose blocks are the prompt's pages. These groups are read while the
prompt is computed, all others once it is complete.
"""
C128 = 128
"""Tokens in the longer of DeepSeek-V4's rows."""
C128_STATES = ("c128-state", "c128-online")


class Group(NamedTuple):
    """How a request's blocks in one cache group follow from SGLang's ids.

    Kinds, by what a block is:

    - "kv" (the model's pages, and its draft model's), "dsa" (its sparse indexer's keys), "c4" and "c128" (DeepSeek-V4's
      rows of 4 and of 128 tokens): a page of the prompt.
    - "swa": a page of a sliding window.
    - "c4-state": the state of one token, in a ring that belongs to a page of the window. The states of the tokens after
      the last complete row, and of the row before it, are needed: the rows of 4 overlap.
    - "c128-state": a ring page, with the states of the tokens after the last complete row of 128. There is none if no
      token is left over.
    - "c128-online": the same, accumulated in one state.
    - "mamba": a slot with the state after the last token.
    - "row": a row of metadata.

    `component` is the index of the SGLang state whose ids name the blocks, or None for pages of the prompt and the row.
    `ring` is the number of tokens in a ring of a "c4-state" group. `is_draft`: the group is a draft model's, which the
    other engine may lack.
    """

    kind: str
    component: int | None = None
    ring: int = 0
    is_draft: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    """The cache groups of an engine, in registration order; those of a draft model come last.

    A page has `page_size` tokens, and SGLang lists ids for `num_states` states.
    """

    groups: tuple[Group, ...]
    page_size: int
    num_states: int = 0

    def growing(self, pages: GroupBlocks) -> tuple[GroupBlocks, ...]:
        """Return each group's readable blocks while the prompt is computed."""
        return tuple(pages if group.kind in PAGED else NO_BLOCKS for group in self.groups)

    def blocks(
        self, pages: GroupBlocks, states: Sequence[Any], row: int, num_tokens: int
    ) -> tuple[GroupBlocks, ...]:
        """Return each group's blocks once the whole prompt is computed.

        Args:
            pages: The pages of its tokens.
            states: SGLang's ids for each state, as numbers or arrays: the last pages of a window, the pages of the
                prompt, one slot, or a ring's page.
            row: The request's row of metadata.
            num_tokens: The prompt's length in tokens.

        Raises:
            BlockIdError: `states` does not fit the groups, the prompt is empty, or a window has more pages than it.
        """
        named = [[int(each) for some in state for each in np.ravel(some)] for state in states]
        if len(named) != self.num_states or num_tokens < 1:
            raise BlockIdError(
                "a request needs at least one token, and ids for every state",
                named=named,
                states=self.num_states,
                num_tokens=num_tokens,
            )
        return tuple(
            pages
            if group.kind in PAGED
            else self._state_blocks(group, [row] if at is None else named[at], num_tokens)
            for group in self.groups
            for at in (group.component,)
        )

    def _state_blocks(self, group: Group, ids: list[int], num_tokens: int) -> GroupBlocks:
        kind, end = group.kind, -(-num_tokens // self.page_size)
        if kind == "swa":
            return GroupBlocks.of(ids, end - len(ids))
        if kind == "c4-state":
            first = end - len(ids)
            start = max(first * self.page_size, num_tokens - num_tokens % 4 - 4)
            tokens = range(start, num_tokens)
            slots = [
                ids[token // self.page_size - first] * group.ring + token % group.ring
                for token in tokens
            ]
            return GroupBlocks.of(slots, start)
        leaves_none = kind in C128_STATES and num_tokens % C128 == 0
        if len(ids) != (0 if leaves_none else 1):
            raise BlockIdError(
                "a state must have one slot, or none if a row of 128 tokens ends with the prompt",
                kind=kind,
                slots=ids,
                num_tokens=num_tokens,
            )
        if kind == "c128-state":
            return GroupBlocks.of(ids, num_tokens // C128)
        return GroupBlocks.of(ids, num_tokens - len(ids))

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
        """Return the range of rows `[start, stop)` that a decode engine reads in each group, and its blocks for them.

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
        has_window = any(group.kind == "swa" for group in self.groups)
        if prefix_tokens % self.page_size or (has_window and not window_tokens):
            raise BlockIdError(
                "a cached prefix must end at a page boundary, and a window needs a length",
                prefix_tokens=prefix_tokens,
                page_size=self.page_size,
                window_tokens=window_tokens,
            )
        kv = GroupBlocks.of(pages, prefix_tokens // self.page_size)
        blocks = self.blocks(kv, states, row, num_tokens)
        ranges = []
        for group, held in zip(self.groups, blocks, strict=True):
            start, stop = 0, num_tokens
            if row_tokens := PAGED.get(group.kind):
                start, stop = prefix_tokens // row_tokens, num_tokens // row_tokens
            elif group.kind == "swa":
                first = held.first_block * self.page_size
                if first > max(prefix_tokens, num_tokens - (window_tokens or 0), 0):
                    raise BlockIdError(
                        "a window needs the pages of all its tokens that are not cached",
                        first_token=first,
                        window_tokens=window_tokens,
                        num_tokens=num_tokens,
                        prefix_tokens=prefix_tokens,
                    )
                start = max(first, num_tokens - (window_tokens or 0))
            elif group.kind == "c128-state":
                start = held.first_block * C128
            else:
                start = held.first_block
            ranges.append((min(start, stop), stop))
        return tuple(ranges), blocks
