"""SGLang's pools as cache groups, from what it lists for transfer backends (`KVArgs`): addresses and lengths of pages.

The groups are in this order on every rank of both engines: KV, the draft model's KV, the states as listed, the rows of
metadata. An entry of a KV list is one part (K, V or a latent) of one layer: pages one after another, each `[token,
head, dim]`. An entry of a state list is the states of one layer: slots one after another. Whatever is cut among tensor
parallel ranks is cut by heads, so that the topology can intersect any two cuts:

- *Attention*: KV heads; where there are fewer heads than ranks, several ranks hold the same one.
- *Recurrent states*: what SGLang slices, channels or state heads. A convolution's state that is `[q | k | v]` with each
  cut by itself becomes three parts; so does that of Mamba 2, `[x | B | C]`, where all ranks hold the B and C of a
  single group.
- *What is cut in a way that is not known* (a draft model's KV of another shape, states of which SGLang does not say how
  the convolution's is made up): a rank's share is one head of as many as there are ranks. Engines of one tensor
  parallelism match, and others are refused when they meet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvconnector.errors import GeometryError
from kvconnector.layout import KVView
from kvconnector.runtime import CacheGroup
from kvconnector.topology import GroupGeometry, PartGeometry

MOVED_STATES = ("swa", "mamba")
MAX_STAGES = 8
"""Pipeline stages of a decode engine: the row of metadata has as many layers, one for each of them or more."""


@dataclass(frozen=True, slots=True)
class Heads:
    """The KV heads of a pool that this rank holds: `[start, start + count)` of `total`."""

    start: int
    count: int
    total: int

    @classmethod
    def of(cls, total: int, tp_rank: int, tp_size: int) -> Heads:
        """As SGLang cuts them. Raises GeometryError: neither number divides the other."""
        if total % tp_size == 0:
            return cls(tp_rank * (total // tp_size), total // tp_size, total)
        if tp_size % total:
            raise GeometryError("KV heads are not cut evenly", heads=total, tp_size=tp_size)
        return cls(tp_rank // (tp_size // total), 1, total)


@dataclass(frozen=True, slots=True)
class Shape:
    """What `KVArgs` does not say: this rank's place, the model's heads and the layers of this pipeline stage.

    `kv_heads` of a latent are one. `kv_layers` and `window_layers` are global indices of the stage's layers with full
    and with sliding window attention. `conv_heads`: channels of this rank in each part of a Mamba 2 convolution, whose
    parts SGLang does not list.
    """

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    is_prefill: bool
    num_layers: int
    kv_heads: Heads
    window_heads: Heads
    kv_layers: Sequence[int]
    window_layers: Sequence[int]
    has_latent: bool
    device: str
    dtype: str
    conv_heads: Sequence[Heads] = ()


@dataclass(frozen=True, slots=True)
class Entries:
    """A list of buffers of `KVArgs`, and the global layer of each."""

    addresses: Sequence[int]
    lengths: Sequence[int]
    item_lengths: Sequence[int]
    layers: Sequence[int]

    def __post_init__(self) -> None:
        counts = {len(column) for column in (self.addresses, self.lengths, self.item_lengths)}
        if counts != {len(self.layers)}:
            raise GeometryError(
                "SGLang lists another number of buffers than this stage has layers and parts",
                buffers=len(self.addresses),
                layers=list(self.layers),
            )

    def slice(self, start: int, stop: int) -> Entries:
        """Some of them."""
        return Entries(
            self.addresses[start:stop],
            self.lengths[start:stop],
            self.item_lengths[start:stop],
            self.layers[start:stop],
        )

    def by_layer(self) -> dict[int, list[int]]:
        """The numbers of each layer's entries, in their order: its parts."""
        found: dict[int, list[int]] = {}
        for number, layer in enumerate(self.layers):
            found.setdefault(layer, []).append(number)
        return dict(sorted(found.items()))


