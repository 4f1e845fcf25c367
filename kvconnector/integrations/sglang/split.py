"""A sparse cache whose layers are split among the ranks of prefill context parallelism.

With `--enable-dsa-cache-layer-split` every one of these ranks computes a share of each prompt's tokens in all layers,
but keeps only its own layers of the cache: a run of consecutive ones, the first ranks one more if they do not divide.
The rank gathers the latents and indexer keys of all tokens of a step, and its pool drops those of other ranks' layers.
What it needs of these later their owner broadcasts to it, a whole layer at a time, into a single buffer that the next
layer overwrites. SGLang lists no such buffer, nor the empty one that a pool has in place of a layer that it lacks. So:

- Such a rank is a *pipeline stage*, not a copy. Its layers are final once its own forward pass is, like any rank's, and
  every rank's scheduler sends every prompt.
- A draft model's cache is whole on each of the ranks, but only the last rank's is listed. All ranks of an engine must
  register the same cache groups, so the others add this one without a layer. Only the last rank knows what it looks
  like, so the ranks tell each other before they register.
- Layers that use another layer's selection belong to a rank like all others, but have no indexer's keys. A rank that
  has only such layers registers its group of keys without a layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Sequence

import msgspec
from msgspec import structs

from kvconnector.errors import ConfigError, GeometryError
from kvconnector.integrations.sglang.caches import Shape
from kvconnector.integrations.sglang.requests import Group
from kvconnector.runtime import CacheGroup
from kvconnector.topology import GroupGeometry

OPTION = "--enable-dsa-cache-layer-split"


class _Holding(msgspec.Struct, frozen=True):
    """What a rank registers."""

    stage: int
    tp_rank: int
    groups: tuple[tuple[Group, GroupGeometry], ...]


def check_option(
    *, is_prefill: bool, states: Container[str], num_ranks: int, num_layers: int
) -> None:
    """Refuse a deployment with the option in which nobody knows who has which layers.

    Args:
        is_prefill: True for a prefill engine.
        states: The kinds of states that SGLang lists beside the cache.
        num_ranks: Ranks of context parallelism.
        num_layers: The model's layers.

    Raises:
        ConfigError: it is a decode engine, a rank would have no layer, or the cache is not that of sparse attention.
    """
    if not is_prefill:
        raise ConfigError(
            f"a decode engine needs all layers on each of its ranks: start it without {OPTION}"
        )
    if "dsa" not in states:
        raise ConfigError(
            f"only a cache with a sparse indexer is known to be split by {OPTION}: start without it"
        )
    if num_ranks > num_layers:
        raise ConfigError(
            f"with {OPTION} each rank of context parallelism needs at least one layer: use a smaller --attn-cp-size",
            attn_cp_size=num_ranks,
            layers=num_layers,
        )


def joined_groups(
    groups: Sequence[CacheGroup],
    kinds: Sequence[Group],
    shape: Shape,
    gather: Callable[[bytes], Sequence[bytes]],
) -> tuple[list[CacheGroup], tuple[Group, ...]]:
    """Return a rank's cache groups with those that only other ranks of its engine have, which have no layer here.

    Only where layers are split are there such groups. Then all ranks call it at once.

    Args:
        groups: The rank's own.
        kinds: What each of them is.
        shape: The rank's place, in which `pp_rank` counts the ranks of context parallelism.
        gather: Takes this rank's JSON text and returns those of all ranks.

    Raises:
        GeometryError: a layer has no owner or several, or ranks have groups that nobody can put in one order.
    """
    if not shape.is_split:
        return list(groups), tuple(kinds)
    own = tuple((kind, group.geometry) for kind, group in zip(kinds, groups, strict=True))
    sent = msgspec.json.encode(_Holding(shape.pp_rank, shape.tp_rank, own))
    holdings = [msgspec.json.decode(each, type=_Holding) for each in gather(sent)]
    _check_owners(holdings, shape.num_layers)
    listed = [[kind for kind, _ in each.groups] for each in holdings]
    order = max(listed, key=len)
    # here a group looks as it does at a rank with the same share of the heads, preferably one that has layers of it
    alike = [pair for each in holdings if each.tp_rank == shape.tp_rank for pair in each.groups]
    stated = dict(sorted(alike, key=lambda pair: bool(pair[1].layers)))
    is_ordered = all([kind for kind in order if kind in some] == some for some in listed)
    if not is_ordered or {*stated} != {*order}:
        raise GeometryError(
            f"with {OPTION} SGLang's ranks list caches that no rank has all of: use a release that was tested",
            caches=[[kind.kind for kind in some] for some in listed],
        )
    held = {kind: group for kind, group in zip(kinds, groups, strict=True) if group.geometry.layers}
    found = []
    for kind in order:
        empty = structs.replace(stated[kind], layers=(), scales=())
        found.append(held.get(kind) or CacheGroup(empty, {}, shape.device, shape.dtype))
    return found, tuple(order)


def _check_owners(holdings: Sequence[_Holding], num_layers: int) -> None:
    """Raise GeometryError unless each of the model's layers has one owner. Ranks of a stage have the same layers."""
    layers = {each.stage: dict(each.groups)[Group("kv")].layers for each in holdings}
    owners = Counter(layer for held in layers.values() for layer in held)
    wrong = {
        "owned_by_none": sorted({*range(num_layers)} - {*owners}),
        "owned_twice": sorted(layer for layer, count in owners.items() if count > 1),
        "unknown": sorted({*owners} - {*range(num_layers)}),
    }
    if any(wrong.values()):
        raise GeometryError(
            f"SGLang's ranks do not hold each layer exactly once: use a release that was tested, or start"
            f" without {OPTION}",
            **{name: found for name, found in wrong.items() if found},
            layers_of_ranks=layers,
        )
