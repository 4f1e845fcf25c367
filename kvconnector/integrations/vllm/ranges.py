"""A `MultiConnector` whose children load one request together, each a range of its prompt.

vLLM's own `MultiConnector` loads a request from the first child that has any of its tokens. This one asks the children
in order, each for the tokens after those of the previous child: a cache tier has `[0, S)`, and `KVConnector` loads `[S,
N)` from the prefill engine. The children do not know of each other: each is asked for what follows
`num_computed_tokens`, and gets the request's blocks and the number of tokens to load.

Ranges meet at block boundaries, since a tier writes whole blocks. Only asynchronous loads are combined, because a
synchronous load belongs to the step that uses it. States and windows are those at the end of the last range. vLLM
allocates blocks for these only, so those that an earlier child has for other positions are not loaded.

A tier may still be storing a finished request's blocks when vLLM gives them to another request. `OffloadingConnector`
has a fence for that: a step that computes into such a block first waits for the store. Up to vLLM 0.32 the fence does
not cover blocks into which another connector loads, so they are added to it here. In 0.33 it does.

The scheduler's side decides, and each worker counts. A worker reports a request once all of its children have ended,
as failed if one of them failed, since vLLM's aggregator expects one report from each worker. Blocks that a child
reports as unfilled go to vLLM at once, which keeps them until the request is reported.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from math import lcm
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiConnector,
    MultiKVConnectorMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.kv_cache_utils import resolve_dcp_kv_block_size
from vllm.v1.kv_cache_interface import MambaSpec

from kvconnector.errors import ConfigError
from kvconnector.integrations.vllm.connector import KVConnector

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

LOAD_POLICY = "range_aware"


@dataclass
class RangeMetadata(MultiKVConnectorMetadata):
    """`extra_async_loads`: for each request that several children start to load in this step, their number less one."""

    extra_async_loads: dict[str, int] = field(default_factory=dict)


class RangeConnector(MultiConnector):
    """vLLM's `MultiConnector`, except that its children load a request together.

    Raises:
        ConfigError: `load_policy` is not `LOAD_POLICY`, or a cache tier's stores cannot be fenced.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        policy = vllm_config.kv_transfer_config.get_from_extra_config("load_policy", LOAD_POLICY)
        if policy != LOAD_POLICY:
            raise ConfigError(
                "kvconnector's MultiConnector supports only this load_policy: to load only the first hit, use"
                " vLLM's own MultiConnector, without kv_connector_module_path",
                load_policy=policy,
                known=LOAD_POLICY,
            )
        if any(isinstance(child, KVConnector) for child in self._connectors[:-1]):
            logger.warning(
                "KVConnector loads whole prompts, so connectors after it load no part of its requests"
            )
        dcp_size = vllm_config.parallel_config.decode_context_parallel_size
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        tokens = [each for each in specs if not isinstance(each, MambaSpec)]
        self._block_size = lcm(*(resolve_dcp_kv_block_size(each, dcp_size) for each in tokens))
        self._tiers = [
            child.connector_scheduler
            for child in self._connectors
            if isinstance(child, OffloadingConnector) and child.connector_scheduler is not None
        ]
        """The scheduler's side of children that may still read blocks which vLLM has given to other requests."""
        if not all(hasattr(tier, "_current_batch_allocated_block_ids") for tier in self._tiers):
            raise ConfigError(
                "kvconnector cannot make OffloadingConnector end its stores from blocks that are to be loaded: it"
                " records allocated blocks in another way than in the known releases of vLLM",
                known="0.31 to 0.33",
            )
        self._shares: dict[str, dict[int, int]] = {}
        """How many tokens each child loads of a request, by the child's position."""
        self._new_loads: dict[str, int] = {}
        """The next step's `extra_async_loads`."""
        self._unended_loads: dict[str, int] = {}
        """On a worker: how many children of a request have yet to end, less one."""
        self._failed: set[str] = set()
        """On a worker: requests that one child failed to load, until all of their children have ended."""

    # -- scheduler --

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        shares = self._shares[request.request_id] = {}
        stop, is_async, is_open = num_computed_tokens, False, True
        for position, child in enumerate(self._connectors):
            # ask all of them, as vLLM does: some only start to look up tokens now
            tokens, loads_async = child.get_num_new_matched_tokens(request, stop)
            if tokens is None:
                return None, False
            if not tokens or not is_open or (shares and not loads_async):
                continue
            shares[position] = tokens
            stop, is_async = stop + tokens, loads_async
            is_open = is_async and stop % self._block_size == 0
        return stop - num_computed_tokens, is_async

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        shares = self._shares_of(request, num_external_tokens)
        if shares:
            self._fence_stores(blocks)
        for position, child in enumerate(self._connectors):
            child.update_state_after_alloc(request, blocks, shares.get(position, 0))
        if len(shares) > 1:
            self._new_loads[request.request_id] = len(shares) - 1

    def _fence_stores(self, blocks: KVCacheBlocks) -> None:
        """Let workers wait for stores that still read the blocks of a load, before anything is loaded into them."""
        # a block that is in the prefix cache already is not written
        written = [
            block.block_id
            for group in blocks.blocks
            for block in group
            if not block.is_null and block.block_hash is None
        ]
        for tier in self._tiers:
            tier._current_batch_allocated_block_ids.update(written)

    def _shares_of(self, request: Request, num_external_tokens: int) -> dict[int, int]:
        """Divide `num_external_tokens`, which may be fewer than were offered, among the children by position."""
        shares, left = {}, num_external_tokens
        for position, offered in self._shares.get(request.request_id, {}).items():
            tokens = min(offered, left)
            if tokens:
                shares[position] = tokens
            left -= tokens
        return shares

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """Return the groups that all children of the request load, since each loads only a part of the tokens."""
        loaders = [self._connectors[each] for each in self._shares[request.request_id]]
        ids = [set(each.get_loaded_kv_cache_group_ids(request)) for each in loaders]
        return tuple(sorted(set.intersection(*ids)))

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[Enum, int]:
        found: Counter[Enum] = Counter()
        for position, tokens in self._shares_of(request, num_external_tokens).items():
            found.update(self._connectors[position].get_external_cache_hit_sources(request, tokens))
        return dict(found)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> RangeMetadata:
        for request_id in scheduler_output.finished_req_ids:
            self._shares.pop(request_id, None)
        step = super().build_connector_meta(scheduler_output)
        loads, self._new_loads = self._new_loads, {}
        return RangeMetadata(step.metadata, step.extra_async_saves, loads)

    # -- worker --

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._unended_loads.update(connector_metadata.extra_async_loads)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        ended = KVConnectorTransferResults()
        for child in self._connectors:
            of_child = child.get_transfer_results(finished_req_ids)
            ended.finished_sending |= _last(of_child.finished_sending, self._extra_async_saves)
            ended.finished_recving |= _last(of_child.finished_recving, self._unended_loads)
            self._failed |= of_child.failed_recving
        ended.failed_recving = self._failed & ended.finished_recving
        self._failed -= ended.failed_recving
        return ended


def _last(request_ids: Iterable[str], unended: dict[str, int]) -> set[str]:
    """Take a child's reports, and count them in `unended`. Returns the requests of which no other child is left."""
    last = set()
    for request_id in request_ids:
        others = unended.pop(request_id, 0)
        if others > 1:
            unended[request_id] = others - 1
        elif not others:
            last.add(request_id)
    return last
