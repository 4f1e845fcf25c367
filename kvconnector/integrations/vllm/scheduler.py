"""The scheduler half: vLLM's requests, block tables and outputs in the terms of our scheduler halves.

Nothing that a request or a worker brings may raise here: an exception would end vLLM's engine core, and with it every
other request.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from kvconnector.errors import KVConnectorError, LocalError
from kvconnector.integrations.vllm.blocks import request_blocks, retention_of
from kvconnector.integrations.vllm.cores import parents_cores
from kvconnector.integrations.vllm.messages import ConnectorStep, GroupInfo, HandshakeMetadata
from kvconnector.integrations.vllm.placement import stage_size
from kvconnector.integrations.vllm.settings import Settings
from kvconnector.integrations.vllm.tracking import Reports, Siblings
from kvconnector.runtime import (
    KVConsumerScheduler,
    KVProducerScheduler,
    StepMetadata,
    WorkerOutput,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

Params = Mapping[str, Any]
OFFER_KEYS = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")


class SchedulerHalf:
    """One engine's scheduler side, for whichever roles it has."""

    def __init__(self, vllm_config: VllmConfig, settings: Settings) -> None:
        role = settings.config.role
        self._settings = settings
        self._parallel = vllm_config.parallel_config
        self._lookahead_tokens = vllm_config.num_prefill_lookahead_tokens
        self._groups: tuple[GroupInfo, ...] = ()
        self._producer = KVProducerScheduler(settings.config) if role != "consumer" else None
        self._consumer = KVConsumerScheduler(settings.config) if role != "producer" else None
        self._siblings = Siblings()
        self._shortened: set[str] = set()
        self._sent, self._received = Reports(), Reports()

    def set_handshake(self, metadata: Mapping[tuple[int, ...], HandshakeMetadata]) -> None:
        """Take every worker's registration, and start the directory service of a producer.

        Raises:
            KVConnectorError: the workers do not make up one engine, or the address or keys cannot be used.
        """
        foreign = {type(item).__name__ for item in metadata.values()} - {HandshakeMetadata.__name__}
        if foreign:
            raise LocalError(
                "KVConnector got another connector's handshake: of a MultiConnector's children, one may transfer"
                " between engines",
                found=sorted(foreign),
            )
        handshakes = [item.decode() for item in metadata.values()]
        groups = {handshake.groups for handshake in handshakes}
        if len(groups) != 1:
            raise LocalError("the workers registered different cache groups", groups=groups)
        self._groups = groups.pop()
        workers = [handshake.worker for handshake in handshakes]
        sizes = {
            "tp_size": stage_size(self._parallel),
            "pp_size": self._parallel.pipeline_parallel_size,
        }
        if self._producer is not None:
            with parents_cores():
                self._producer.set_worker_metadata(workers, **sizes)
        if self._consumer is not None:
            retentions = [retention_of(info) for info in self._groups]
            self._consumer.set_worker_metadata(workers, retentions=retentions, **sizes)

    @property
    def completes_divergent_hits(self) -> bool:
        """A load always brings a state, but of a window only what lies beyond the local hit."""
        return all(info.keeps in {"all", "state"} for info in self._groups)

    def on_new_request(self, request: Request) -> None:
        """A request was queued: leave the end of its prompt to the decode engine, or keep its lease alive."""
        params = request.kv_transfer_params
        if not params:
            return
        if params.get("do_remote_decode"):
            self._leave_to_decoder(request)
        offer = self._offer_of(params)
        if offer is None or self._consumer is None:
            return
        source = str(offer["remote_engine_id"]), str(offer["remote_request_id"])
        if not self._siblings.add(request.request_id, *source):
            return
        try:
            self._consumer.on_new_request(request.request_id, offer)
        except KVConnectorError as error:
            logger.warning(
                "request %s computes its prompt here, its kv_transfer_params cannot be used: %s",
                request.request_id,
                error,
            )

    def _offer_of(self, params: Params) -> Params | None:
        """The producer's offer in a request's parameters, if there is one for this engine."""
        if not params.get("remote_block_ids") or any(params.get(key) is None for key in OFFER_KEYS):
            return None
        if params.get("do_remote_prefill"):
            return params
        if params.get("do_remote_decode") and self._settings.bidirectional_kv_xfer:
            # a later turn of a chat: the decode engine has the blocks of the turns before
            return {**params, "do_remote_prefill": True, "do_remote_decode": False}
        return None

    def _backoff_tokens(self) -> int:
        """Trailing prompt tokens that a prefill engine must not compute.

        The decode engine computes the last prompt token itself. What the blocks hold must then be the state before that
        token, and windows as seen from it; with several draft modules, all of their look-ahead.
        """
        forgets = any(info.keeps != "all" for info in self._groups)
        lookahead: int = self._lookahead_tokens
        return max(int(forgets), lookahead - 1)

    def _leave_to_decoder(self, request: Request) -> None:
        backoff = self._backoff_tokens()
        if (
            not backoff
            or request.request_id in self._shortened
            or request.num_prompt_tokens <= backoff
            or request.get_skip_reading_prefix_cache()
        ):
            return
        if request.prompt_token_ids is not None:
            del request.prompt_token_ids[-backoff:]
        elif request.prompt_embeds is not None:
            request.prompt_embeds = request.prompt_embeds[:-backoff]
        else:
            return
        del request._all_token_ids[-backoff:]
        request.num_prompt_tokens -= backoff
        request.max_tokens = 1
        self._shortened.add(request.request_id)

    def matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """`(tokens that come from the producer beyond those computed here, asynchronously)`; None: ask again."""
        if self._consumer is None:
            return 0, False
        first = self._siblings.first_of(request.request_id)
        if first is not None and self._consumer.is_pending(first):
            return None, False
        tokens, is_async = self._consumer.get_num_new_matched_tokens(
            request.request_id,
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=num_computed_tokens,
        )
        params = request.kv_transfer_params or {}
        if params.get("do_remote_decode") and tokens < self._settings.kv_recompute_threshold:
            return 0, False
        return tokens, is_async

    def after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external: int) -> None:
        """Load into the request's blocks, or tell the producer that nothing is needed."""
        if self._consumer is None:
            return
        tables = blocks.get_block_ids()
        # vLLM's hit is the same for all groups, but for recurrent states, of which the scheduler half knows the place
        given = [request_blocks(info, tables[info.vllm_group], 0) for info in self._groups]
        try:
            self._consumer.update_state_after_alloc(
                request.request_id,
                block_ids=[ids for ids, _ in given],
                first_blocks=[first for _, first in given],
                num_external_tokens=num_external,
            )
        except KVConnectorError:
            # only another connector's tokens can be meant: we offered none
            logger.exception("request %s is not loaded by this connector", request.request_id)

    def build_step(self) -> ConnectorStep:
        """The news for every worker."""
        return ConnectorStep.of(self._news())

    def _news(self) -> StepMetadata:
        held = self._producer.build_step() if self._producer is not None else StepMetadata()
        if self._consumer is None:
            return held
        wanted = self._consumer.build_step()
        return msgspec.structs.replace(wanted, holds=held.holds, withdrawn=held.withdrawn)

    def update(self, output: KVConnectorOutput) -> None:
        """Take what the workers finished. Reports that repeat earlier ones are taken out of `output`: vLLM would end
        its engine core over them. Those of requests that are not ours stay: other connectors have reports too.
        """
        sent, received = set(output.finished_sending or ()), set(output.finished_recving or ())
        held = self._producer.held if self._producer is not None else frozenset()
        our_sent = sent & held
        our_received = {
            request for request in received if self._consumer and self._consumer.is_loading(request)
        }
        repeated_sent = self._sent.repeated(sent - our_sent)
        repeated_received = self._received.repeated(received - our_received)
        if repeated_sent or repeated_received:
            logger.warning("repeated reports: %s", sorted(repeated_sent | repeated_received))
            output.finished_sending = sent - repeated_sent
            output.finished_recving = received - repeated_received
        self._sent.add(our_sent)
        self._received.add(our_received)
        if self._producer is not None:
            self._producer.update(WorkerOutput(finished_sending=frozenset(our_sent)))
        if self._consumer is not None:
            self._consumer.update(WorkerOutput(finished_recving=frozenset(our_received)))

    @property
    def delivers(self) -> bool:
        """Whether finished requests' blocks are handed to other engines."""
        return self._producer is not None

    def request_finished(
        self, request: Request, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Whether the request's blocks must be kept, and the parameters for whoever reads them."""
        self._siblings.remove(request.request_id)
        self._shortened.discard(request.request_id)
        if self._consumer is not None:
            self._consumer.request_finished(request.request_id)
        params = request.kv_transfer_params
        if self._producer is None or not params or not _ended_well(request):
            return False, None
        is_decoder = not params.get("do_remote_decode")
        if is_decoder and not self._settings.bidirectional_kv_xfer:
            return False, None
        num_tokens = _cached_tokens(request)
        held = [
            request_blocks(info, block_ids[info.vllm_group], num_tokens) for info in self._groups
        ]
        if not all(ids for ids, _ in held):
            return False, None
        try:
            keep, offer = self._producer.request_finished(
                request.request_id,
                block_ids=[ids for ids, _ in held],
                num_tokens=num_tokens,
                kv_transfer_params={"do_remote_decode": True},
                first_blocks=[first for _, first in held],
                lease_duration_s=self._settings.decoder_kv_blocks_ttl_s if is_decoder else 0.0,
            )
        except KVConnectorError:
            logger.exception("the blocks of request %s are not offered", request.request_id)
            return False, None
        if offer is not None:
            dcp_size = self._parallel.decode_context_parallel_size
            offer |= {"dcp_size": dcp_size, "transfer_mode": "pull"}
            if is_decoder:
                offer |= {"do_remote_prefill": False, "do_remote_decode": True}
        return keep, offer

    def close(self) -> None:
        """Stop the directory service."""
        for half in (self._producer, self._consumer):
            if half is not None:
                half.close()


def _ended_well(request: Request) -> bool:
    from vllm.v1.request import RequestStatus

    return request.status in (
        RequestStatus.FINISHED_LENGTH_CAPPED,
        RequestStatus.FINISHED_STOPPED,
    )


def _cached_tokens(request: Request) -> int:
    """Tokens whose K and V are in the cache: not the last sampled one, nor what a step in flight may still write."""
    tokens: int = min(request.num_computed_tokens, request.num_tokens - 1)
    return tokens
