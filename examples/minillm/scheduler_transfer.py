"""kvconnector's scheduler half as a `SchedulerTransfer`."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import msgspec

from kvconnector.ids import Rank
from kvconnector.integrations.prometheus import EngineMetrics
from kvconnector.runtime import (
    Scheduler,
    WorkerMetadata,
    WorkerOutput,
    wants_remote_decode,
    wants_remote_prefill,
)
from kvconnector.runtime.engine import joined_geometry
from kvconnector.session import KVOutputAggregator, LoadInFlight
from kvconnector.topology import TpKVTopology
from minillm.cache_groups import layer_groups
from minillm.config import EngineConfig
from minillm.request_books import BlockOffer, LoadTarget
from minillm.transfer import (
    LoadStats,
    Params,
    SchedulerTransfer,
    TransferEvents,
    connector_config,
)

logger = logging.getLogger(__name__)

FIRST = Rank(0, 0)


def cache_forms(topology: TpKVTopology) -> Iterator[str]:
    """Describe the first rank's caches in memory, a line for each cache group whose blocks have several tokens."""
    engine = topology.engine
    replicas = "by need" if topology.is_kv_replicated(engine) else "not"
    if topology.replicates_kv_cache(engine) and not topology.is_kv_replicated(engine):
        replicas = "by overlapping shares"
    for index, group in enumerate(topology.geometry.groups):
        if group.layers and group.block_size > 1:
            order = topology.memory_order(index)
            first = "blocks" if topology.is_kv_layout_blocks_first(index) else "K, then V"
            yield (
                f"cache group {index}: {order}, {first} first, K and V "
                f"{'apart' if topology.split_k_and_v(index) else 'together'}, layers "
                f"{'together' if topology.cross_layers_blocks(index) else 'apart'}, tokens at axis "
                f"{topology.block_size_position(index)}, {replicas} replicated"
            )


class ConnectorTransfer(SchedulerTransfer):
    """A prefill engine's finished prompts are kept for the decode engine that the router chooses; a decode engine loads
    prompts that another engine computed into local blocks.
    """

    def __init__(self, config: EngineConfig, metadata: Sequence[msgspec.Raw]) -> None:
        super().__init__()
        groups = layer_groups(config.model, config.cache, config.parallel.dcp_size)
        self._is_producer = config.role == "prefill"
        settings = connector_config(config)
        workers = [msgspec.msgpack.decode(item, type=WorkerMetadata) for item in metadata]
        for line in cache_forms(TpKVTopology(joined_geometry(settings, workers), FIRST)):
            logger.info(line)
        # of a prefill engine with its directory service
        self._scheduler = Scheduler(
            settings, workers, retentions=[group.retention for group in groups]
        )
        self._decoder = msgspec.msgpack.Decoder(WorkerOutput | None)
        self._aggregator = KVOutputAggregator.from_connector(self._scheduler, len(workers))
        self._metrics = EngineMetrics(settings.engine_id, self._scheduler, registry=self.registry)

    @property
    def loads_in_flight(self) -> list[LoadInFlight]:
        """See `SchedulerTransfer`."""
        return self._metrics.in_flight()

    def on_new_request(self, request_id: str, params: Params) -> None:
        """Keep the producer's lease alive while the request queues, or let a consumer follow it from now on."""
        if not self._is_producer or wants_remote_decode(params):
            self._scheduler.on_new_request(request_id, params)

    def matched_tokens(
        self, request_id: str, num_prompt: int, num_computed: int, params: Params
    ) -> tuple[int, bool]:
        """Return how many tokens that need not be computed here the producer holds for this request."""
        external, is_async = self._scheduler.matched_tokens(request_id, num_prompt, num_computed)
        if not self._is_producer and wants_remote_prefill(params):
            self.stats[request_id] = LoadStats(cached_tokens=num_computed, loaded_tokens=external)
        return external, is_async

    def is_early(self, request_id: str) -> bool:
        """Returns True if the producer has not begun with the request."""
        return self._scheduler.is_early(request_id)

    def after_alloc(
        self, request_id: str, target: LoadTarget, num_external: int, num_encoder_tokens: int
    ) -> None:
        """Start the load."""
        self._scheduler.load(
            request_id,
            blocks=target.block_ids,
            first_blocks=target.first_blocks,
            computed_tokens=target.computed_tokens,
            num_tokens=num_external,
            num_encoder_tokens=num_encoder_tokens,
        )

    def is_offered(self, params: Params) -> bool:
        """Returns True if the request asks for a remote decode; a consumer's blocks are its own."""
        return self._is_producer and wants_remote_decode(params)

    def grow(
        self, request_id: str, tables: list[list[int]], num_tokens: int, ahead_tokens: int
    ) -> None:
        """Let a consumer that follows the request read the computed tokens."""
        self._scheduler.grow(
            request_id, blocks=tables, num_tokens=num_tokens, ahead_tokens=ahead_tokens
        )

    def withdraw(self, request_id: str) -> None:
        """Notify a consumer that follows the request."""
        self._scheduler.withdraw(request_id)

    def finished(
        self,
        request_id: str,
        offer: BlockOffer | None,
        num_tokens: int,
        num_encoder_tokens: int,
        params: Params,
        *,
        end: bytes = b"",
    ) -> tuple[bool, Params]:
        """Hold the offered blocks; without an offer the consumer computes the prompt itself."""
        if offer is None or not self.is_offered(params):
            self._scheduler.finish(request_id)
            return False, None
        return True, self._scheduler.offer(
            request_id,
            blocks=offer.block_ids,
            first_blocks=offer.first_blocks,
            num_tokens=num_tokens,
            num_encoder_tokens=num_encoder_tokens,
            extra=end,
        )

    def abort(self, request_id: str) -> None:
        """End the request's lease, its load, or its heartbeats while it queues."""
        self._scheduler.abort(request_id)

    def build_step(self) -> msgspec.Raw:
        """Return the next step's metadata."""
        return msgspec.Raw(msgspec.msgpack.encode(self._scheduler.build_step()))

    def update(self, outputs: Sequence[msgspec.Raw]) -> TransferEvents:
        """Return requests that no consumer will read any more, loads that all ranks have finished, and failed loads."""
        # each rank answers every step, so its output is never absent
        decoded = [self._decoder.decode(output) or WorkerOutput() for output in outputs]
        output = self._aggregator.aggregate(decoded) or WorkerOutput()
        self._scheduler.update(output)
        if not output.stats.is_empty:
            self._metrics.observe(output.stats)
        for item in output.stats.transfers:
            if stats := self.stats.get(item.request_id):
                stats.add(item.nbytes, item.seconds, item.path)
        for request_id in output.failed_recving:
            if stats := self.stats.get(request_id):
                stats.loaded_tokens = 0  # their tokens are computed here, or not at all
        return TransferEvents(
            finished_sending=output.finished_sending,
            finished_recving=output.finished_recving,
            failed_recving=output.failed_recving,
            invalid_blocks=output.invalid_block_ids,
            stored=frozenset(output.kv_cache_events),
        )

    def close(self) -> None:
        """Close the scheduler half."""
        self._scheduler.close()
