"""One rank's part of the model: layers by pipeline stage, heads, MLP rows and vocabulary by tensor rank."""

from __future__ import annotations

from dataclasses import dataclass

from kvconnector.errors import ConfigError
from kvconnector.ids import Rank
from kvconnector.layout import ContextParallel
from kvconnector.topology import TpKVTopology
from minillm.config import ModelConfig, ParallelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShare:
    """One rank's share. Ranges are in the whole model's numbering.

    `context_parallel` says which tokens of its `kv_heads` it caches, for the query heads of all ranks that share them.
    """

    rank: Rank
    layers: range
    q_heads: range
    kv_heads: range
    state_heads: range
    mlp_rows: range
    vocab_rows: range
    is_mla: bool
    is_first_stage: bool
    is_last_stage: bool
    context_parallel: ContextParallel


def split_rows(total: int, index: int, count: int) -> range:
    """Return run `index` of `count` runs over `range(total)` whose lengths differ by at most one."""
    return range(index * total // count, (index + 1) * total // count)


def owned_query_heads(model: ModelConfig, tp_rank: int, tp_size: int) -> range:
    """Return the query heads of one rank: those of its KV heads, divided among the ranks that replicate a KV head.

    Raises:
        ConfigError: a rank would hold no query head.
    """
    # every rank has MLA's one latent, so the ranks divide all heads among themselves
    kv_heads = model.cache_heads
    group = model.num_heads // kv_heads
    shares = [
        TpKVTopology.heads_of(kv_heads, tp_rank=rank, tp_size=tp_size) for rank in range(tp_size)
    ]
    owned = shares[tp_rank]
    holders = [rank for rank, heads in enumerate(shares) if heads == owned]
    if len(holders) > len(owned) * group:
        raise ConfigError(
            "a tensor-parallel rank would hold no query head",
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            tp_rank=tp_rank,
            tp_size=tp_size,
        )
    share = TpKVTopology.heads_of(
        len(owned) * group, tp_rank=holders.index(tp_rank), tp_size=len(holders)
    )
    return range(owned.start * group + share.start, owned.start * group + share.stop)


def rank_share(model: ModelConfig, parallel: ParallelConfig, global_rank: int) -> RankShare:
    """Return the share of worker `global_rank` (pipeline stage first, tensor ranks contiguous).

    Raises:
        GeometryError: the pipeline's layer counts do not add up.
        ConfigError: a rank would hold no query head, or another number of them than those that share its tokens.
    """
    pp_rank, tp_rank = divmod(global_rank, parallel.tp_size)
    share, dcp_rank = divmod(tp_rank, parallel.dcp_size)
    num_shares = parallel.num_head_shares
    group = ContextParallel(
        world_size=parallel.dcp_size,
        rank=dcp_rank,
        interleave_tokens=parallel.interleave_tokens,
    )
    is_mla = model.has_latents
    return RankShare(
        rank=Rank(pp_rank, tp_rank),
        layers=TpKVTopology.layers_of(
            model.num_layers,
            pp_rank=pp_rank,
            pp_size=parallel.pp_size,
            layers_per_stage=parallel.pp_layers,
        ),
        q_heads=_share_of(owned_query_heads(model, share, num_shares), group),
        kv_heads=TpKVTopology.heads_of(
            model.cache_heads,
            tp_rank=tp_rank,
            tp_size=parallel.tp_size,
            dcp_size=parallel.dcp_size,
        ),
        state_heads=TpKVTopology.heads_of(
            model.num_heads, tp_rank=tp_rank, tp_size=parallel.tp_size
        ),
        mlp_rows=split_rows(model.intermediate_size, tp_rank, parallel.tp_size),
        vocab_rows=split_rows(model.vocab_size, tp_rank, parallel.tp_size),
        is_mla=is_mla,
        is_first_stage=pp_rank == 0,
        is_last_stage=pp_rank == parallel.pp_size - 1,
        context_parallel=group,
    )


def _share_of(heads: range, group: ContextParallel) -> range:
    """Return the query heads of one of the ranks that share tokens; all of them have equally many."""
    count, rest = divmod(len(heads), group.world_size)
    if rest:
        raise ConfigError(
            "ranks that share tokens must have equally many query heads",
            query_heads=len(heads),
            dcp_size=group.world_size,
        )
    start = heads.start + group.rank * count
    return range(start, start + count)
