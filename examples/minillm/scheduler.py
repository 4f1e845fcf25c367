"""Continuous batching as a pure state machine: which request computes which tokens next, who owns which blocks.

A request is WAITING (no blocks), WAITING_FOR_REMOTE_KV (blocks that the connector fills), RUNNING, or over. What is
over may still own blocks that the connector reads (HELD: until finished_sending) or writes (DRAINING: an aborted
load, until finished_recving). No clock, no I/O; the engine drives it.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kvconnector.errors import LocalError
from minillm.blocks import AllocStatus, BlockManager
from minillm.config import FailurePolicy
from minillm.messages import SampledToken, SequenceInput
from minillm.transfer import SchedulerTransfer, TransferEvents

FinishReason = Literal["stop", "length", "error"]


class RequestState(enum.Enum):
    """Where a request is; see the module's docstring."""

    WAITING = enum.auto()
    WAITING_FOR_REMOTE_KV = enum.auto()
    RUNNING = enum.auto()
    HELD = enum.auto()
    DRAINING = enum.auto()


@dataclass(slots=True, eq=False)
class Request:
    """One completion: what was asked, and how far it is. `num_computed` counts tokens whose KV is in the cache."""

    request_id: str
    prompt: list[int]
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    kv_transfer_params: dict[str, Any] | None = None
    state: RequestState = RequestState.WAITING
    output: list[SampledToken] = field(default_factory=list)
    num_computed: int = 0
    num_external: int = 0
    ask_connector: bool = True

    @property
    def num_known(self) -> int:
        """Prompt tokens and sampled tokens."""
        return len(self.prompt) + len(self.output)

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


