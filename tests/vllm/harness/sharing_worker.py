"""A CPU worker that shares tokens with its neighbours, which vLLM's own refuses: what it lacks is here, in plain torch.

Scheduling, block tables, communication groups, cache tensors and the order in which K and V are stored stay vLLM's.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import torch.distributed
from vllm import _custom_ops
from vllm.distributed.parallel_state import get_dcp_group
from vllm.triton_utils.dispatcher import register_kernels
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
from vllm.v1.worker.cpu_worker import CPUWorker

from kvconnector.cache.slot_mapping import BlockGeometry, ContextParallel, naive_slot
from kvconnector.integrations.vllm.cpu_attention import CpuBlock, PartStrides, probe_block

SLOT_MAPPING_KERNEL = "vllm.v1.worker.block_table.ComputeSlotMappingKernel.kernel"


class SharingCPUWorker(CPUWorker):  # type: ignore[misc]  # vLLM is not there when types are checked
    """`worker_cls` of engines with decode context parallelism. One KV head a rank."""

    def load_model(self, *arguments: Any, **options: Any) -> None:
        """Layers choose their attention here, so put in its place what knows shared tokens."""
        register_kernels({SLOT_MAPPING_KERNEL: write_slots})
        attention = CPUAttentionBackendImpl
        attention.supports_dcp = attention.can_return_lse_for_decode = True
        attention.interleave_tokens = self.parallel_config.cp_kv_cache_interleave_size
        attention.do_kv_cache_update = store_own_tokens
        attention.forward = attend_to_shared_tokens
        super().load_model(*arguments, **options)


def write_slots(  # noqa: PLR0917  # vLLM's signature
    num_tokens: int,
    max_num_tokens: int,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    block_table_stride: int,
    slot_mapping: torch.Tensor,
    KV_CACHE_BLOCK_SIZE: int,
    TOTAL_CP_WORLD_SIZE: int,
    TOTAL_CP_RANK: int,
    CP_KV_CACHE_INTERLEAVE_SIZE: int,
    PAD_ID: int,
    BLOCK_SIZE: int,
) -> None:
    """The slot mapping kernel; a test holds its arithmetic equal to vLLM's."""
    geometry = BlockGeometry(
        block_size=KV_CACHE_BLOCK_SIZE,
        kernel_block_size=KV_CACHE_BLOCK_SIZE,
        context_parallel=ContextParallel(
            world_size=TOTAL_CP_WORLD_SIZE,
            rank=TOTAL_CP_RANK,
            interleave_tokens=CP_KV_CACHE_INTERLEAVE_SIZE,
        ),
    )
    slot_mapping[num_tokens:max_num_tokens] = PAD_ID
    starts = query_start_loc.tolist()
    for row, (start, stop) in enumerate(pairwise(starts)):
        ids = block_table[row].tolist()
        for token in range(start, stop):
            slot_mapping[token] = naive_slot(ids, int(positions[token]), geometry)


def store_own_tokens(  # noqa: PLR0917  # vLLM's signature
    self: Any,
    layer: Any,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Store the K and V of those tokens that have a slot on this rank."""
    num_blocks, num_kv_heads, block_size, _ = kv_cache.size()
    halves = kv_cache.view((num_blocks, num_kv_heads, block_size * 2, -1))
    key_cache, value_cache = halves.chunk(2, dim=2)
    own = slot_mapping[: len(key)] >= 0
    if own.any():
        _custom_ops.cpu_attn_reshape_and_cache(
            key[own].contiguous(),
            value[own].contiguous(),
            key_cache,
            value_cache,
            slot_mapping[: len(key)][own].contiguous(),
            layer.isa,
            k_scale=layer._k_scale_float,
            v_scale=layer._v_scale_float,
            kv_cache_dtype=self.kv_cache_dtype,
        )


def attend_to_shared_tokens(  # noqa: PLR0917  # vLLM's signature
    self: Any,
    layer: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    attn_metadata: Any,
    output: torch.Tensor,
    *scales: Any,
    **options: Any,
) -> torch.Tensor:
    """Every rank's queries over this rank's tokens, then this rank's queries over what every rank found."""
    if attn_metadata is None:
        return output
    group, count = get_dcp_group(), attn_metadata.num_actual_tokens
    queries = torch.cat(_gathered(query[:count], group), dim=1)
    found = torch.zeros(*queries.shape[:2], self.head_size)
    weight = torch.full((*queries.shape[:2], 1), float("-inf"))
    for tokens, positions, keys, values, places in _requests(self, layer, kv_cache, attn_metadata):
        scores = torch.einsum("qhd,td->qht", queries[tokens].float(), keys) * self.scale
        scores.masked_fill_(places[None, None, :] > positions[:, None, None], float("-inf"))
        weight[tokens] = scores.logsumexp(dim=2, keepdim=True)
        found[tokens] = scores.softmax(dim=2).nan_to_num() @ values
    heads = slice(group.rank_in_group * query.shape[1], (group.rank_in_group + 1) * query.shape[1])
    shares = torch.stack([part[:, heads] for part in _gathered(found, group)])
    weights = torch.stack([part[:, heads] for part in _gathered(weight, group)]).softmax(dim=0)
    output[:count] = (shares * weights).sum(dim=0).to(output.dtype).view_as(output[:count])
    return output


def _gathered(mine: torch.Tensor, group: Any) -> list[torch.Tensor]:
    found = [torch.empty_like(mine, memory_format=torch.contiguous_format) for _ in group.ranks]
    torch.distributed.all_gather(found, mine.contiguous(), group=group.device_group)
    return found


def _requests(
    self: Any, layer: Any, kv_cache: torch.Tensor, metadata: Any
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Of each request: its queries, their positions, and K, V and positions of the tokens that are here."""
    group, size = get_dcp_group(), kv_cache.shape[2]
    k_cache, v_cache = _k_and_v(self, layer, kv_cache)
    starts = metadata.query_start_loc.tolist()
    for row, (start, stop) in enumerate(pairwise(starts)):
        length = int(metadata.seq_lens[row])
        places = torch.arange(length)
        places = places[places // self.interleave_tokens % group.world_size == group.rank_in_group]
        own = torch.arange(len(places))
        blocks = metadata.block_table[row][own // size].long()
        keys, values = (cache[blocks, own % size].float() for cache in (k_cache, v_cache))
        positions = torch.arange(length - (stop - start), length)
        yield slice(start, stop), positions, keys, values, places


@lru_cache
def _places(block: CpuBlock) -> list[PartStrides]:
    return probe_block(block)[1]


def _k_and_v(self: Any, layer: Any, kv_cache: torch.Tensor) -> list[torch.Tensor]:
    """`[block, token, dim]` of the one head."""
    num_blocks, _, block_size, _ = kv_cache.shape
    places = _places(CpuBlock.of(kv_cache, self.head_size, layer.isa, self.kv_cache_dtype))
    return [
        kv_cache.as_strided(
            (num_blocks, block_size, self.head_size),
            (kv_cache.stride(0), place.token, place.dim),
            kv_cache.storage_offset() + place.offset,
        )
        for place in places
    ]
