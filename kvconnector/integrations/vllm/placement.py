"""A worker's place in its engine: the heads and tokens that it holds, and the rank by which other engines know it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from kvconnector.ids import Rank
from kvconnector.layout import NO_CONTEXT_PARALLEL, ContextParallel

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from vllm.config import ParallelConfig


def engine_groups() -> list[ProcessGroup]:
    """Return vLLM's process groups in which this rank has peers, one for each dimension of parallelism. If all ranks
    of the engine reduce a value over one group after the other, they all get the same result. Empty if the engine has
    a single rank.
    """
    from vllm.distributed import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return []
    groups = (
        parallel_state.get_tp_group(),
        parallel_state.get_pcp_group(),
        parallel_state.get_pp_group(),
    )
    return [each.cpu_group for each in groups if each.world_size > 1]


def is_any(mine: bool, groups: Iterable[ProcessGroup], wait_s: float) -> bool:
    """Return True if `mine` is true in any rank of the engine. All ranks call this, and wait for each other.

    Args:
        mine: This rank's value.
        groups: See `engine_groups`.
        wait_s: The most seconds to wait for the ranks of one group.

    Raises:
        RuntimeError: A rank did not call this in time, or has ended.
    """
    found = torch.tensor(int(mine))
    for group in groups:
        work = torch.distributed.all_reduce(
            found, torch.distributed.ReduceOp.MAX, group=group, async_op=True
        )
        work.wait(timedelta(seconds=wait_s))
    return bool(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One worker's place in its engine.

    `rank` counts all workers of a pipeline stage, as in vLLM's handshake. `tp_rank` determines the worker's heads, and
    `context_parallel` its tokens. A replica holds the same cache as another worker, and other engines do not know it.
    """

    rank: Rank
    tp_rank: int
    context_parallel: ContextParallel = NO_CONTEXT_PARALLEL
    is_replica: bool = False

    @classmethod
    def of(
        cls,
        parallel: ParallelConfig,
        *,
        pp_rank: int,
        tp_rank: int,
        pcp_rank: int,
        dcp_rank: int,
    ) -> Placement:
        """Make the placement from a worker's ranks in vLLM's groups.

        With prefill context parallelism alone, each of its ranks holds the cache of all tokens. With decode context
        parallelism too, whose groups then span these ranks, each rank holds only its share of the tokens.
        """
        if parallel.decode_context_parallel_size == 1:
            return cls(rank=Rank(pp_rank, tp_rank), tp_rank=tp_rank, is_replica=pcp_rank > 0)
        return cls(
            rank=Rank(pp_rank, pcp_rank * parallel.tensor_parallel_size + tp_rank),
            tp_rank=tp_rank,
            context_parallel=ContextParallel(
                world_size=parallel.decode_context_parallel_size,
                rank=dcp_rank,
                interleave_tokens=parallel.cp_kv_cache_interleave_size,
            ),
        )

    @classmethod
    def here(cls, parallel: ParallelConfig) -> Placement:
        """Make the placement of this process, in which vLLM's groups are initialized."""
        from vllm.distributed.parallel_state import (
            get_dcp_group,
            get_pcp_group,
            get_pp_group,
            get_tensor_model_parallel_rank,
        )

        return cls.of(
            parallel,
            pp_rank=get_pp_group().rank_in_group,
            tp_rank=get_tensor_model_parallel_rank(),
            pcp_rank=get_pcp_group().rank_in_group,
            dcp_rank=get_dcp_group().rank_in_group,
        )
