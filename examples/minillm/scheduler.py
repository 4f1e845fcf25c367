"""Continuous batching as a pure state machine: which request computes which tokens next, who owns which blocks.

A request is WAITING (no blocks), WAITING_FOR_REMOTE_KV (blocks that the connector fills), RUNNING, SWAPPED (its blocks
are in host memory), or over. What is over may still own blocks that the connector reads (HELD: until finished_sending)
or writes (DRAINING: an aborted load, until finished_recving). No clock, no I/O; the engine drives it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from kvconnector.cache.block_manager import AllocStatus
from kvconnector.errors import LocalError
from minillm.config import FailurePolicy
from minillm.messages import SampledToken, SequenceInput, Step, stored_event
from minillm.request import (
    FinishReason,
    Request,
    RequestState,
    RequestUpdate,
    SentTables,
    prompt_end,
)
from minillm.request_blocks import RequestBlocks
from minillm.transfer import SchedulerTransfer, TransferEvents


class Scheduler:
    """All requests of one engine. `schedule` and `update` alternate; `add` and `abort` may come in between."""

    def __init__(
        self,
        blocks: RequestBlocks,
        transfer: SchedulerTransfer,
        *,
        max_model_len: int,
        max_encoder_len: int = 0,
        max_batched_tokens: int,
        max_running: int,
        failure_policy: FailurePolicy,
    ) -> None:
        self.blocks = blocks
        self.transfer = transfer
        self.max_model_len = max_model_len
        self.max_encoder_len = max_encoder_len
        self.max_batched_tokens = max_batched_tokens
        self.max_running = max_running
        self.failure_policy = failure_policy
        self.requests: dict[str, Request] = {}
        self._waiting: deque[Request] = deque()
        self._swapped: deque[Request] = deque()
        self._running: list[Request] = []
        self._tables = SentTables()
        self._steps = 0

    @property
    def has_requests(self) -> bool:
        """Returns True if steps are still needed: also requests that only wait for the connector."""
        return bool(self.requests)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            LocalError: no prompt, a length that the model or the cache cannot hold, too many answers, or an id in use.
        """
        if request.request_id in self.requests:
            raise LocalError("the request id is in use", request_id=request.request_id)
        # before the check, because a refused request has a producer too, which must free its blocks
        self.transfer.on_new_request(request.request_id, request.kv_transfer_params)
        try:
            self._check_size(request)
        except LocalError:
            self.transfer.abort(request.request_id)
            raise
        if self.blocks.has_states and self.transfer.is_offered(request.kv_transfer_params):
            # the consumer computes the last token itself, from the state before it
            request.pause_at = len(request.prompt) - 1 or None
        self.blocks.add(
            request.request_id,
            request.prompt,
            request.pause_at,
            num_answers=request.num_answers,
            encoder_prompt=request.encoder_prompt,
            salt=request.cache_salt,
        )
        self.requests[request.request_id] = request
        self._waiting.append(request)

    def abort(self, request_id: str) -> None:
        """Give up a request. Blocks that the connector may still use stay until it reports them. Idempotent."""
        for fork in [item for item in self.requests.values() if item.root_id == request_id]:
            self._forget(fork)
        request = self.requests.get(request_id)
        if request is None or request.state is RequestState.DRAINING:
            return
        self.transfer.abort(request_id)
        if request.state is RequestState.WAITING_FOR_REMOTE_KV:
            request.state = RequestState.DRAINING
        elif request.state is not RequestState.HELD:
            self._forget(request)

    def schedule(self) -> Step:
        """Return the next step's work within the token budget: running requests, then swapped, then waiting ones."""
        self._steps += 1
        step = Step()
        preempted = self._schedule_running(step)
        while self._swapped and not preempted and self._swap_in(self._swapped[0], step):
            self._swapped.popleft()
        for request in list(self._waiting):
            if self._swapped or not self._has_budget(step):
                break
            if request.ask_connector and self.transfer.is_early(request.request_id):
                continue
            if not self._admit(request):
                break
            self._waiting.remove(request)
            if request.state is RequestState.RUNNING:
                self._running.append(request)
                self._take_in(request, step)
        self._tables.finish(step.tables)
        if len(step.inputs) > 1:
            step.common_blocks = self.blocks.common_blocks(
                [item.request_id for item in step.inputs]
            )
        return step

    def _has_budget(self, step: Step) -> bool:
        return step.num_tokens < self.max_batched_tokens

    def _schedule_running(self, step: Step) -> bool:
        """Add the running requests to the step. Returns True if one had to be preempted."""
        preempted = False
        for request in list(self._running):
            if not self._has_budget(step):
                break
            # those preempted for an earlier one in this loop no longer run
            while request.state is RequestState.RUNNING and not self._take_in(request, step):
                self._preempt_last(step)
                preempted = True
        return preempted

    def _take_in(self, request: Request, step: Step) -> bool:
        """Give a running request slots and its share of the step. Returns False and changes nothing without blocks."""
        stop = request.next_stop(self.max_batched_tokens - step.num_tokens)
        moves = self.blocks.grow(request.request_id, request.num_computed, stop)
        if moves is None:
            return False
        step.moves += moves
        self.blocks.touch(request.request_id, self._steps)
        tables = self.blocks.tables(request.request_id)
        self._tables.update(request.request_id, tables, step.tables)
        computed, ahead = (min(n, len(request.prompt)) for n in (request.num_computed, stop))
        self.transfer.grow(request.request_id, tables, computed, ahead)
        step.inputs.append(
            SequenceInput(
                request_id=request.request_id,
                token_ids=request.tokens(request.num_computed, stop),
                start=request.num_computed,
                num_samples=request.num_answers if stop == request.num_known else 0,
                encoder_token_ids=[] if request.num_computed else request.encoder_prompt,
                num_encoder_tokens=len(request.encoder_prompt),
            )
        )
        return True

    def update(
        self,
        inputs: list[SequenceInput],
        tokens: Mapping[str, Sequence[SampledToken]],
        events: TransferEvents,
    ) -> list[RequestUpdate]:
        """Take the results of a step: computed tokens, sampled tokens, finished transfers."""
        updates: list[RequestUpdate] = []
        for item in inputs:
            request = self.requests.get(item.request_id)
            if request is None or request.state is not RequestState.RUNNING:
                continue  # aborted while the step ran
            request.num_computed = item.start + len(item.token_ids)
            # other requests may reuse a block once all ranks have stored their part of it
            if events.stored is None or stored_event(item) in events.stored:
                self.blocks.mark_computed(item.request_id, request.num_computed)
            if item.num_samples:
                sampled = tokens[item.request_id]
                forks = [self._fork(request, index) for index in range(1, len(sampled))]
                request.num_answers = 1
                for each, token in zip([request, *forks], sampled, strict=True):
                    updates.append(self._book_token(each, token))
        for request_id in events.finished_sending:
            if request := self.requests.get(request_id):
                self._forget(request)
        self.blocks.mark_invalid(events.invalid_blocks)
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
        is_offered = self.transfer.is_offered(request.kv_transfer_params)
        if not 1 <= request.num_answers <= (1 if is_offered else self.max_running):
            raise LocalError(
                "the engine cannot give that many answers at a time",
                num_answers=request.num_answers,
                max_running=self.max_running,
                is_offered=is_offered,
            )
        length = len(request.prompt) + request.max_tokens
        if length > self.max_model_len:
            raise LocalError(
                "prompt and max_tokens exceed the model's length",
                prompt_tokens=len(request.prompt),
                max_tokens=request.max_tokens,
                max_model_len=self.max_model_len,
            )
        encoder_tokens = len(request.encoder_prompt)
        least, most = (1 if self.max_encoder_len else 0), self.max_encoder_len
        if not least <= encoder_tokens <= most or (least and request.num_answers > 1):
            raise LocalError(
                "an encoder-decoder model needs an encoder's input and gives one answer, another has no encoder",
                encoder_tokens=encoder_tokens,
                max_encoder_len=self.max_encoder_len,
                num_answers=request.num_answers,
            )
        if not self.blocks.can_ever_hold(length, encoder_tokens):
            raise LocalError(
                "the request can never fit into the cache",
                tokens=length,
                encoder_tokens=encoder_tokens,
                blocks=self.blocks.num_blocks,
            )

    def _has_free_place(self, request: Request) -> bool:
        """Return True if the request can run together with all the answers that it will fork into."""
        busy = (RequestState.RUNNING, RequestState.WAITING_FOR_REMOTE_KV)
        places = sum(each.num_answers for each in self.requests.values() if each.state in busy)
        return places + request.num_answers <= self.max_running

    def _fork(self, request: Request, answer: int) -> Request:
        """Add another answer, which shares the request's blocks until one of them writes."""
        fork = request.fork(answer)
        self.blocks.fork(request.request_id, fork.request_id)
        self.requests[fork.request_id] = fork
        self._running.append(fork)
        return fork

    def _admit(self, request: Request) -> bool:
        """Give a waiting request its blocks and a new state. Returns False if it has to keep waiting."""
        if not self._has_free_place(request):
            return False
        hit = self.blocks.find_hit(request.request_id)
        external, is_async = 0, False
        if request.ask_connector:
            external, is_async = self.transfer.matched_tokens(
                request.request_id, len(request.prompt), hit, request.kv_transfer_params
            )
        if self.blocks.can_allocate(request.request_id, hit + external) is not AllocStatus.OK:
            return False
        target = self.blocks.allocate(request.request_id, hit + external)
        if request.ask_connector:
            self.transfer.after_alloc(
                request.request_id, target, external, len(request.encoder_prompt)
            )
            request.num_cached = hit
            request.ask_connector = False
        request.num_computed = hit + external
        loads = external > 0 and is_async
        request.state = RequestState.WAITING_FOR_REMOTE_KV if loads else RequestState.RUNNING
        return True

    def _preempt_last(self, step: Step) -> None:
        """Take the blocks of the youngest running request that is not yet in this step.

        They go to host memory; where that is full, the request will be recomputed.
        """
        scheduled = {item.request_id for item in step.inputs}
        victim = next(r for r in reversed(self._running) if r.request_id not in scheduled)
        self._running.remove(victim)
        self._tables.release(victim.request_id)
        self.transfer.withdraw(victim.request_id)
        if self.blocks.can_swap_out(victim.request_id):
            step.moves += self.blocks.swap_out(victim.request_id)
            victim.state = RequestState.SWAPPED
            self._swapped.append(victim)
            return
        self._recompute(victim)

    def _recompute(self, request: Request) -> None:
        """Free the request's blocks; it will start again after the tokens that are cached at that time."""
        self.blocks.release(request.request_id)
        request.num_computed = 0
        request.state = RequestState.WAITING
        self._waiting.appendleft(request)

    def _swap_in(self, request: Request, step: Step) -> bool:
        """Let a swapped request continue. Returns False if it must stay swapped out."""
        if not (self._has_budget(step) and self._has_free_place(request)):
            return False
        if not self.blocks.can_swap_in(request.request_id):
            return False
        step.moves += self.blocks.swap_in(request.request_id)
        request.state = RequestState.RUNNING
        self._running.append(request)
        # if a block is missing now, the next step takes it in
        self._take_in(request, step)
        return True

    def _book_token(self, request: Request, token: SampledToken) -> RequestUpdate:
        request.output.append(token)
        self.blocks.append_token(request.request_id, token.token_id)
        reason: FinishReason | None = None
        if token.token_id in request.stop_token_ids:
            reason = "stop"
        elif len(request.output) >= request.max_tokens:
            reason = "length"
        params = self._finish(request) if reason else None
        return RequestUpdate(
            request_id=request.root_id or request.request_id,
            answer=request.answer,
            token=token,
            finish_reason=reason,
            kv_transfer_params=params,
            cached_tokens=request.num_cached if reason else 0,
        )

    def _finish(self, request: Request) -> dict[str, Any] | None:
        """End a running request; its blocks stay while the connector serves them. Returns the response's params."""
        if request.root_id:
            self._forget(request)
            return None
        offer = None
        if self.transfer.is_offered(request.kv_transfer_params):
            offer = self.blocks.offer(request.request_id, len(request.prompt))
        hold, params = self.transfer.finished(
            request.request_id,
            offer,
            len(request.prompt),
            len(request.encoder_prompt),
            request.kv_transfer_params,
            end=b"" if offer is None else prompt_end(request),
        )
        if hold:
            self._running.remove(request)
            self._tables.release(request.request_id)
            request.state = RequestState.HELD
        else:
            self._forget(request)
        return params

    def _book_load(self, request_id: str, error: str | None) -> list[RequestUpdate]:
        """Let a request continue after its load's valid tokens. If the load failed, the policy may fail the request."""
        loading = (RequestState.WAITING_FOR_REMOTE_KV, RequestState.DRAINING)
        request = self.requests.get(request_id)
        if request is None or request.state not in loading:
            return []
        num_valid = self.blocks.take_valid_tokens(request_id, request.num_computed)
        if request.state is RequestState.DRAINING:
            self._forget(request)
            return []
        if error is not None and self.failure_policy == "fail":
            self.transfer.abort(request_id)
            self._forget(request)
            return [RequestUpdate(request_id=request_id, finish_reason="error", error=error)]
        if num_valid < request.num_computed and not self.blocks.keeps_all_tokens:
            # a group that forgets may lack tokens that the first invalid one needs, or may have found more than the
            # others, so the step would write into cached blocks
            self._recompute(request)
            return []
        request.num_computed = num_valid
        self.blocks.mark_computed(request_id, request.num_computed)
        request.state = RequestState.RUNNING
        self._running.append(request)
        return []

    def _forget(self, request: Request) -> None:
        self.blocks.remove(request.request_id)
        self._tables.release(request.request_id)
        del self.requests[request.request_id]
        for queue in (self._running, self._waiting, self._swapped):
            if request in queue:
                queue.remove(request)
