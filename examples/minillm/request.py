"""A request as the scheduler sees it, and what it tells the engine about it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, Literal

from minillm.messages import BlockMove, SampledToken, SequenceInput

FinishReason = Literal["stop", "length", "error"]


class RequestState(enum.Enum):
    """Where a request is; see the scheduler's module."""

    WAITING = enum.auto()
    WAITING_FOR_REMOTE_KV = enum.auto()
    RUNNING = enum.auto()
    SWAPPED = enum.auto()
    HELD = enum.auto()
    DRAINING = enum.auto()


@dataclass(slots=True, eq=False)
class Request:
    """One completion: what was asked, and how far it is. `num_computed` counts tokens whose KV is in the cache.

    Of the prompt, `num_cached` tokens were found in this engine's cache and `num_external` come from another engine.
    """

    request_id: str
    prompt: list[int]
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    kv_transfer_params: dict[str, Any] | None = None
    state: RequestState = RequestState.WAITING
    output: list[SampledToken] = field(default_factory=list)
    num_computed: int = 0
    num_cached: int = 0
    num_external: int = 0
    ask_connector: bool = True
    pause_at: int | None = None
    """A step must end behind this many tokens: what the cache holds then is kept for a consumer."""

    @property
    def num_known(self) -> int:
        """Prompt tokens and sampled tokens."""
        return len(self.prompt) + len(self.output)

    def next_stop(self, budget: int) -> int:
        """End of the tokens that the next step computes, at most `budget` of them."""
        stop = min(self.num_known, self.num_computed + budget)
        if self.pause_at is not None and self.num_computed < self.pause_at:
            return min(stop, self.pause_at)
        return stop

    def tokens(self, start: int, stop: int) -> list[int]:
        """Known tokens at positions `[start, stop)`."""
        length = len(self.prompt)
        sampled = self.output[max(0, start - length) : max(0, stop - length)]
        return self.prompt[start:stop] + [item.token_id for item in sampled]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestUpdate:
    """What a step meant for one request: a token, its end, or both. `error` goes with the reason `"error"`."""

    request_id: str
    token: SampledToken | None = None
    finish_reason: FinishReason | None = None
    error: str = ""
    kv_transfer_params: dict[str, Any] | None = None
    cached_tokens: int = 0
    """At the end: tokens of the prompt that were found in this engine's cache."""


@dataclass(slots=True)
class Schedule:
    """One step's work for the ranks: block moves in order, then the sequences."""

    inputs: list[SequenceInput] = field(default_factory=list)
    moves: list[BlockMove] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens to compute."""
        return sum(len(item.token_ids) for item in self.inputs)


class TableRows:
    """Which row of the ranks' block tables a request has, and what they know of it."""

    def __init__(self, num_rows: int) -> None:
        self._free = list(range(num_rows))[::-1]
        self._held: dict[str, tuple[int, list[list[int]]]] = {}

    def update(self, request_id: str, tables: list[list[int]]) -> tuple[int, list[list[int]], bool]:
        """`(row, block ids by group, whether they replace the row's)` that make the ranks' row equal to `tables`."""
        held = self._held.get(request_id)
        row, known = held if held is not None else (self._free.pop(), None)
        self._held[request_id] = (row, tables)
        if known is None or any(
            table[: len(old)] != old for table, old in zip(tables, known, strict=True)
        ):
            return row, tables, True
        news = [table[len(old) :] for table, old in zip(tables, known, strict=True)]
        return row, news, False

    def release(self, request_id: str) -> None:
        """The request computes nothing for now; nothing if it has no row."""
        held = self._held.pop(request_id, None)
        if held is not None:
            self._free.append(held[0])
