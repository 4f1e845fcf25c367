"""SGLang's pools as cache groups, from the addresses and lengths that it lists for transfer backends (`KVArgs`).

Every rank of both engines has the groups in this order: KV, the draft model's KV, the states as listed, the rows of
metadata. An entry of a KV list is one part (K, V or a latent) of one layer: consecutive pages, each `[token, head,
dim]`. An entry of a state list holds the states of one layer: consecutive slots. Everything that tensor parallelism
splits is registered as heads, so that the topology can intersect the shares of any two ranks:

- *Attention* is split by KV heads. With fewer heads than ranks, several ranks hold the same head.
- *Recurrent states* are split by channels or state heads, which count as heads here. A convolution's state `[q | k |
  v]`, with each of the three split on its own, becomes three parts. So does Mamba 2's `[x | B | C]`, where all ranks
  hold B and C if the model has a single group.
- *Where the split is not known* (a draft model's KV of another shape, or states whose convolution SGLang does not
  describe), a rank's share is one head out of `tp_size`. Engines with equal tensor parallelism match; others are
  refused in the greeting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

from kvconnector.errors import GeometryError
from kvconnector.integrations.sglang.metadata import MetadataRows
from kvconnector.layout import KVView
from kvconnector.runtime import CacheGroup
from kvconnector.topology import GroupGeometry, PartGeometry, TpKVTopology

MOVED_STATES = ("swa", "mamba")
MAX_STAGES = 8
"""The most pipeline stages of a decode engine. The metadata group has this many layers: at least one for each stage."""


class Heads(NamedTuple):
    """The number of heads of a pool over all ranks, and the range of them that this rank holds."""

    total: int
    held: range


WHOLE = Heads(1, range(1))
"""One head, which every rank holds: a pool that is not split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """This rank's place, the model's heads and the pipeline stage's layers, none of which `KVArgs` has.

    `kv_heads` and `window_heads` are the model's KV heads in layers with full and with sliding window attention; an MLA
    latent counts as one. `kv_layers` and `window_layers` are the global indices of the stage's layers of both kinds.
    `conv_heads` are this rank's channels in each part of a Mamba 2 convolution, which SGLang does not list.
    """

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    is_prefill: bool
    num_layers: int
    kv_heads: int
    window_heads: int
    kv_layers: Sequence[int]
    window_layers: Sequence[int]
    has_latent: bool
    device: str
    dtype: str
    conv_heads: Sequence[Heads] = ()

    def cut(self, total: int) -> Heads:
        """Return this rank's share of `total` heads, as SGLang splits them. Raises GeometryError: uneven shares."""
        if total % self.tp_size and self.tp_size % total:
            raise GeometryError("KV heads are not cut evenly", heads=total, tp_size=self.tp_size)
        return Heads(
            total, TpKVTopology.heads_of(total, tp_rank=self.tp_rank, tp_size=self.tp_size)
        )


class Listed(NamedTuple):
    """A buffer from `KVArgs`: `nbytes` of pages or slots, `item_bytes` each, of the layer with this global index."""

    layer: int
    address: int
    nbytes: int
    item_bytes: int


Views = Sequence[tuple[KVView, Heads]]


