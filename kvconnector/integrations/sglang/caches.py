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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvconnector.errors import GeometryError
from kvconnector.integrations.sglang.metadata import MetadataRows
from kvconnector.layout import KVView
from kvconnector.runtime import CacheGroup
from kvconnector.topology import GroupGeometry, PartGeometry, TpKVTopology

MOVED_STATES = ("swa", "mamba")
MAX_STAGES = 8
"""Pipeline stages of a decode engine: the row of metadata has as many layers, one for each of them or more."""


class Heads(NamedTuple):
    """The heads of a pool, and those of them that this rank holds."""

    total: int
    held: range


WHOLE = Heads(1, range(1))
"""What every rank holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
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
    kv_heads: int
    window_heads: int
    kv_layers: Sequence[int]
    window_layers: Sequence[int]
    has_latent: bool
    device: str
    dtype: str
    conv_heads: Sequence[Heads] = ()

    def cut(self, total: int) -> Heads:
        """As SGLang cuts this number of heads. Raises GeometryError: neither number divides the other."""
        if total % self.tp_size and self.tp_size % total:
            raise GeometryError("KV heads are not cut evenly", heads=total, tp_size=self.tp_size)
        return Heads(
            total, TpKVTopology.heads_of(total, tp_rank=self.tp_rank, tp_size=self.tp_size)
        )


class Listed(NamedTuple):
    """A buffer of `KVArgs`, of one global layer: `nbytes` of pages or slots, each `item_bytes` long."""

    layer: int
    address: int
    nbytes: int
    item_bytes: int


Views = Sequence[tuple[KVView, Heads]]


def registered_groups(
    args: Any, shape: Shape, rows: MetadataRows
) -> tuple[list[CacheGroup], tuple[str, ...]]:
    """Return the cache groups of one rank, and what each is: "kv", "swa", "mamba" or "row", as in `Layout.kinds`.

    Args:
        args: SGLang's `KVArgs`, filled.
        shape: What they do not say.
        rows: Of metadata.

    Raises:
        GeometryError: a kind of pool that is not moved, or one that is not what it should be.
    """
    states = [str(getattr(kind, "value", kind)) for kind in args.state_types]
    if refused := sorted({*states} - {*MOVED_STATES}):
        raise GeometryError("kvconnector does not move caches of these kinds", kinds=refused)
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
            "SGLang lists another number of buffers than this stage has layers and parts",
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
        found = [_state_views(each, at, args, index, shape) for at, each in enumerate(buffers)]
        return _group(buffers, 1, found, shape)  # a block is one slot, and counts as one token
    if args.swa_kv_cache_layout != "nhd":
        raise GeometryError(
            "windows are moved in pages of [token, head, dim] only", layout=args.swa_kv_cache_layout
        )
    return _pages(buffers, args.page_size, shape.cut(shape.window_heads), shape)


def _pages(buffers: list[Listed], page_size: int, heads: Heads, shape: Shape) -> CacheGroup:
    """A pool of pages `[token, head, dim]`."""
    found = [[(_page_view(each, page_size, heads), heads)] for each in buffers]
    return _group(buffers, page_size, found, shape)


def _page_view(buffer: Listed, page_size: int, heads: Heads) -> KVView:
    layer, address, nbytes, item = buffer
    num_heads = len(heads.held)
    row, rest = divmod(item, page_size * num_heads)
    if rest or not row:
        raise GeometryError(
            "a page is not as long as its tokens and heads",
            layer=layer,
            nbytes=item,
            page_size=page_size,
            heads=num_heads,
        )
    dim, size = _elements(row)
    counts = (nbytes // item, num_heads, page_size, dim)
    return KVView(address, counts, (item, row, num_heads * row, size), size)


def _state_views(buffer: Listed, at: int, args: Any, index: int, shape: Shape) -> Views:
    """The parts of one state tensor `[slot, outer, cut, rest]`, each of whose cuts is a head."""
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
            "a state is not as long as what it is cut into", nbytes=item, outer=outer, cut=cut
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
    """One value of `KVArgs`' lists by component and tensor, which are empty where there is nothing to say."""
    values = column[index] if index < len(column) else ()
    return values[at] if at < len(values) else default


def _metadata_group(rows: MetadataRows, shape: Shape) -> CacheGroup:
    """The rows of metadata: a block is one request's row, and counts as one token.

    The last prefill stage has the row, and every decode stage needs it; a layer belongs to one stage, so the row has
    `MAX_STAGES` layers, all at one address. Raises GeometryError: a decode engine of more stages.
    """
    if shape.is_prefill:
        layers = range(MAX_STAGES if shape.pp_rank == shape.pp_size - 1 else 0)
    elif shape.pp_size > MAX_STAGES:
        raise GeometryError("too many stages", pp_size=shape.pp_size, limit=MAX_STAGES)
    else:
        layers = range(shape.pp_rank, MAX_STAGES, shape.pp_size)
    buffer = Listed(0, rows.address, rows.num_rows * rows.row_bytes, rows.row_bytes)
    row = [(_page_view(buffer, 1, WHOLE), WHOLE)]
    return _cache_group(dict.fromkeys(layers, row), row, 1, shape)


def _group(
    buffers: list[Listed], block_size: int, found: Sequence[Views], shape: Shape
) -> CacheGroup:
    """A group of these buffers, each with its parts."""
    by_layer: dict[int, list[tuple[KVView, Heads]]] = {each.layer: [] for each in sorted(buffers)}
    for buffer, views in zip(buffers, found, strict=True):
        by_layer[buffer.layer] += views
    return _cache_group(by_layer, next(iter(by_layer.values()), []), block_size, shape)


def _cache_group(
    layers: Mapping[int, Views], like: Views, block_size: int, shape: Shape
) -> CacheGroup:
    """A group of these layers, all of which are like `like`."""
    parts = tuple(
        PartGeometry(
            name=f"part{number}",
            total_heads=heads.total,
            head_start=heads.held.start,
            head_stop=heads.held.stop,
            head_dim=view.head_dim,
            item_size_bytes=view.item_size_bytes,
        )
        for number, (view, heads) in enumerate(like)
    )
    geometry = GroupGeometry(block_size=block_size, layers=tuple(layers), parts=parts)
    views = {layer: tuple(view for view, _ in found) for layer, found in layers.items()}
    return CacheGroup(geometry, views, shape.device, shape.dtype)


def _elements(nbytes: int) -> tuple[int, int]:
    """Bytes as a number of elements and their size: the longest words that divide them."""
    size = next(size for size in (8, 4, 2, 1) if nbytes % size == 0)
    return nbytes // size, size