def registered_groups(args: Any, shape: Shape) -> tuple[list[CacheGroup], list[str]]:
    """The cache groups of one rank but for the rows of metadata, and what each is: "kv", "swa" or "mamba".

    Args:
        args: SGLang's `KVArgs`, filled.
        shape: The rest.

    Raises:
        GeometryError: a kind of pool that is not moved, or one that is not what it should be.
    """
    kinds = [str(getattr(kind, "value", kind)) for kind in args.state_types]
    refused = sorted({*kinds} - {*MOVED_STATES})
    if refused:
        raise GeometryError("kvconnector does not move caches of these kinds", kinds=refused)
    entries = _kv_entries(args, shape)
    num_target = len(entries.layers) - args.num_draft_entries
    target = entries.slice(0, num_target)
    groups = [_pages(target, args.page_size, shape.kv_heads, shape)]
    names = ["kv"]
    if args.num_draft_entries:
        draft = entries.slice(num_target, len(entries.layers))
        is_alike = {*draft.item_lengths} == {*target.item_lengths}
        own = Heads(shape.tp_rank, 1, shape.tp_size)
        groups.append(_pages(draft, args.page_size, shape.kv_heads if is_alike else own, shape))
        names.append("kv")
    for index, kind in enumerate(kinds):
        groups.append(_state_group(args, index, kind, shape))
        names.append(kind)
    return groups, names