def registered_groups(
    args: Any, shape: Shape, rows: MetadataRows
) -> tuple[list[CacheGroup], tuple[str, ...]]:
    """Return one rank's cache groups, and the kind of each: "kv", "swa", "mamba" or "row", as in `Layout.kinds`.

    Args:
        args: SGLang's `KVArgs`, filled.
        shape: The rank's place, heads and layers.
        rows: The rank's metadata.

    Raises:
        GeometryError: kvconnector does not transfer this kind of pool, or a pool's size does not fit its heads, tokens
            and layers.
    """
    states = [str(getattr(kind, "value", kind)) for kind in args.state_types]
    if refused := sorted({*states} - {*MOVED_STATES}):
        raise GeometryError("kvconnector does not transfer caches of these kinds", kinds=refused)
    parts = 1 if shape.has_latent else 2
    drafted = range(shape.num_layers, shape.num_layers + args.num_draft_entries // parts)
    layers = args.kv_layer_ids or [*shape.kv_layers] * parts + [*drafted] * parts
    buffers = _buffers(layers, args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens)
    num_own = len(buffers) - args.num_draft_entries
    own, draft = buffers[:num_own], buffers[num_own:]
    heads = shape.cut(shape.kv_heads)
    groups = [_pages(own, args.page_size, heads, shape)]
    if draft:
        if {each.item_bytes for each in draft} != {each.item_bytes for each in own}:
            heads = shape.cut(shape.tp_size)
        groups.append(_pages(draft, args.page_size, heads, shape))
    kinds = *["kv"] * len(groups), *states, "row"
    groups += [_state_group(args, index, kind, shape) for index, kind in enumerate(states)]
    return [*groups, _metadata_group(rows, shape)], kinds


def _buffers(layers: Sequence[int], *columns: Sequence[int]) -> list[Listed]:
    if {*map(len, columns)} != {len(layers)}:
        raise GeometryError(
            "SGLang lists another number of buffers than this stage's layers and parts need",
            buffers=len(columns[0]),
            layers=list(layers),
        )
    return list(map(Listed, layers, *columns))


def _state_group(args: Any, index: int, kind: str, shape: Shape) -> CacheGroup:
    is_window = kind == "swa"
    buffers = _buffers(
        [*shape.window_layers] * 2 if is_window else args.state_layer_ids[index],
        args.state_data_ptrs[index],
        args.state_data_lens[index],
        args.state_item_lens[index],
    )
    if not is_window:
        states = [
            (each.layer, _state_views(each, at, args, index, shape))
            for at, each in enumerate(buffers)
        ]
        return _group(states, 1, shape)  # a block is one slot, and counts as one token
    if args.swa_kv_cache_layout != "nhd":
        raise GeometryError(
            "kvconnector transfers windows in pages of [token, head, dim] only",
            layout=args.swa_kv_cache_layout,
        )
    return _pages(buffers, args.page_size, shape.cut(shape.window_heads), shape)


def _pages(buffers: list[Listed], page_size: int, heads: Heads, shape: Shape) -> CacheGroup:
    """Return the group of a pool of pages `[token, head, dim]`."""
    pages = [(each.layer, [(_page_view(each, page_size, heads), heads)]) for each in buffers]
    return _group(pages, page_size, shape)


def _page_view(buffer: Listed, page_size: int, heads: Heads) -> KVView:
    layer, address, nbytes, item = buffer
    num_heads = len(heads.held)
    row, rest = divmod(item, page_size * num_heads)
    if rest or not row:
        raise GeometryError(
            "a page's size does not fit its tokens and heads",
            layer=layer,
            nbytes=item,
            page_size=page_size,
            heads=num_heads,
        )
    dim, size = _elements(row)
    counts = (nbytes // item, num_heads, page_size, dim)
    return KVView(address, counts, (item, row, num_heads * row, size), size)


def _state_views(buffer: Listed, at: int, args: Any, index: int, shape: Shape) -> Views:
    """Return the parts of one state tensor `[slot, outer, cut, rest]`, whose axis `cut` counts as heads."""
    _, address, nbytes, item = buffer
    slots = nbytes // item
    cut = _listed(args.state_dim_per_tensor, index, at, 0)
    outer = _listed(args.state_slice_outer_counts, index, at, 1)
    groups = _listed(args.state_conv_shard_groups, index, at, None)
    if not cut or not (any(args.state_conv_shard_groups[index]) or shape.conv_heads):
        heads = shape.cut(shape.tp_size) if cut else WHOLE
        return [(_page_view(buffer, 1, heads), heads)]
    row, rest = divmod(item, outer * cut)
    dim, size = _elements(row)
    if rest or not row or (outer > 1 and dim > 1):
        raise GeometryError(
            "a state's size does not fit its channels or heads", nbytes=item, outer=outer, cut=cut
        )
    joined = shape.conv_heads if groups is None else [shape.cut(total) for total in groups]
    if sum(len(heads.held) for heads in joined) != cut:
        joined = [shape.cut(cut * shape.tp_size)]
    found = []
    for heads in joined:
        counts = (slots, len(heads.held), 1, max(outer, dim))
        strides = (item, row, item, cut * row if outer > 1 else size)
        found.append((KVView(address, counts, strides, size), heads))
        address += len(heads.held) * row
    return found


def _listed(column: Sequence[Sequence[Any]], index: int, at: int, default: Any) -> Any:
    """Return the value of one tensor of one state from a list of `KVArgs`, or `default` if SGLang lists none."""
    values = column[index] if index < len(column) else ()
    return values[at] if at < len(values) else default


def _metadata_group(rows: MetadataRows, shape: Shape) -> CacheGroup:
    """Return the metadata's group, in which a block is one request's row and counts as one token.

    The last prefill stage has the row, and every decode stage needs it. Since a layer belongs to one stage only, the
    row is registered as `MAX_STAGES` layers at one address. Raises GeometryError: a decode engine has more stages.
    """
    if shape.is_prefill:
        layers = range(MAX_STAGES if shape.pp_rank == shape.pp_size - 1 else 0)
    elif shape.pp_size > MAX_STAGES:
        raise GeometryError("too many stages", pp_size=shape.pp_size, limit=MAX_STAGES)
    else:
        layers = range(shape.pp_rank, MAX_STAGES, shape.pp_size)
    buffer = Listed(0, rows.address, rows.num_rows * rows.row_bytes, rows.row_bytes)
    row = [(_page_view(buffer, 1, WHOLE), WHOLE)]
    return _group([(layer, row) for layer in layers], 1, shape, like=row)


def _group(
    found: Sequence[tuple[int, Views]], block_size: int, shape: Shape, like: Views = ()
) -> CacheGroup:
    """Return the group of these parts, each with its layer. `like`: the parts of a layer, should there be none here."""
    layers: dict[int, list[tuple[KVView, Heads]]] = {}
    for layer, views in sorted(found, key=itemgetter(0)):
        layers.setdefault(layer, []).extend(views)
    parts = tuple(
        PartGeometry(
            name=f"part{number}",
            total_heads=heads.total,
            head_start=heads.held.start,
            head_stop=heads.held.stop,
            head_dim=view.head_dim,
            item_size_bytes=view.item_size_bytes,
        )
        for number, (view, heads) in enumerate(next(iter(layers.values()), like))
    )
    geometry = GroupGeometry(block_size=block_size, layers=tuple(layers), parts=parts)
    by_layer = {layer: tuple(view for view, _ in views) for layer, views in layers.items()}
    return CacheGroup(geometry, by_layer, shape.device, shape.dtype)


def _elements(nbytes: int) -> tuple[int, int]:
    """Return bytes as a number of elements and the elements' size, the largest of 8, 4, 2 and 1 that divides them."""
    size = next(size for size in (8, 4, 2, 1) if nbytes % size == 0)
    return nbytes // size, size
