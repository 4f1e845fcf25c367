"""Which KV heads a tensor-parallel rank holds."""

from __future__ import annotations

from kvconnector.errors import GeometryError


def is_kv_replicated(total_num_kv_heads: int, tp_size: int) -> bool:
    """Whether some head lives on more than one rank: more ranks than heads. Equal numbers are one head each."""
    return tp_size > total_num_kv_heads


def owned_heads(total_num_kv_heads: int, tp_rank: int, tp_size: int) -> range:
    """KV heads of one rank, as a range of global head indices.

    Up to one rank a head, the heads are cut into `tp_size` runs whose lengths differ by at most one; with more ranks
    than heads, each head is held by a run of ranks. Where one number divides the other this is the split that engines
    with Megatron-style tensor parallelism use.

    Raises:
        GeometryError: no heads, no ranks, or the rank is outside the group.
    """
    if total_num_kv_heads < 1 or tp_size < 1 or not 0 <= tp_rank < tp_size:
        raise GeometryError(
            "a rank needs 0 <= tp_rank < tp_size and at least one head",
            total_num_kv_heads=total_num_kv_heads,
            tp_rank=tp_rank,
            tp_size=tp_size,
        )
    start = tp_rank * total_num_kv_heads // tp_size
    if is_kv_replicated(total_num_kv_heads, tp_size):
        return range(start, start + 1)
    return range(start, (tp_rank + 1) * total_num_kv_heads // tp_size)
