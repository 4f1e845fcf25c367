"""SGLang's pools as cache groups, from the addresses and lengths that it lists for transfer backends (`KVArgs`).

Every rank of both engines has the groups in this order: KV, the draft model's KV, the states as listed, the rows of
metadata (`Group` in requests.py has the kinds). An entry of a KV list is one part (K, V or a latent) of one layer:
consecutive pages, each `[token, head, dim]`. An entry of a state list holds the states of one layer: consecutive slots.
Everything that tensor parallelism splits is registered as heads, so that the topology can intersect the shares of any
two ranks:

- *Attention* is split by KV heads. With fewer heads than ranks, several ranks hold the same head.
- *Recurrent states* are split by channels or state heads, which count as heads here. A convolution's state `[q | k |
  v]`, with each of the three split on its own, becomes three parts. So does Mamba 2's `[x | B | C]`, where all ranks
  hold B and C if the model has a single group.
- *Latents and indexers* of sparse attention are whole on every rank. A page of quantised rows is stored in planes: all
  values, then all scales, then maybe padding. Each plane is a part of its own, or a page that is not full would bring
  values without their scales.
- *DeepSeek-V4* lists its KV by the number of tokens in a row, and the states of its compressors behind the window's
  pages. `_compressed_groups` has the order. Only rows of the layouts in `ROW_LAYOUTS` are known.
- *Where the split is not known* (a draft model's KV of another shape, or states whose convolution SGLang does not
  describe), a rank's share is one head out of `tp_size`. Engines with equal tensor parallelism match; others are
  refused in the greeting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, NamedTuple

import msgspec

from kvconnector.errors import GeometryError
from kvconnector.integrations.sglang.metadata import MetadataRows
from kvconnector.integrations.sglang.numbers import BYTES, Numbers
from kvconnector.integrations.sglang.requests import C128, Group
from kvconnector.layout import KVView
from kvconnector.runtime import CacheGroup
from kvconnector.topology import GroupGeometry, PartGeometry, TpKVTopology
from kvconnector.topology.geometry import ELEMENTS, FP8_ELEMENTS

MOVED_STATES = ("swa", "mamba", "dsa")
COMPRESSED_STATES = ("swa", "c128_state")
"""What a model with compressed rows, DeepSeek-V4, lists as states."""
INDEX_PAGE = 64
"""Rows in a page of an indexer's cache, as its kernels need them."""
INDEX_ROWS = ((128, 4), (64, 4))
"""Bytes of the values and scales of an indexer's row: in fp8, and in MXFP4."""
ROW_LAYOUTS: dict[str, tuple[tuple[int, ...], int]] = {
    "v4": ((576, 8), 576),
    "uniform_fp8": ((512,), 512),
}
"""Bytes of the planes of a DeepSeek-V4 row, and of what its pages are padded to, by SGLang's name of the layout."""
C4_STATE_BYTES, C4_INDEX_STATE_BYTES = 8192, 2048
"""float32 keys and scores of a token's main state, 2 x 2 x 512, and of its indexer's, 2 x 2 x 128."""
ITEM_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "bf16": 2,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}
"""Bytes of an element of attention's caches, by SGLang's name of their type."""
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
    `accumulates_c128`: DeepSeek-V4's state of 128 tokens is one accumulated row, not a row for each token. `numbers`
    are the elements of the model's own K and V. `state_element` names recurrent states' types, which `KVArgs` does not
    list: states of other types may have as many bytes. `index_element` says likewise which numbers an indexer's keys
    are, and `seed_element` by which numbers a draft model's tokens are named.
    """

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    is_prefill: bool
    replica: int = 0
    """Which of the copies of a tensor rank's caches this rank has: its rank in prefill context parallelism."""
    is_split: bool = False
    """True if the ranks of prefill context parallelism are stages, each with layers of its own: see `split.py`."""
    num_layers: int
    kv_heads: int
    window_heads: int
    kv_layers: Sequence[int]
    window_layers: Sequence[int]
    has_latent: bool
    device: str
    dtype: str
    conv_heads: Sequence[Heads] = ()
    accumulates_c128: bool = False
    numbers: Numbers = BYTES
    state_element: str = ""
    index_element: str = ""
    seed_element: str = ""
    is_transposed: bool = False
    """True if a convolution's channels are innermost, as kernels for AMX need them: no rank's share is a range."""

    @property
    def part_names(self) -> tuple[str, ...]:
        """The names of the parts of an attention layer's cache, as engines of every kind state them."""
        return ("latent",) if self.has_latent else ("k", "v")

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
) -> tuple[list[CacheGroup], tuple[Group, ...]]:
    """Return one rank's cache groups, and how a request's blocks in each follow from SGLang's ids.

    The rows of metadata come after the caches, and the groups of a draft model last: an engine of another kind, or
    without a draft model, lacks these and can exchange all others.

    Args:
        args: SGLang's `KVArgs`, filled.
        shape: The rank's place, heads and layers.
        rows: The rank's metadata.

    Raises:
        GeometryError: kvconnector does not transfer this kind of pool, or a pool's size does not fit its heads, tokens
            and layers.
    """
    states = [str(getattr(kind, "value", kind)) for kind in args.state_types]
    ratios = getattr(args, "mla_compression_ratios", None)
    moved = MOVED_STATES if ratios is None else COMPRESSED_STATES
    if refused := sorted({*states} - {*moved}):
        raise GeometryError("kvconnector does not transfer caches of these kinds", kinds=refused)
    found = (
        _plain_groups(args, shape, states)
        if ratios is None
        else _compressed_groups(args, shape, states, ratios)
    )
    drafts = [each for each in found if each[0].is_draft]
    found = [each for each in found if not each[0].is_draft]
    found.append((Group("row"), _metadata_group(rows, shape)))
    if rows.seed_bytes:
        seeds = _with_element(_metadata_group(rows, shape, is_seed=True), shape.seed_element)
        drafts.append((Group("row", is_draft=True), seeds))
    found += drafts
    return [cache for _, cache in found], tuple(group for group, _ in found)