class Scheduler:
    """All requests of one engine. `schedule` and `update` alternate; `add` and `abort` may come in between."""

    def __init__(
        self,
        blocks: BlockManager,
        transfer: SchedulerTransfer,
        *,
        max_model_len: int,
        max_batched_tokens: int,
        max_running: int,
        failure_policy: FailurePolicy,
    ) -> None:
        self.blocks = blocks
        self.transfer = transfer
        self.max_model_len = max_model_len
        self.max_batched_tokens = max_batched_tokens
        self.max_running = max_running
        self.failure_policy = failure_policy
        self.requests: dict[str, Request] = {}
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []

    @property
    def has_tokens_to_compute(self) -> bool:
        """Whether the next step may compute something."""
        return bool(self._waiting or self._running)

    @property
    def has_requests(self) -> bool:
        """Whether steps are still needed: also requests that only wait for the connector."""
        return bool(self.requests)

    def counts(self) -> dict[RequestState, int]:
        """Number of requests in each state."""
        found = [request.state for request in self.requests.values()]
        return {state: found.count(state) for state in RequestState}

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            LocalError: no prompt, a length that the model or the cache cannot hold, or an id in use.
        """
        if request.request_id in self.requests:
            raise LocalError("the request id is in use", request_id=request.request_id)
        # before the check: a request that is refused has a producer too, which is to free its blocks
        self.transfer.on_new_request(request.request_id, request.kv_transfer_params)
        try:
            self._check_size(request)
        except LocalError:
            self.transfer.abort(request.request_id)
            raise
        self.requests[request.request_id] = request
        self._waiting.append(request)

    def abort(self, request_id: str) -> None:
        """The client is gone. Blocks that the connector may still touch stay until it says so. Idempotent."""
        request = self.requests.get(request_id)
        if request is None or request.state is RequestState.DRAINING:
            return
        self.transfer.abort(request_id)
        if request.state is RequestState.WAITING_FOR_REMOTE_KV:
            request.state = RequestState.DRAINING
        elif request.state is not RequestState.HELD:
            self._forget(request)

    def schedule(self) -> list[SequenceInput]:
        """The next step's work, running requests first, within the token budget."""
        budget = self.max_batched_tokens
        inputs: list[SequenceInput] = []
        for request in list(self._running):
            if budget == 0:
                break
            if request.state is not RequestState.RUNNING:
                continue  # preempted by an earlier one in this very loop
            while not self.blocks.append_slots(request.request_id, request.num_known):
                if self._preempt_last(keep=inputs) is request:
                    break
            else:
                inputs.append(self._input(request, budget))
                budget -= len(inputs[-1].token_ids)
        while self._waiting and budget > 0 and self._admit(self._waiting[0]):
            request = self._waiting.popleft()
            if request.state is RequestState.RUNNING:
                self._running.append(request)
                inputs.append(self._input(request, budget))
                budget -= len(inputs[-1].token_ids)
        return inputs

    def update(
        self,
        inputs: list[SequenceInput],
        tokens: Mapping[str, SampledToken],
        events: TransferEvents,
    ) -> list[RequestUpdate]:
        """Book a finished step: computed tokens, sampled tokens, finished transfers."""
        updates: list[RequestUpdate] = []
        for item in inputs:
            request = self.requests.get(item.request_id)
            if request is None or request.state is not RequestState.RUNNING:
                continue  # aborted while the step ran
            request.num_computed = item.start + len(item.token_ids)
            if item.sample:
                updates.append(self._book_token(request, tokens[item.request_id]))
        for request_id in events.finished_sending:
            if request := self.requests.get(request_id):
                self._forget(request)
        for request_id in events.finished_recving:
            updates.extend(self._book_load(request_id, events.failed_recving.get(request_id)))
        return updates

    def _check_size(self, request: Request) -> None:
        if not request.prompt or request.max_tokens < 1:
            raise LocalError(
                "a completion needs at least one prompt token and max_tokens >= 1",
                prompt_tokens=len(request.prompt),
                max_tokens=request.max_tokens,
            )
        length = len(request.prompt) + request.max_tokens
        if length > self.max_model_len:
            raise LocalError(
                "prompt and max_tokens exceed the model's length",
                prompt_tokens=len(request.prompt),
                max_tokens=request.max_tokens,
                max_model_len=self.max_model_len,
            )
        if self.blocks.can_allocate(length) is AllocStatus.NEVER:
            raise LocalError(
                "the request can never fit into the cache",
                tokens=length,
                cache_tokens=self.blocks.num_blocks * self.blocks.block_size,
            )

    def _admit(self, request: Request) -> bool:
        """Give a waiting request its blocks and a new state; False if it has to wait on."""
        active = self.requests.values()
        busy = (RequestState.RUNNING, RequestState.WAITING_FOR_REMOTE_KV)
        if sum(other.state in busy for other in active) >= self.max_running:
            return False
        if self.blocks.can_allocate(request.num_known) is not AllocStatus.OK:
            return False
        external, is_async = 0, False
        if request.ask_connector:
            external, is_async = self.transfer.matched_tokens(
                request.request_id, len(request.prompt), request.kv_transfer_params
            )
        self.blocks.allocate(request.request_id, request.num_known)
        if request.ask_connector:
            table = self.blocks.get_block_table(request.request_id)
            self.transfer.after_alloc(request.request_id, table, external)
            request.ask_connector = False
        request.num_external = external
        loads = external > 0 and is_async
        request.state = RequestState.WAITING_FOR_REMOTE_KV if loads else RequestState.RUNNING
        return True

    def _input(self, request: Request, budget: int) -> SequenceInput:
        stop = min(request.num_known, request.num_computed + budget)
        return SequenceInput(
            request_id=request.request_id,
            token_ids=request.tokens(request.num_computed, stop),
            start=request.num_computed,
            block_ids=self.blocks.get_block_table(request.request_id),
            sample=stop == request.num_known,
        )

    def _preempt_last(self, keep: list[SequenceInput]) -> Request:
        """Take the blocks of the youngest running request that is not yet in this step; it will be recomputed."""
        scheduled = {item.request_id for item in keep}
        victim = next(r for r in reversed(self._running) if r.request_id not in scheduled)
        self._running.remove(victim)
        self.blocks.free(victim.request_id)
        victim.num_computed = 0
        victim.state = RequestState.WAITING
        self._waiting.appendleft(victim)
        return victim

    def _book_token(self, request: Request, token: SampledToken) -> RequestUpdate:
        request.output.append(token)
        reason: FinishReason | None = None
        if token.token_id in request.stop_token_ids:
            reason = "stop"
        elif len(request.output) >= request.max_tokens:
            reason = "length"
        params = self._finish(request) if reason else None
        return RequestUpdate(
            request_id=request.request_id,
            token=token,
            finish_reason=reason,
            kv_transfer_params=params,
        )

    def _finish(self, request: Request) -> dict[str, Any] | None:
        """End a running request; its blocks stay while the connector serves them. Returns the response's params."""
        hold, params = self.transfer.finished(
            request.request_id,
            self.blocks.get_block_table(request.request_id),
            len(request.prompt),
            request.kv_transfer_params,
        )
        if hold:
            self._running.remove(request)
            request.state = RequestState.HELD
        else:
            self._forget(request)
        return params

    def _book_load(self, request_id: str, error: str | None) -> list[RequestUpdate]:
        """A load ended: run on behind the loaded tokens, or by the failure policy from the start or not at all."""
        request = self.requests.get(request_id)
        if request is None:
            return []
        if request.state is RequestState.DRAINING:
            self._forget(request)
            return []
        if request.state is not RequestState.WAITING_FOR_REMOTE_KV:
            return []
        if error is not None and self.failure_policy == "fail":
            self.transfer.abort(request_id)
            self._forget(request)
            return [RequestUpdate(request_id=request_id, finish_reason="error", error=error)]
        request.num_computed = request.num_external if error is None else 0
        request.state = RequestState.RUNNING
        self._running.append(request)
        return []

    def _forget(self, request: Request) -> None:
        self.blocks.free(request.request_id)
        del self.requests[request.request_id]
        if request in self._running:
            self._running.remove(request)
        if request in self._waiting:
            self._waiting.remove(request)
