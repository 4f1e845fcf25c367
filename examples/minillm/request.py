"""A request as the scheduler sees it, and the scheduler's updates for the engine."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec

from kvconnector.integrations.identity import (
    GREEDY,
    Identity,
    PromptEnd,
    content_digest,
    digest_of,
)
from minillm.messages import NewRequest, SampledToken, TableChanges

FinishReason = Literal["stop", "length", "error"]


class RequestState(enum.Enum):
    """State of a request; see the scheduler's module."""

    WAITING = enum.auto()
    WAITING_FOR_REMOTE_KV = enum.auto()
    RUNNING = enum.auto()
    SWAPPED = enum.auto()
    HELD = enum.auto()
    DRAINING = enum.auto()


@dataclass(slots=True, eq=False)
class Request:
    """One completion: the request and its progress.

    `num_computed` counts tokens whose KV is in the cache, or being loaded from another engine. `num_cached` tokens of
    the prompt were found in this engine's cache.
    """

    request_id: str
    prompt: list[int]
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    cache_salt: str = ""
    encoder_prompt: list[int] = field(default_factory=list)
    """The encoder's input, of a model that has one."""
    kv_transfer_params: dict[str, Any] | None = None
    state: RequestState = RequestState.WAITING
    output: list[SampledToken] = field(default_factory=list)
    num_computed: int = 0
    num_cached: int = 0
    ask_connector: bool = True
    pause_at: int | None = None
    """A step must end after this many tokens, because the cache's content at that point is kept for a consumer."""
    num_answers: int = 1
    """Answers that this request will fork into; the i-th begins with the i-th likeliest token."""
    answer: int = 0

    def fork(self, answer: int) -> Request:
        """Return another answer to the same prompt, which has not begun."""
        return replace(
            self,
            request_id=f"{self.request_id}/{answer}",
            answer=answer,
            num_answers=1,
            output=list(self.output),
            kv_transfer_params=None,
        )

    @property
    def root_id(self) -> str:
        """Id of the request that a fork answers; "" if it is no fork."""
        return self.request_id.removesuffix(f"/{self.answer}") if self.answer else ""

    @property
    def num_known(self) -> int:
        """Prompt tokens and sampled tokens."""
        return len(self.prompt) + len(self.output)

    def next_stop(self, budget: int) -> int:
        """Return the end of the tokens that the next step computes, at most `budget` of them."""
        stop = min(self.num_known, self.num_computed + budget)
        if self.pause_at is not None and self.num_computed < self.pause_at:
            return min(stop, self.pause_at)
        return stop

    def tokens(self, start: int, stop: int) -> list[int]:
        """Return the known tokens at positions `[start, stop)`."""
        length = len(self.prompt)
        sampled = self.output[max(0, start - length) : max(0, stop - length)]
        return self.prompt[start:stop] + [item.token_id for item in sampled]


def prompt_end(request: Request) -> bytes:
    """Return what engines of other kinds learn of a request's prompt when it is computed: its digest and its first
    token, which some of them (SGLang) cannot compute themselves.
    """
    salt = request.cache_salt
    context = {"salt": content_digest(salt.encode("utf-8", "surrogatepass"))} if salt else {}
    computed = Identity(len(request.prompt), digest_of(request.prompt), context)
    token = request.output[0].token_id if request.output else None
    return msgspec.msgpack.encode(PromptEnd(token, GREEDY, len(request.prompt), computed))


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestUpdate:
    """A step's result for one request: a token, its end, or both. `error` is set if the finish reason is `"error"`."""

    request_id: str
    answer: int = 0
    token: SampledToken | None = None
    finish_reason: FinishReason | None = None
    error: str = ""
    kv_transfer_params: dict[str, Any] | None = None
    cached_tokens: int = 0
    """With the last update: tokens of the prompt that were found in this engine's cache."""


class SentTables:
    """The requests' block tables as the ranks know them."""

    def __init__(self) -> None:
        self._sent: dict[str, list[list[int]]] = {}
        self._finished: list[str] = []

    def update(self, request_id: str, tables: list[list[int]], changes: TableChanges) -> None:
        """Add to `changes` the changes that make the ranks' tables of a request equal to `tables`, by cache group."""
        known = self._sent.get(request_id)
        self._sent[request_id] = tables
        if known is None:
            changes.scheduled_new_reqs.append(NewRequest(request_id, tables))
            return
        running = changes.scheduled_cached_reqs
        added = [table[len(old) :] for table, old in zip(tables, known, strict=True)]
        if any(table[: len(old)] != old for table, old in zip(tables, known, strict=True)):
            running.resumed_req_ids.add(request_id)
            added = tables
        running.req_ids.append(request_id)
        running.new_block_ids.append(added if any(added) else None)

    def release(self, request_id: str) -> None:
        """Record that the request computes nothing for now. Does nothing if the ranks do not know it."""
        if self._sent.pop(request_id, None) is not None:
            self._finished.append(request_id)

    def finish(self, changes: TableChanges) -> None:
        """Add to `changes` the requests that were released since the last step."""
        changes.finished_req_ids.extend(self._finished)
        self._finished.clear()