def _plain_groups(args: Any, shape: Shape, states: list[str]) -> list[tuple[Group, CacheGroup]]:
    parts = 1 if shape.has_latent else 2
    drafted = range(shape.num_layers, shape.num_layers + args.num_draft_entries // parts)
    layers = args.kv_layer_ids or [*shape.kv_layers] * parts + [*drafted] * parts
    buffers = _buffers(layers, args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens)
    num_own = len(buffers) - args.num_draft_entries
    own, draft = buffers[:num_own], buffers[num_own:]
    heads = shape.cut(shape.kv_heads)
    found = [(Group("kv"), _pages(own, args.page_size, heads, shape))]
    if draft:
        if {each.item_bytes for each in draft} != {each.item_bytes for each in own}:
            heads = shape.cut(shape.tp_size)
        # which may have another type
        group = _pages(draft, args.page_size, heads, replace(shape, numbers=BYTES))
        found.append((Group("kv", is_draft=True), group))
    for index, kind in enumerate(states):
        if kind == "dsa":
            found += _index_groups(args, index, [each.layer for each in buffers], shape)
        else:
            found.append((Group(kind, index), _state_group(args, index, kind, shape)))
    return found


def _index_groups(
    args: Any, index: int, layers: list[int], shape: Shape
) -> list[tuple[Group, CacheGroup]]:
    """Return the groups of a sparse indexer's keys: the model's, and its draft model's if that has any. Layers that use
    another layer's selection have none of their own.
    """
    if args.page_size != INDEX_PAGE:
        raise GeometryError(
            "kvconnector transfers an indexer's cache in pages of 64 tokens only",
            page_size=args.page_size,
        )
    listed = args.state_item_lens[index]
    # a draft model may share the indexers of the model
    buffers = _state_buffers(args, index, layers[: len(listed)])
    pages = [
        (each.layer, _index_planes(each, args.page_size)) for each in buffers if each.item_bytes
    ]
    found = []
    for is_draft in (False, True):
        held = [each for each in pages if (each[0] >= shape.num_layers) == is_draft]
        if held or not is_draft:
            group = _group(held, args.page_size, shape, like=_like(INDEX_ROWS[0]))
            group = _with_element(group, shape.index_element)
            found.append((Group("dsa", index, is_draft=is_draft), group))
    return found


def _compressed_groups(
    args: Any, shape: Shape, states: list[str], ratios: Sequence[int]
) -> list[tuple[Group, CacheGroup]]:
    """Return the groups of DeepSeek-V4's pools, in which `ratios[layer]` tokens make a row: 4, 128, or 0 for none.

    SGLang lists the latents of the layers with rows of 4, their indexers, and the latents of those with rows of 128;
    then, as the first state, the windows of all layers, the main states of rows of 4, and those of their indexers. The
    states of rows of 128 are another state, the windows of draft layers the last one.
    """
    if unknown := sorted({*ratios} - {0, 4, C128}):
        raise GeometryError("kvconnector knows only rows of 4 and of 128 tokens", ratios=unknown)
    if args.page_size % C128 or args.page_size // 4 != INDEX_PAGE or args.num_draft_entries:
        raise GeometryError(
            "kvconnector transfers compressed rows only in pages of 256 tokens, and only draft models that have none",
            page_size=args.page_size,
            draft_entries=args.num_draft_entries,
        )
    widths, align = _row_layout(getattr(args, "kv_layout", None), ratios)
    stage = sorted({*shape.kv_layers, *shape.window_layers})
    of4, of128 = ([layer for layer in stage if ratios[layer] == ratio] for ratio in (4, C128))
    kv = _buffers([*of4, *of4, *of128], args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens)

    def latents(buffers: Sequence[Listed], rows: int) -> list[tuple[int, Views]]:
        return [(each.layer, _planes(each, rows, widths, align)) for each in buffers]

    found: list[tuple[Group, CacheGroup]] = []
    rows = args.page_size // 4
    if 4 in ratios:
        both = latents(kv[: len(of4)], rows)
        both += [(each.layer, _index_planes(each, rows)) for each in kv[len(of4) : 2 * len(of4)]]
        like = [*_like(widths), *_like(INDEX_ROWS[0])]
        found.append((Group("c4"), _group(both, rows, shape, like=like, row_tokens=4)))
    if C128 in ratios:
        rows = args.page_size // C128
        pages = latents(kv[2 * len(of4) :], rows)
        group = _group(pages, rows, shape, like=_like(widths), row_tokens=C128)
        found.append((Group("c128"), group))
    for index, kind in enumerate(states):
        if kind == "c128_state":
            buffers = _state_buffers(args, index, of128)
            found.append(_c128_states(buffers, index, shape))
            continue
        is_draft = index != states.index("swa")
        num_listed = len(args.state_item_lens[index])
        drafted = range(shape.num_layers, shape.num_layers + num_listed)
        layers = [*drafted] if is_draft else [*stage, *of4, *of4]
        buffers = _state_buffers(args, index, layers)
        num_windows = len(buffers) if is_draft else len(stage)
        windows = _group(
            latents(buffers[:num_windows], args.page_size),
            args.page_size,
            shape,
            like=_like(widths),
        )
        found.append((Group("swa", index, is_draft=is_draft), windows))
        if 4 in ratios and not is_draft:
            found.append(_c4_states(buffers[num_windows:], index, shape))
    return found


def _row_layout(name: str | None, ratios: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Return the bytes of the planes of a row, and the bytes that a page is a multiple of.

    `name` lists the layouts of the windows and of the rows of each length, as in "v4,c4:v4,c128:v4". Releases that have
    one layout name none. Raises GeometryError: they are not all one that kvconnector knows.
    """
    main = (name or "v4").partition(",")[0]
    uniform = f"{main},{','.join(f'c{ratio}:{main}' for ratio in sorted({*ratios} - {0}))}"
    if main not in ROW_LAYOUTS or name not in {None, main, uniform.rstrip(",")}:
        raise GeometryError(
            "kvconnector does not transfer rows in this layout",
            layout=name,
            known=sorted(ROW_LAYOUTS),
        )
    return ROW_LAYOUTS[main]


def _c4_states(buffers: list[Listed], index: int, shape: Shape) -> tuple[Group, CacheGroup]:
    """Return the states of rows of 4 tokens: one row of each ring for each token."""
    main, indexer = buffers[: len(buffers) // 2], buffers[len(buffers) // 2 :]
    rings = {each.item_bytes / C4_STATE_BYTES for each in main}
    rings |= {each.item_bytes / C4_INDEX_STATE_BYTES for each in indexer}
    if rings and not (len(rings) == 1 and rings <= {8, 16}):
        raise GeometryError(
            "kvconnector knows only rings of 8 or 16 float32 states", rings=sorted(rings)
        )
    ring = int(max(rings, default=8))
    tokens = [
        (
            each.layer,
            [(_page_view(each._replace(item_bytes=each.item_bytes // ring), 1, WHOLE), WHOLE)],
        )
        for each in (*main, *indexer)
    ]
    like = _like((C4_STATE_BYTES, C4_INDEX_STATE_BYTES))
    return Group("c4-state", index, ring), _group(tokens, 1, shape, like=like)


def _c128_states(buffers: list[Listed], index: int, shape: Shape) -> tuple[Group, CacheGroup]:
    """Return the states of rows of 128 tokens: a ring's page has 128, unless they are accumulated in a single row."""
    rows, kind = (1, "c128-online") if shape.accumulates_c128 else (C128, "c128-state")
    pages = [(each.layer, [(_page_view(each, rows, WHOLE), WHOLE)]) for each in buffers]
    return Group(kind, index), _group(pages, rows, shape, like=_like((4096,)))


def _buffers(layers: Sequence[int], *columns: Sequence[int]) -> list[Listed]:
    if {*map(len, columns)} != {len(layers)}:
        raise GeometryError(
            "the number of buffers that SGLang lists does not match this stage's layers and parts",
            buffers=len(columns[0]),
            layers=list(layers),
        )
    return list(map(Listed, layers, *columns))


def _state_buffers(args: Any, index: int, layers: Sequence[int]) -> list[Listed]:
    columns = (args.state_data_ptrs, args.state_data_lens, args.state_item_lens)
    return _buffers(layers, *(column[index] for column in columns))


def _state_group(args: Any, index: int, kind: str, shape: Shape) -> CacheGroup:
    is_window = kind == "swa"
    layers = [*shape.window_layers] * 2 if is_window else args.state_layer_ids[index]
    buffers = _state_buffers(args, index, layers)
    if not is_window:
        _check_alike(buffers)
        states = [
            (each.layer, _state_views(each, at, args, index, shape))
            for at, each in enumerate(buffers)
        ]
        # a block is one slot, and counts as one token
        return _with_element(_group(states, 1, shape), shape.state_element)
    layout = getattr(
        args, "swa_kv_cache_layout", "nhd"
    )  # since 0.5.22; before there was this one alone
    if layout != "nhd":
        raise GeometryError(
            "kvconnector transfers windows in pages of [token, head, dim] only", layout=layout
        )
    return _pages(buffers, args.page_size, shape.cut(shape.window_heads), shape)


def _check_alike(buffers: list[Listed]) -> None:
    """Raise GeometryError unless all layers have as many states: some models have other states in some layers only."""
    counts = Counter(each.layer for each in buffers)
    if len({*counts.values()}) > 1:
        raise GeometryError(
            "kvconnector transfers recurrent states only if each layer has the same ones, but no histories of n-grams"
            " and no short convolutions beside them",
            states_of_layers=dict(counts),
        )


def _pages(buffers: list[Listed], page_size: int, heads: Heads, shape: Shape) -> CacheGroup:
    """Return the group of a pool of pages `[token, head, dim]`, with the names and the elements that engines of other
    kinds state, too.
    """
    item = ITEM_BYTES.get(shape.dtype.partition("/")[0], 0)
    pages = [(each.layer, [(_page_view(each, page_size, heads, item), heads)]) for each in buffers]
    group = _group(pages, page_size, shape, names=shape.part_names)
    return _with_numbers(group, shape.numbers)


def _with_element(group: CacheGroup, element: str) -> CacheGroup:
    """Return a group all of whose parts state what their elements are."""
    geometry = group.geometry
    parts = tuple(msgspec.structs.replace(part, element=element) for part in geometry.parts)
    return replace(group, geometry=msgspec.structs.replace(geometry, parts=parts))


def _with_numbers(group: CacheGroup, numbers: Numbers) -> CacheGroup:
    """Return a group of K and V whose parts state what their elements are, if these have that type's size."""
    geometry = group.geometry
    sizes = {part.item_size_bytes for part in geometry.parts}
    if sizes != {ELEMENTS.get(numbers.element)}:
        return group
    stated = {"element": numbers.element, "rounding": numbers.rounding}
    parts = tuple(msgspec.structs.replace(part, **stated) for part in geometry.parts)
    scales: tuple[tuple[tuple[float, ...], ...], ...] = ()
    if numbers.has_unit_scale and numbers.element in FP8_ELEMENTS:
        scales = (((1.0,),) * len(parts),) * len(geometry.layers)
    return replace(group, geometry=msgspec.structs.replace(geometry, parts=parts, scales=scales))


def _page_view(buffer: Listed, page_size: int, heads: Heads, element_bytes: int = 0) -> KVView:
    """Return the view of a pool's pages, in elements of `element_bytes`, or of any size if that is 0."""
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
    if element_bytes and row % element_bytes == 0:
        dim, size = row // element_bytes, element_bytes
    counts = (nbytes // item, num_heads, page_size, dim)
    return KVView(address, counts, (item, row, num_heads * row, size), size)


def _planes(buffer: Listed, rows: int, widths: Sequence[int], align: int) -> Views:
    """Return the parts of pages of `rows` rows: a plane for each width in bytes, one after the other, then padding."""
    layer, address, nbytes, item = buffer
    needed = -(-rows * sum(widths) // align) * align
    if item != needed:
        raise GeometryError(
            "a page's size is not that of its rows",
            layer=layer,
            nbytes=item,
            needed=needed,
            rows=rows,
            row_bytes=tuple(widths),
        )
    found = []
    for width in widths:
        dim, size = _elements(width)
        view = KVView(address, (nbytes // item, 1, rows, dim), (item, width, width, size), size)
        found.append((view, WHOLE))
        address += rows * width
    return found


def _index_planes(buffer: Listed, rows: int) -> Views:
    widths = next((w for w in INDEX_ROWS if rows * sum(w) == buffer.item_bytes), INDEX_ROWS[0])
    return _planes(buffer, rows, widths, 1)


def _like(widths: Sequence[int]) -> Views:
    """Return the parts of a layer with rows of these bytes, for a stage that has no such layer."""
    return _planes(Listed(0, 8, sum(widths), sum(widths)), 1, widths, 1)


def _state_views(buffer: Listed, at: int, args: Any, index: int, shape: Shape) -> Views:
    """Return the parts of one state tensor `[slot, outer, cut, rest]`, whose axis `cut` counts as heads."""
    _, address, nbytes, item = buffer
    slots = nbytes // item
    cut = _listed(args.state_dim_per_tensor, index, at, 0)
    outer = _listed(args.state_slice_outer_counts, index, at, 1)
    groups = _listed(args.state_conv_shard_groups, index, at, None)
    is_known = bool(any(args.state_conv_shard_groups[index]) or shape.conv_heads)
    if not cut or not is_known or shape.is_transposed:
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


def _metadata_group(rows: MetadataRows, shape: Shape, *, is_seed: bool = False) -> CacheGroup:
    """Return the group of the metadata, in which a block is one request's row and counts as one token.

    `is_seed`: the group of the draft model's part of it.

    The last prefill stage has the row, and every decode stage needs it. Since a layer belongs to one stage only, the
    row is registered as `MAX_STAGES` layers at one address. Raises GeometryError: a decode engine has more stages.
    """
    if shape.is_prefill:
        layers = range(MAX_STAGES if shape.pp_rank == shape.pp_size - 1 else 0)
    elif shape.pp_size > MAX_STAGES:
        raise GeometryError("too many stages", pp_size=shape.pp_size, limit=MAX_STAGES)
    else:
        layers = range(shape.pp_rank, MAX_STAGES, shape.pp_size)
    address, nbytes = rows.address, rows.own_bytes
    if is_seed:
        address, nbytes = address + nbytes, rows.seed_bytes
    dim, size = _elements(nbytes)
    strides = (rows.row_bytes, nbytes, nbytes, size)
    row = [(KVView(address, (rows.num_rows, 1, 1, dim), strides, size), WHOLE)]
    # both engines agree on a part's name, and rows that lack different columns may be equally long
    names = [f"without {', '.join(rows.lacks)}"] if rows.lacks and not is_seed else ()
    return _group([(layer, row) for layer in layers], 1, shape, like=row, names=names)


def _group(
    found: Sequence[tuple[int, Views]],
    block_size: int,
    shape: Shape,
    *,
    like: Views = (),
    row_tokens: int = 1,
    names: Sequence[str] = (),
) -> CacheGroup:
    """Return the group of these parts, each with its layer. `like`: the parts of a layer, should there be none here.
    `block_size` is in rows of `row_tokens` tokens. `names`: the parts', if engines must agree on more
    than their number.
    """
    layers: dict[int, list[tuple[KVView, Heads]]] = {}
    for layer, views in sorted(found, key=itemgetter(0)):
        layers.setdefault(layer, []).extend(views)
    own = next(iter(layers.values()), like)
    if len(names) != len(own):
        names = [f"part{number}" for number in range(len(own))]
    parts = tuple(
        PartGeometry(
            name=name,
            total_heads=heads.total,
            head_start=heads.held.start,
            head_stop=heads.held.stop,
            head_dim=view.head_dim,
            item_size_bytes=view.item_size_bytes,
        )
        for name, (view, heads) in zip(names, own, strict=True)
    )
    geometry = GroupGeometry(
        block_size=block_size, layers=tuple(layers), parts=parts, row_tokens=row_tokens
    )
    by_layer = {layer: tuple(view for view, _ in views) for layer, views in layers.items()}
    return CacheGroup(geometry, by_layer, shape.device, shape.dtype)


def _elements(nbytes: int) -> tuple[int, int]:
    """Return bytes as a number of elements and the elements' size, the largest of 8, 4, 2 and 1 that divides them."""
    size = next(size for size in (8, 4, 2, 1) if nbytes % size == 0)
    return nbytes // size, size
