"""A rank's side of KV transfer: it registers its cache, and calls the connector before and after each step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from kvconnector.runtime import CacheGroup, StepMetadata, Worker
from kvconnector.session.orders import LoadRequest
from kvconnector.topology import GroupGeometry, ModelDescription, PartGeometry
from minillm.cache_groups import COMPRESSED_KINDS
from minillm.config import (
    ITEM_SIZE_BYTES,
    CacheKind,
    EngineConfig,
    ModelConfig,
)
from minillm.messages import EMPTY, block_number
from minillm.paged_cache import PagedCache
from minillm.partition import RankShare
from minillm.transfer import WorkerTransfer, connector_config


class ConnectorWorkerTransfer(WorkerTransfer):
    """The worker half that serves or fills a rank's cache with a kvconnector worker."""

    def __init__(self, config: EngineConfig, share: RankShare, cache: PagedCache) -> None:
        model = ModelDescription(
            model=model_name(config.model), dtype="float32", num_layers=config.model.num_layers
        )
        groups = cache_groups(config, share, cache)
        self._block_tokens = [group.geometry.virtual_block_tokens for group in groups]
        """Tokens of one block as the connector counts them, by cache group."""
        self._loads: dict[str, LoadRequest] = {}
        self.worker = Worker(connector_config(config), rank=share.rank, model=model)
        try:
            self.worker.register(groups)
        except BaseException:
            self.worker.close()
            raise

    def handshake(self) -> msgspec.Raw:
        """Return the worker's handshake metadata."""
        return msgspec.Raw(msgspec.msgpack.encode(self.worker.handshake()))

    def start_step(self, metadata: msgspec.Raw) -> None:
        """Decode the step's metadata and give it to the worker."""
        step = msgspec.msgpack.decode(metadata, type=StepMetadata)
        loads = (order for order in step.orders if isinstance(order, LoadRequest))
        self._loads.update((load.request_id, load) for load in loads)
        self.worker.start_step(step)

    def layer_written(self, layer: int) -> None:
        """Let consumers read the layer."""
        self.worker.layer_written(layer)

    def wait(self, timeout_s: float) -> None:
        """Wait for the connector instead of sleeping."""
        self.worker.wait(timeout_s)

    def poll(self, stored: tuple[str, ...]) -> msgspec.Raw:
        """Return the worker's output, encoded, with the blocks of failed loads; most idle steps have none."""
        output = self.worker.poll()
        ended = [self._loads.pop(request_id, None) for request_id in output.finished_recving]
        failed = [load for load in ended if load and load.request_id in output.failed_recving]
        if stored or failed:
            invalid = (block for load in failed for block in blocks_of(load, self._block_tokens))
            output = msgspec.structs.replace(
                output, kv_cache_events=stored, invalid_block_ids=frozenset(invalid)
            )
        return EMPTY if output.is_empty else msgspec.Raw(msgspec.msgpack.encode(output))

    def close(self) -> None:
        """Close the worker."""
        self.worker.close()


def blocks_of(load: LoadRequest, block_tokens: Sequence[int]) -> Iterator[int]:
    """Return the blocks that a load writes, by `block_number`. A failed load may have left anything in any of them."""
    groups = zip(block_tokens, load.local_blocks, load.token_ranges, strict=True)
    for group, (size, blocks, (start, stop)) in enumerate(groups):
        if start < stop:
            filled = blocks.covering(range(start, stop), size, what="a load's blocks")
            for block_id in filled.block_ids:
                yield block_number(group, int(block_id), len(block_tokens))


def cache_groups(config: EngineConfig, share: RankShare, cache: PagedCache) -> list[CacheGroup]:
    """Return this rank's cache in the connector's terms: by group, its views in the order of their parts."""
    found = []
    for index, group in enumerate(cache.groups):
        caches = {cache.layer_of[name]: cache.views[name] for name in cache.names_of(index)}
        found.append(
            CacheGroup(
                geometry=GroupGeometry(
                    block_size=group.transfer_block_size,
                    layers=tuple(caches),
                    parts=_parts(config.model, share, group.kind),
                    dcp_size=share.context_parallel.world_size,
                    dcp_rank=share.context_parallel.rank,
                    interleave_tokens=share.context_parallel.interleave_tokens,
                    row_tokens=group.row_tokens,
                ),
                views=caches,
                device=cache.device,
            )
        )
    return found


def _parts(model: ModelConfig, share: RankShare, kind: CacheKind) -> tuple[PartGeometry, ...]:
    """Return the parts of one layer. A state's heads are cut by tensor parallelism as those of K and V are."""
    heads, total = share.kv_heads, model.cache_heads
    widths = {"latent": model.cache_dim} if share.is_mla else dict.fromkeys("kv", model.cache_dim)
    if kind in COMPRESSED_KINDS:
        name = kind.partition("_")[2] or kind
        widths = {name: model.compressed_width(kind)}
    if kind == "state":
        heads, total, widths = share.state_heads, model.num_heads, model.state_widths
    return tuple(
        PartGeometry(
            name=name,
            total_heads=total,
            head_start=heads.start,
            head_stop=heads.stop,
            head_dim=width,
            item_size_bytes=ITEM_SIZE_BYTES,
        )
        for name, width in widths.items()
    )


def model_name(model: ModelConfig) -> str:
    """Return a name for everything that two engines must agree on besides their caches' geometry."""
    mixer = model.mixer
    sights = {
        "window": mixer.sliding_window,
        "chunk": mixer.attention_chunk,
        "fine": f"{mixer.fine_tokens}-{mixer.index_rows}-{mixer.sliding_window}",
        "coarse": mixer.coarse_tokens,
    }
    sight = "".join(f"-{kind}{size}" for kind, size in sights.items() if kind in model.layer_kinds)
    return f"minillm-{model.architecture}-seed{model.seed}{sight}"
