"""A worker's place in its engine: its heads, its tokens, and its name among other engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvconnector.ids import Rank
from kvconnector.layout import NO_CONTEXT_PARALLEL, ContextParallel

if TYPE_CHECKING:
    from vllm.config import ParallelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One worker's place.

    `rank` counts all workers of a pipeline stage, as vLLM does in its handshake; `tp_rank` gives the heads here,
    `context_parallel` which tokens. A replica holds what another worker holds, and no other engine knows it.
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
        """From a worker's ranks in vLLM's groups.

        Prefill context parallelism alone leaves the whole cache on each of its ranks. With decode context parallelism,
        which then spans it, each rank has its own tokens.
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
        """That of this process, in whose groups vLLM is initialized."""
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