def _kv_entries(args: Any, shape: Shape) -> Entries:
    columns = args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens
    if args.kv_layer_ids:
        return Entries(*columns, args.kv_layer_ids)
    parts = 1 if shape.has_latent else 2
    draft = range(shape.num_layers, shape.num_layers + args.num_draft_entries // parts)
    return Entries(*columns, [*shape.kv_layers] * parts + [*draft] * parts)


def _state_group(args: Any, index: int, kind: str, shape: Shape) -> CacheGroup:
    columns = (
        args.state_data_ptrs[index],
        args.state_data_lens[index],
        args.state_item_lens[index],
    )
    if kind == "mamba":
        entries = Entries(*columns, args.state_layer_ids[index])
        # a block is one slot, and counts as one token
        return _group(
            entries, 1, lambda number: _state_views(entries, number, args, index, shape), shape
        )
    if args.swa_kv_cache_layout != "nhd":
        raise GeometryError(
            "windows are moved in pages of [token, head, dim] only", layout=args.swa_kv_cache_layout
        )
    entries = Entries(*columns, [*shape.window_layers] * 2)
    return _pages(entries, args.page_size, shape.window_heads, shape)


def _pages(entries: Entries, page_size: int, heads: Heads, shape: Shape) -> CacheGroup:
    """A pool of pages `[token, head, dim]`."""

    def views_of(number: int) -> list[tuple[KVView, Heads]]:
        item = entries.item_lengths[number]
        row, rest = divmod(item, page_size * heads.count)
        if rest or not row:
            raise GeometryError(
                "a page is not as long as its tokens and heads",
                layer=entries.layers[number],
                nbytes=item,
                page_size=page_size,
                heads=heads.count,
            )
        dim, size = _elements(row)
        counts = (entries.lengths[number] // item, heads.count, page_size, dim)
        strides = (item, row, heads.count * row, size)
        return [(KVView(entries.addresses[number], counts, strides, size), heads)]

    return _group(entries, page_size, views_of, shape)


def _state_views(
    entries: Entries, number: int, args: Any, index: int, shape: Shape
) -> list[tuple[KVView, Heads]]:
    """The parts of one state tensor `[slot, outer, cut, rest]`, each of whose cuts is a head."""
    item = entries.item_lengths[number]
    slots = entries.lengths[number] // item
    address = entries.addresses[number]
    cut = _listed(args.state_dim_per_tensor, index, number, 0)
    outer = _listed(args.state_slice_outer_counts, index, number, 1)
    groups = _listed(args.state_conv_shard_groups, index, number, None)
    if not cut or not (any(args.state_conv_shard_groups[index]) or shape.conv_heads):
        dim, size = _elements(item)
        view = KVView(address, (slots, 1, 1, dim), (item, item, item, size), size)
        return [(view, Heads(shape.tp_rank, 1, shape.tp_size) if cut else Heads(0, 1, 1))]
    row, rest = divmod(item, outer * cut)
    dim, size = _elements(row)
    if rest or not row or (outer > 1 and dim > 1):
        raise GeometryError(
            "a state is not as long as what it is cut into", nbytes=item, outer=outer, cut=cut
        )
    joined: Sequence[Heads] = shape.conv_heads
    if groups is not None:
        joined = [Heads.of(total, shape.tp_rank, shape.tp_size) for total in groups]
    if sum(heads.count for heads in joined) != cut:
        joined = [Heads.of(cut * shape.tp_size, shape.tp_rank, shape.tp_size)]
    found = []
    for heads in joined:
        counts = (slots, heads.count, 1, max(outer, dim))
        strides = (item, row, item, cut * row if outer > 1 else size)
        found.append((KVView(address, counts, strides, size), heads))
        address += heads.count * row
    return found


def _listed(column: Sequence[Sequence[Any]], index: int, number: int, default: Any) -> Any:
    """One value of `KVArgs`' lists by component and tensor, which are empty where there is nothing to say."""
    values = column[index] if index < len(column) else ()
    return values[number] if number < len(values) else default


def metadata_group(address: int, num_rows: int, row_bytes: int, shape: Shape) -> CacheGroup:
    """The rows of metadata: a block is one request's row, and counts as one token.

    The last prefill stage has the row, and every decode stage needs it; a layer belongs to one stage, so the row has
    `MAX_STAGES` layers, all at one address.

    Raises:
        GeometryError: a decode engine of more stages.
    """
    layers: Sequence[int] = range(MAX_STAGES)
    if shape.is_prefill:
        layers = layers if shape.pp_rank == shape.pp_size - 1 else ()
    elif shape.pp_size > MAX_STAGES:
        raise GeometryError("too many stages", pp_size=shape.pp_size, limit=MAX_STAGES)
    else:
        layers = [layer for layer in layers if layer % shape.pp_size == shape.pp_rank]
    dim, size = _elements(row_bytes)
    view = KVView(address, (num_rows, 1, 1, dim), (row_bytes, row_bytes, row_bytes, size), size)
    parts = (_part(0, view, Heads(0, 1, 1)),)
    geometry = GroupGeometry(block_size=1, layers=tuple(layers), parts=parts)
    return CacheGroup(geometry, dict.fromkeys(layers, (view,)), shape.device, shape.dtype)


def _group(
    entries: Entries,
    block_size: int,
    views_of: Callable[[int], list[tuple[KVView, Heads]]],
    shape: Shape,
) -> CacheGroup:
    """A group of these entries, of each of which `views_of` makes the parts."""
    views: dict[int, tuple[KVView, ...]] = {}
    parts: tuple[PartGeometry, ...] = ()
    for layer, numbers in entries.by_layer().items():
        found = [each for number in numbers for each in views_of(number)]
        views[layer] = tuple(view for view, _ in found)
        parts = parts or tuple(_part(n, view, heads) for n, (view, heads) in enumerate(found))
    geometry = GroupGeometry(block_size=block_size, layers=tuple(views), parts=parts)
    return CacheGroup(geometry, views, shape.device, shape.dtype)


def _part(number: int, view: KVView, heads: Heads) -> PartGeometry:
    return PartGeometry(
        name=f"part{number}",
        total_heads=heads.total,
        head_start=heads.start,
        head_stop=heads.start + heads.count,
        head_dim=view.head_dim,
        item_size_bytes=view.item_size_bytes,
    )


def _elements(nbytes: int) -> tuple[int, int]:
    """Bytes as a number of elements and their size: the longest words that divide them."""
    size = next(size for size in (8, 4, 2, 1) if nbytes % size == 0)
    return nbytes // size, size
