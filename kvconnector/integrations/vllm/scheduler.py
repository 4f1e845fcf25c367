"""The scheduler half: translates between vLLM's requests, block tables and outputs and `runtime.Scheduler`.

No input from a request or a worker may raise an error here: it would end vLLM's engine core, and all other requests.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

from kvconnector.errors import KVConnectorError, LocalError
from kvconnector.integrations.identity import Identity, PromptEnd, digest_of
from kvconnector.integrations.vllm.answers import failure_params
from kvconnector.integrations.vllm.blocks import kernel_block_ids, request_blocks, retention_of
from kvconnector.integrations.vllm.cores import parents_cores
from kvconnector.integrations.vllm.first_token import FirstTokens
from kvconnector.integrations.vllm.messages import (
    ConnectorStep,
    GroupInfo,
    Handshake,
    HandshakeMetadata,
    WorkerReport,
)
from kvconnector.integrations.vllm.outputs import scheduler_obstacle
from kvconnector.integrations.vllm.params import (
    BEFORE_END,
    CONTEXT,
    FIRST_TOKEN,
    NO_PARAMS,
    PREFIXES,
    TOKENS_DIGEST,
    PromptContexts,
    RequestParams,
    decoded,
    identities,
    media_namespace,
    prefix_digests,
    usable_tokens,
)
from kvconnector.integrations.vllm.settings import Settings, traces_endpoint
from kvconnector.integrations.vllm.tracking import IdleSteps, PartlyFilled, Reports, Siblings
from kvconnector.runtime import Scheduler, TransferParams, WorkerOutput

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvconnector.integrations.tracing import RequestSpans

logger = logging.getLogger(__name__)

MAX_NOTED = 4096
"""Engines of which the log has said that they state too little."""
ENDED_WELL = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


class SchedulerHalf:
    """The part of the connector in an engine's scheduler, for a producer, a consumer or both."""

    def __init__(self, vllm_config: VllmConfig, settings: Settings) -> None:
        self._settings = settings
        self._vllm_config = vllm_config
        self._groups: tuple[GroupInfo, ...] = ()
        self.delivers = settings.config.role != "consumer"
        """True if other engines may read the blocks of finished requests."""
        self._started: Scheduler | None = None
        self._handshakes: list[Handshake] = []
        self._asked: dict[str, RequestParams] = {}
        """What the `kv_transfer_params` of each request that is not over ask for; nothing if they were refused."""
        self._contexts = PromptContexts(media_namespace(vllm_config))
        self._unstated: set[str] = set()
        self._siblings = Siblings()
        self._shortened: set[str] = set()
        self._streamed: dict[str, Request] = {}
        self._identities: dict[str, tuple[Identity, ...]] = {}
        """Those of streamed prompts that the next step loads."""
        self._idle_steps = IdleSteps(vllm_config)
        obstacle = scheduler_obstacle(vllm_config) if self._loads else ""
        self.first_tokens = FirstTokens(vllm_config, settings.first_token, obstacle=obstacle)
        self._failures: dict[str, str] = {}
        """Why loads failed that ended in this step, by request."""
        self._sent, self._received = Reports(), Reports()
        self.partly_filled = PartlyFilled()
        self._spans = _request_spans(vllm_config, settings.config.engine_id)
        self.has_orders_of_reset = False
        """True until a step takes what `reset` has ordered. The engine may be paused, and then plans no other step."""

    def set_handshake(self, metadata: Mapping[tuple[int, ...], HandshakeMetadata]) -> None:
        """Take all workers' registrations, and start a producer's directory service. vLLM 0.33 calls this again when
        the engine wakes up, which changes nothing. Raises KVConnectorError: the workers do not form one engine, or the
        address or the keys cannot be used.
        """
        foreign = {
            type(item).__name__
            for item in metadata.values()
            if not isinstance(item, HandshakeMetadata)
        }
        if foreign:
            raise LocalError(
                "KVConnector received another connector's handshake: only one child of a MultiConnector may"
                " transfer between engines",
                found=sorted(foreign),
            )
        handshakes = [item.decode() for item in metadata.values()]
        groups = {handshake.groups for handshake in handshakes}
        if len(groups) != 1:
            raise LocalError("the workers registered different cache groups", groups=groups)
        if self._started is not None:
            if handshakes != self._handshakes:
                raise LocalError("the workers have already registered, with other caches")
            return
        self._groups = groups.pop()
        self.partly_filled.register(self._groups, handshakes[0].worker.geometry.groups)
        with parents_cores():
            self._started = Scheduler(
                self._settings.config,
                [handshake.worker for handshake in handshakes],
                retentions=[retention_of(info) for info in self._groups],
                tables=[info.vllm_group for info in self._groups],
            )
        self._handshakes = handshakes

    @property
    def _scheduler(self) -> Scheduler:
        if self._started is None:
            raise LocalError("the workers must register before the first request")
        return self._started

    @property
    def _loads(self) -> bool:
        return self._settings.config.role != "producer"

    @property
    def completes_divergent_hits(self) -> bool:
        """True if a load brings everything that groups lack after different local hits: states, but neither windows nor
        tokens of a group that has fewer than vLLM's first one with all tokens, from whose hit on tokens are loaded.
        """
        kept = {info.vllm_group: info.keeps for info in self._groups if info.keeps != "state"}
        return list(kept.values()) == ["all"]

    def on_new_request(self, request: Request) -> None:
        """Take a queued request: leave the end of its prompt to the decode engine, or keep a producer's lease alive."""
        if not request.kv_transfer_params:
            return
        if self._spans is not None:
            self._spans.on_new_request(request.request_id, request.trace_headers)
        asked = self._decoded(request)
        if asked is None:
            return
        self._asked[request.request_id] = asked
        if asked.for_decoder:
            self._leave_to_decoder(request, asked)
            alone = {**asked.mapping, "do_remote_prefill": False}
            is_streamed = self.delivers and self._settings.config.stream and asked.names_transfer
            if is_streamed and self._tell_scheduler(request, alone):
                self._streamed[request.request_id] = request
        if asked.offer is not None and self._loads:
            self._expect(request, asked, asked.offer)

    def _expect(self, request: Request, asked: RequestParams, offer: TransferParams) -> None:
        """Connect to the producer that has a request's blocks, or ask for none of them if they are another prompt's."""
        name, engine = request.request_id, offer.remote_engine_id
        if not self._siblings.add(name, engine, offer.remote_request_id):
            return  # the request reads the prefix cache later, and samples its own first token
        usable, other = usable_tokens(asked, request, self._contexts)
        mapping = {**asked.mapping, "do_remote_decode": False}
        if usable and other:
            mapping["remote_num_tokens"] = usable
        if not self._tell_scheduler(request, mapping):
            return
        if request.abort_immediately:
            # vLLM's API server has rejected it, and ends it at once so that the producer's blocks are freed
            text = (
                "request %s was rejected here, so the blocks that engine %s holds for it are freed"
            )
            logger.info(text, name, engine)
            return
        if request.get_skip_reading_prefix_cache():
            # vLLM ignores what we could load, so that it gets the logprobs of all tokens
            self._scheduler.load(name, blocks=(), num_tokens=0)  # frees its blocks
            return
        if other and not usable:
            text = "request %s is computed without engine %s, which does not offer the %s of its prompt"
            logger.info(text, name, engine, other)
            self._scheduler.load(name, blocks=(), num_tokens=0)  # frees its blocks
            return
        if other:
            text = "request %s takes the first %d tokens of what engine %s offers, which are not all of its prompt"
            logger.info(text, name, usable, engine)
            return
        if asked.context is None and not offer.is_followed:
            self._note_unstated(engine)
        # if a streamed prompt is not computed to its end, the prefill engine samples no token
        is_sampled = not offer.is_followed or not self._backoff_tokens()
        if is_sampled and not asked.for_decoder:
            self.first_tokens.expect(request, asked)

    def _note_unstated(self, engine: str) -> None:
        """Log, once for an engine, that its offers do not state what their caches depend on besides tokens."""
        if engine not in self._unstated and len(self._unstated) < MAX_NOTED:
            self._unstated.add(engine)
            text = (
                "offers of engine %s do not say with which adapter, cache salt or images they were computed"
                " (an earlier"
                " release, or a router that drops %s): they are loaded without a comparison of these"
            )
            logger.info(text, engine, CONTEXT)

    def _decoded(self, request: Request) -> RequestParams | None:
        """Return what a request's parameters ask for; None if they are refused, and the prompt is computed here."""
        try:
            return decoded(
                request.kv_transfer_params, is_bidirectional=self._settings.bidirectional_kv_xfer
            )
        except KVConnectorError as error:
            _log_refusal(request, error)
        if not isinstance(request.kv_transfer_params, dict):
            request.kv_transfer_params = None  # vLLM itself looks for keys in it
        return None

    def _tell_scheduler(self, request: Request, params: Mapping[str, Any]) -> bool:
        try:
            self._scheduler.on_new_request(request.request_id, params)
        except KVConnectorError as error:
            _log_refusal(request, error)
            return False
        return True

    def _backoff_tokens(self) -> int:
        """Return the number of tokens at a prompt's end that a prefill engine must leave to the decode engine.

        The decode engine computes the last prompt token itself. It then needs the recurrent state before that token,
        and the window that the token sees. With several draft modules it computes all of their look-ahead, too.
        """
        forgets = any(info.keeps != "all" for info in self._groups)
        lookahead: int = self._vllm_config.num_prefill_lookahead_tokens
        return max(int(forgets), lookahead - 1)

    def _leave_to_decoder(self, request: Request, asked: RequestParams) -> None:
        backoff = self._backoff_tokens()
        if (
            not backoff
            or self.first_tokens.is_sent(request, is_streamed=asked.names_transfer)
            or request.request_id in self._shortened
            or request.num_prompt_tokens <= backoff
            or request.get_skip_reading_prefix_cache()
            or request.resumable  # vLLM appends the next part of its input to what is left
        ):
            return
        for name in ("prompt_token_ids", "prompt_embeds", "prompt_is_token_ids"):
            whole = getattr(request, name)
            if whole is not None:  # the caller keeps its own: several requests may share one list
                setattr(request, name, whole[:-backoff])
        del request._all_token_ids[-backoff:]
        request.num_prompt_tokens -= backoff
        request.max_tokens = 1
        self._shortened.add(request.request_id)

    def matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return the number of tokens to load after the computed ones (None: ask again), and True if asynchronously."""
        if not self._loads:
            return 0, False
        # the request is about to be computed or loaded again, maybe by another connector
        self._received.forget(request.request_id)
        first = self._siblings.first_of(request.request_id)
        if first is not None and self._scheduler.is_pending(first):
            return None, False
        if self._scheduler.is_early(request.request_id):
            return None, False
        asked = self._asked.get(request.request_id, NO_PARAMS)
        num_tokens = request.num_prompt_tokens
        if asked.offer is None or asked.offer.is_followed:
            # the producer has not stated how many tokens it computes: assume this engine's configuration
            num_tokens -= max(0, self._backoff_tokens() - 1)
            if num_computed_tokens >= num_tokens - 1:
                # nothing to load: this engine computes the last token before the producer does
                self.first_tokens.forget(request.request_id)
        # this engine computes the token after the prompt if it gets the first token, or else the prompt's last one
        num_tokens += request.request_id in self.first_tokens
        tokens, is_async = self._scheduler.matched_tokens(
            request.request_id, num_tokens, num_computed_tokens
        )
        if asked.for_decoder and tokens < self._settings.kv_recompute_threshold:
            return 0, False
        return tokens, is_async

    def after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external: int) -> None:
        """Load into the request's blocks, or notify the producer that none of its blocks are needed."""
        if not self._loads:
            return
        if not num_external:
            self.first_tokens.forget(request.request_id)
            self.partly_filled.evict(request.request_id)
        tables = blocks.get_block_ids()
        # vLLM's hit has the same length in all groups but recurrent states, whose position `Scheduler` derives
        given = [request_blocks(info, tables[info.vllm_group], 0) for info in self._groups]
        try:
            loaded = self._scheduler.load(
                request.request_id,
                blocks=[ids for ids, _ in given],
                first_blocks=[first for _, first in given],
                num_tokens=num_external,
                cache_block_tokens=self.partly_filled.block_tokens,
            )
        except KVConnectorError:
            # these must be another connector's tokens, as we offered none
            logger.exception("request %s is not loaded by this connector", request.request_id)
            return
        self.partly_filled.expect(request.request_id, loaded, blocks.blocks)
        asked = self._asked.get(request.request_id, NO_PARAMS)
        if num_external and asked.offer is not None and asked.offer.is_followed:
            self._identities[request.request_id] = identities(
                request, self._backoff_tokens(), self._contexts
            )

    def reset(self) -> bool:
        """Let nothing be read any more that was computed before: vLLM calls this when its weights have changed.

        Blocks that are held are taken back, and so are those of prompts that consumers follow. Requests in the queue
        are computed here, without the first tokens that came with them.

        Returns:
            False if loads are under way, which vLLM cannot reset either. Their requests are still to be ended.
        """
        if self._started is None:
            return True
        begun = [name for name, request in self._streamed.items() if request.num_computed_tokens]
        offered = [*self._scheduler.held, *begun]
        pending = [name for name in self._asked if self._scheduler.is_pending(name)]
        loading = [name for name in pending if self._scheduler.is_loading(name)]
        queued = [name for name in pending if name not in loading]
        for name in offered:
            self._scheduler.withdraw(name)
        for name in queued:
            self._scheduler.load(name, blocks=(), num_tokens=0)  # frees the producer's blocks
            self.first_tokens.forget(name)
        self.has_orders_of_reset |= bool(offered or queued)
        if loading:
            text = "the cache is not reset: %d requests are being loaded with what others have computed"
            logger.warning(text, len(loading))
        return not loading

    def build_step(self, planned: SchedulerOutput) -> ConnectorStep:
        """Return the orders for all workers, which take them once the planned step's kernels are launched."""
        self.has_orders_of_reset = False
        for request_id in self._streamed.keys() & (planned.preempted_req_ids or ()):
            self._scheduler.withdraw(request_id)
        # if another connector loads in the step, workers take its orders before the kernels are launched
        if not planned.has_sync_kv_loads:
            for request_id in self._streamed.keys() & planned.num_scheduled_tokens.keys():
                self._grow(self._streamed[request_id], planned)
        is_idle = self._idle_steps.plan(planned.total_num_scheduled_tokens)
        own, self._identities = self._identities, {}
        return ConnectorStep.of(self._scheduler.build_step(), is_idle=is_idle, identities=own)

    def _grow(self, request: Request, planned: SchedulerOutput) -> None:
        """Let consumers read the tokens of a prompt that the steps up to this one compute."""
        request_id = request.request_id
        num_scheduled = planned.num_scheduled_tokens[request_id]
        computed = request.num_computed_tokens, request.num_computed_tokens + num_scheduled
        num_tokens, step_stop = (min(each, request.num_prompt_tokens) for each in computed)
        tables = planned.kv_connector_block_state.get_block_ids(request_id)
        try:
            self._scheduler.grow(
                request_id,
                blocks=[kernel_block_ids(info, tables[info.vllm_group]) for info in self._groups],
                num_tokens=num_tokens,
                # the draft model's kernels are launched after the workers have taken the step's orders
                ahead_tokens=0 if self._vllm_config.speculative_config else step_stop,
            )
        except KVConnectorError:
            logger.exception("request %s is not streamed any more", request_id)
            self._scheduler.withdraw(request_id)

    def update(self, output: KVConnectorOutput) -> None:
        """Take the workers' reports. Reports that repeat earlier ones are removed from `output`, because vLLM would end
        its engine core over them. Reports on requests that are not ours stay there for other connectors.
        """
        sent, received = set(output.finished_sending or ()), set(output.finished_recving or ())
        held = self._scheduler.held
        our_sent = sent & held
        our_received = {request for request in received if self._scheduler.is_loading(request)}
        repeated_sent = self._sent.repeated(sent - our_sent)
        repeated_received = self._received.repeated(received - our_received)
        if repeated_sent or repeated_received:
            logger.warning("repeated reports: %s", sorted(repeated_sent | repeated_received))
            output.finished_sending = sent - repeated_sent
            output.finished_recving = received - repeated_received
        self._sent.add(our_sent)
        self._received.add(our_received)
        report = output.kv_connector_worker_meta
        if not isinstance(report, WorkerReport):
            report = WorkerReport()
        if self._spans is not None:
            self._spans.export(report.traces)
        for request_id, reason in report.failed.items():
            if self._scheduler.is_loading(request_id):
                self._received.explain(request_id, reason)
        for request_id in report.unsent.keys() & held:
            self._sent.explain(request_id, report.unsent[request_id])
        unsent = {name: self._sent.take_reason(name) for name in our_sent}
        reasons = {name: self._received.take_reason(name) for name in our_received}
        # a failed request whose unfilled blocks vLLM computes is not in `failed_recving`, but it has a reason
        failed = {name for name in our_received if reasons[name]}
        failed |= our_received.intersection(output.failed_recving or ())
        for name, extra in report.extras.items():
            self.first_tokens.sampled(name, extra)
        for name in failed:
            self.first_tokens.forget(name)
        self._failures = {name: reasons[name] for name in failed}
        self.first_tokens.loaded(our_received)
        self._scheduler.update(
            WorkerOutput(
                finished_sending=our_sent,
                finished_recving=our_received,
                failed_recving={name: reasons[name] for name in failed},
                failed_sending={name: reason for name, reason in unsent.items() if reason},
                producer_started=report.producer_started,
            )
        )

    def explain(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Add to a step's outputs, by client, why loads failed. vLLM leaves them out, and its server says "Internal
        server error"; see `answers.py`.
        """
        failures, self._failures = self._failures, {}
        if not failures:
            return
        for of_client in outputs.values():
            for output in of_client.outputs:
                if output.finish_reason == FinishReason.ERROR and output.request_id in failures:
                    output.kv_transfer_params = failure_params(failures[output.request_id])

    def request_finished(
        self, request: Request, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return True if the request's blocks must be kept, and the parameters with which another engine reads them."""
        self.partly_filled.evict(request.request_id)
        self._siblings.remove(request.request_id)
        self._streamed.pop(request.request_id, None)
        self.first_tokens.forget(request.request_id)
        offer = self._offered(request, block_ids)
        self.partly_filled.forget(request.request_id)
        self._shortened.discard(request.request_id)
        self._asked.pop(request.request_id, None)
        self._scheduler.finish(request.request_id)
        return offer is not None, offer

    def _offered(
        self, request: Request, block_ids: Sequence[Sequence[int]]
    ) -> dict[str, Any] | None:
        asked = self._asked.get(request.request_id)
        if asked is None or not self.delivers or request.status not in ENDED_WELL:
            return None
        if request.kv_transfer_params is None:
            return None  # its first token has ended it
        is_decoder = not asked.for_decoder
        if is_decoder and not self._settings.bidirectional_kv_xfer:
            return None
        # the last sampled token is not in the cache
        num_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        held = self._held(request, block_ids, num_tokens)
        if held is None:
            return None
        is_whole = not is_decoder and request.request_id not in self._shortened
        token = self.first_tokens.of(request) if is_whole else None
        identity = self._identity(request, num_tokens, is_decoder=is_decoder)
        is_streamed = self._settings.config.stream and asked.names_transfer
        try:
            offer = self._scheduler.offer(
                request.request_id,
                blocks=[ids for ids, _ in held],
                num_tokens=num_tokens,
                first_blocks=[first for _, first in held],
                lease_duration_s=self._settings.decoder_kv_blocks_ttl_s if is_decoder else 0.0,
                extra=self._prompt_end(request, token, identity) if is_streamed else b"",
            )
        except KVConnectorError:
            logger.exception("the blocks of request %s are not offered", request.request_id)
            return None
        dcp_size = self._vllm_config.parallel_config.decode_context_parallel_size
        offer |= {"dcp_size": dcp_size, "transfer_mode": "pull"}
        offer |= identity
        if is_decoder:
            offer |= {"do_remote_prefill": False, "do_remote_decode": True}
            # as NixlConnector has it: in seconds of this host's monotonic clock
            expiry_s = time.perf_counter() + self._settings.decoder_kv_blocks_ttl_s
            offer["remote_blocks_expiry_time"] = expiry_s
        elif token is not None:
            offer[FIRST_TOKEN] = token
        return offer

    def _held(
        self, request: Request, block_ids: Sequence[Sequence[int]], num_tokens: int
    ) -> list[tuple[list[int], int]] | None:
        """Return the blocks of a request's first `num_tokens` tokens in each group, as `request_blocks`; None if they
        do not hold all that another engine needs to continue.
        """
        if num_tokens <= 0:
            # it was preempted while its last token was under way, and others have its blocks now
            return None
        if self._has_lost_states(request, num_tokens):
            return None
        if self.partly_filled.are_in(request.request_id, block_ids):
            return None
        held = [
            request_blocks(info, block_ids[info.vllm_group], num_tokens) for info in self._groups
        ]
        # of a chunk that the next token begins nothing is kept, and nothing is missing
        missing = (retention_of(info).missing(0, num_tokens) for info in self._groups)
        lacks = any(needed and not ids for needed, (ids, _) in zip(missing, held, strict=True))
        return None if lacks else held

    def _identity(self, request: Request, num_tokens: int, *, is_decoder: bool) -> dict[str, Any]:
        """Return the keys of an offer that say what its cache depends on: other prompts' requests do not load it."""
        identity: dict[str, Any] = {
            TOKENS_DIGEST: digest_of(request.all_token_ids[:num_tokens]),
            CONTEXT: self._contexts.of(request, num_tokens),
        }
        # of shorter prefixes there are neither windows nor states any more
        if is_decoder and all(info.keeps == "all" for info in self._groups):
            identity[PREFIXES] = prefix_digests(
                request.all_token_ids,
                [request.num_prompt_tokens - each for each in BEFORE_END],
                partial(self._contexts.of, request),
            )
        return identity

    def _prompt_end(
        self, request: Request, token: Sequence[Any] | None, identity: Mapping[str, Any]
    ) -> bytes:
        """Return what consumers that have followed a prompt are told at its end."""
        num_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        context = self._contexts.short(request, num_tokens)
        computed = Identity(num_tokens, identity[TOKENS_DIGEST], context)
        sampled, digest = token or (None, "")
        return msgspec.msgpack.encode(PromptEnd(sampled, digest, num_tokens, computed))

    def _has_lost_states(self, request: Request, num_tokens: int) -> bool:
        """Return True if the recurrent states after `num_tokens` tokens are not in the blocks that we would offer."""
        states = [info for info in self._groups if info.keeps == "state"]
        # a step in flight has already advanced them
        is_advanced = request.num_computed_tokens > num_tokens
        # a step with draft tokens leaves them in one of its scratch blocks, by the number of accepted tokens; with
        # Kimi's RecoverSSM, which has none, rejected tokens may have opened a block after the states'
        is_unplaced = request.num_output_tokens > 1 and bool(self._vllm_config.speculative_config)
        return bool(states) and (is_advanced or is_unplaced)

    def close(self) -> None:
        """Stop the directory service."""
        if self._started is not None:
            self._started.close()


def _log_refusal(request: Request, error: KVConnectorError) -> None:
    logger.warning(
        "request %s is computed without another engine: its kv_transfer_params cannot be used: %s",
        request.request_id,
        error,
    )


def _request_spans(vllm_config: VllmConfig, engine_id: str) -> RequestSpans | None:
    """Return an exporter for spans of transfers, or None if vLLM exports no spans of requests."""
    if traces_endpoint(vllm_config) is None:
        return None
    from kvconnector.integrations.tracing import RequestSpans

    return RequestSpans(engine_id)
