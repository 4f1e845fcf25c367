"""The scheduler halves of kvconnector behind `SchedulerTransfer`: one for a prefill engine, one for a decode engine."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvconnector.runtime import (
    KVConsumerScheduler,
    KVProducerScheduler,
    WorkerMetadata,
    WorkerOutput,
)
from kvconnector.runtime.params import wants_remote_decode, wants_remote_prefill
from kvconnector.session import KVOutputAggregator
from minillm.cache_groups import layer_groups
from minillm.config import EngineConfig
from minillm.request_blocks import BlockOffer, LoadTarget
from minillm.transfer import (
    LoadStats,
    Params,
    TransferEvents,
    connector_config,
)


class ProducerTransfer:
    """A prefill engine: finished prompts are kept for the decode engine that the router chooses."""

    def __init__(self, config: EngineConfig) -> None:
        self.stats: dict[str, LoadStats] = {}
        self._parallel = config.parallel
        self._scheduler = KVProducerScheduler(connector_config(config))
        self._outputs = _RankOutputs(config.parallel.world_size)

    def start(self, metadata: Sequence[msgspec.Raw]) -> None:
        """Start the directory service that consumers ask for this engine's ranks."""
        self._scheduler.set_worker_metadata(
            _decode_metadata(metadata),
            tp_size=self._parallel.tp_size,
            pp_size=self._parallel.pp_size,
        )

    def on_new_request(self, request_id: str, params: Params) -> None:
        """A producer learns of a request when it is finished."""

    def matched_tokens(
        self, request_id: str, num_prompt: int, num_computed: int, params: Params
    ) -> tuple[int, bool]:
        """A producer loads nothing."""
        return 0, False

    def after_alloc(self, request_id: str, target: LoadTarget, num_external: int) -> None:
        """A producer loads nothing."""

    def is_offered(self, params: Params) -> bool:
        """Whether the request asks for a remote decode."""
        return wants_remote_decode(params)

    def finished(
        self, request_id: str, offer: BlockOffer | None, num_tokens: int, params: Params
    ) -> tuple[bool, Params]:
        """Hold what is offered; without an offer the consumer computes the prompt itself."""
        if offer is None:
            return False, None
        return self._scheduler.request_finished(
            request_id,
            block_ids=offer.block_ids,
            first_blocks=offer.first_blocks,
            num_tokens=num_tokens,
            kv_transfer_params=params,
        )

    def abort(self, request_id: str) -> None:
        """End the request's lease."""
        self._scheduler.abort(request_id)

    def build_step(self) -> msgspec.Raw:
        """The next step's metadata."""
        return msgspec.Raw(msgspec.msgpack.encode(self._scheduler.build_step()))

    def update(self, outputs: Sequence[msgspec.Raw]) -> TransferEvents:
        """Requests that no consumer will read any more."""
        output = self._outputs.aggregate(outputs)
        self._scheduler.update(output)
        return TransferEvents(finished_sending=output.finished_sending)

    def close(self) -> None:
        """Close the scheduler half."""
        self._scheduler.close()


class ConsumerTransfer:
    """A decode engine: prompts that another engine computed are loaded into local blocks."""

    def __init__(self, config: EngineConfig) -> None:
        self.stats: dict[str, LoadStats] = {}
        self._parallel = config.parallel
        groups = layer_groups(config.model, config.cache, config.parallel.dcp_size)
        self._retentions = [group.retention for group in groups]
        self._scheduler = KVConsumerScheduler(connector_config(config))
        self._outputs = _RankOutputs(config.parallel.world_size)

    def start(self, metadata: Sequence[msgspec.Raw]) -> None:
        """Tell the scheduler half of its ranks."""
        self._scheduler.set_worker_metadata(
            _decode_metadata(metadata),
            tp_size=self._parallel.tp_size,
            pp_size=self._parallel.pp_size,
            retentions=self._retentions,
        )

    def on_new_request(self, request_id: str, params: Params) -> None:
        """Keep the producer's lease alive while the request queues."""
        self._scheduler.on_new_request(request_id, params)

    def matched_tokens(
        self, request_id: str, num_prompt: int, num_computed: int, params: Params
    ) -> tuple[int, bool]:
        """Tokens that the producer holds for this request, of those that need not be computed here."""
        external, is_async = self._scheduler.get_num_new_matched_tokens(
            request_id, num_prompt_tokens=num_prompt, num_computed_tokens=num_computed
        )
        if wants_remote_prefill(params):
            self.stats[request_id] = LoadStats(cached_tokens=num_computed, loaded_tokens=external)
        return external, is_async

    def after_alloc(self, request_id: str, target: LoadTarget, num_external: int) -> None:
        """Start the load."""
        self._scheduler.update_state_after_alloc(
            request_id,
            block_ids=target.block_ids,
            first_blocks=target.first_blocks,
            computed_tokens=target.computed_tokens,
            num_external_tokens=num_external,
        )

    def is_offered(self, params: Params) -> bool:
        """A consumer's blocks are its own."""
        return False

    def finished(
        self, request_id: str, offer: BlockOffer | None, num_tokens: int, params: Params
    ) -> tuple[bool, Params]:
        """A consumer's blocks are its own."""
        self._scheduler.request_finished(request_id)
        return False, None

    def abort(self, request_id: str) -> None:
        """Stop a load, or the heartbeats of a queued request."""
        self._scheduler.request_finished(request_id)

    def build_step(self) -> msgspec.Raw:
        """The next step's metadata."""
        return msgspec.Raw(msgspec.msgpack.encode(self._scheduler.build_step()))

    def update(self, outputs: Sequence[msgspec.Raw]) -> TransferEvents:
        """Loads that all ranks have finished, and those of them that failed."""
        output = self._outputs.aggregate(outputs)
        self._scheduler.update(output)
        for item in output.stats.transfers:
            if stats := self.stats.get(item.request_id):
                stats.add(item.nbytes, item.seconds, item.path)
        return TransferEvents(
            finished_recving=output.finished_recving,
            failed_recving=output.failed_recving,
        )

    def close(self) -> None:
        """Close the scheduler half."""
        self._scheduler.close()


class _RankOutputs:
    """Decodes the ranks' outputs and says what all ranks have finished."""

    def __init__(self, world_size: int) -> None:
        self._decoder = msgspec.msgpack.Decoder(WorkerOutput)
        self._aggregator = KVOutputAggregator(expected_finished_count=world_size)

    def aggregate(self, outputs: Sequence[msgspec.Raw]) -> WorkerOutput:
        """One output for the scheduler half."""
        decoded = [self._decoder.decode(output) for output in outputs]
        # every rank answers every step, so the aggregate is never absent
        return self._aggregator.aggregate(decoded) or WorkerOutput()


def _decode_metadata(metadata: Sequence[msgspec.Raw]) -> list[WorkerMetadata]:
    return [msgspec.msgpack.decode(item, type=WorkerMetadata) for item in metadata]
