"""The parts of one layer's cache in vLLM: K and V, an MLA latent, or a recurrent state.

vLLM gives every attention layer a tensor `[B, H, N, C]` (blocks, heads, tokens, content), with K and V packed in C. It
describes the memory of most layers, but not of all: `latents` and `cpu_attention` have the others. A page of a
recurrent layer holds the states of one request consecutively: a convolution's channels, then the state heads. Tensor
parallelism splits both, and the rest of kvconnector calls both of them heads. A state counts as one token.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from kvconnector.errors import GeometryError
from kvconnector.integrations.vllm.cpu_attention import CpuStore, probe_block
from kvconnector.integrations.vllm.latents import (
    INDEXERS_OF_KEYS,
    MOST_PAGE_ROWS,
    PAGE_TOKENS,
    Planes,
    planes_of,
)
from kvconnector.layout import KVView
from kvconnector.runtime import view_of
from kvconnector.topology import PartGeometry, TpKVTopology
from kvconnector.topology.geometry import MAX_ELEMENT_LENGTH, ROUNDINGS

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import AttentionSpec, MambaSpec

CPU_ATTENTION = "CPU_ATTN"
BLOCK_SPARSE = frozenset({"CUTLASS_MSA", "MINIMAX_M3_SPARSE", "TRITON_MSA"})
"""Backends of MiniMax-M3's sparse layers, whose caches are those of any other GQA layer. NVFP4 and ROCm's AITER give K
and V head slots of their own, which `_check_attention` refuses."""
PACKED_CONTENT = BLOCK_SPARSE | frozenset(
    {
        "FLASH_ATTN",
        "FLASH_ATTN_DIFFKV",
        "FLASHINFER",
        "FLEX_ATTENTION",
        "TRITON_ATTN",
        "TRITON_ATTN_DIFFKV",
        "TRITON_FLASHINFER",
        "TRITON_FLASH_ATTN",
        "TURBOQUANT",
        "ULTRAQUANT",
    }
)
"""Backends that store, for each block, head and token, first K's elements and then V's, or opaque quantised bytes of
both, in the order of the tensor's shape. The names of two are backends that share a cache: one for images, as Gemma's
and vLLM's first choice for these, and one for all else."""
UNPACKED_MODES = frozenset({"NONE", "FP8_PER_TENSOR", "NVFP4"})
"""Kinds of numbers whose rows have nothing else. (NVFP4's K and V are refused for their head slots.)"""
CUT_STATES = frozenset({"MAMBA1", "MAMBA2", "GDN_ATTN"})
"""Kinds of layers with two states, a convolution's input and a state per head, in this order. Both are split evenly,
except for the inputs of a group that all heads share."""
GROUP_INPUTS = ("B", "C")
"""Inputs of Mamba 2's convolution that a group of heads shares."""


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer as vLLM registers it. `backend` is the name of its attention backend, and `isa` the instruction set of
    the CPU backend. `total_kv_heads` are those of the layer's own model, which may be a draft model. `scales` are those
    of K and of V in an fp8 cache, each one number, or one for each head; empty if the cache's numbers have none.
    `element` and `rounding` are those of `PartGeometry`. `is_shuffled`: the backend on this device stores elements in
    another order than elsewhere. `is_ring`: a request has one block, whatever its length.

    Of a recurrent layer: `num_inputs` is the number of earlier tokens whose inputs its convolution needs, 0 if it is
    not known, and `is_group_shared` says that every rank has the same B and C.
    """

    name: str
    spec: Any
    tensor: torch.Tensor
    total_kv_heads: int = 1
    backend: str = ""
    isa: str = ""
    kv_cache_dtype: str = "auto"
    scales: tuple[tuple[float, ...], ...] = ()
    element: str = ""
    rounding: str = ROUNDINGS[0]
    is_shuffled: bool = False
    is_ring: bool = False
    num_inputs: int = 0
    is_group_shared: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes of one head's row of content."""
        return self.tensor.shape[-1] * self.tensor.element_size()


@dataclass(frozen=True, slots=True)
class TpSplit:
    """The engine's tensor-parallel split of its layers, and this rank's position in it."""

    tp_rank: int
    tp_size: int

    def heads(self, layer: LayerCache) -> tuple[int, range]:
        """Return an attention layer's number of heads on all ranks, and this rank's range of them. Raises
        GeometryError: the tensor has a single head, though the model's share is larger.
        """
        total, held = layer.total_kv_heads, layer.tensor.shape[1]
        mine = TpKVTopology.heads_of(total, tp_rank=self.tp_rank, tp_size=self.tp_size)
        if len(mine) == held:
            return total, mine
        if held > 1 or self.tp_size == 1:  # vLLM replicates single heads only; these are split
            total = held * self.tp_size
            return total, TpKVTopology.heads_of(total, tp_rank=self.tp_rank, tp_size=self.tp_size)
        raise GeometryError(
            "cannot tell which KV heads this rank holds: the layer has another number of them than its model",
            layer=layer.name,
            held=held,
            total_kv_heads=total,
            tp_size=self.tp_size,
        )


Part = tuple[PartGeometry, KVView]


def attention_parts(cache: LayerCache, cut: TpSplit, block_size: int) -> list[Part]:
    """Return an attention layer's parts, for blocks of `block_size` tokens. Raises GeometryError: an unknown layout."""
    spec: AttentionSpec = cache.spec
    _check_attention(cache, block_size)
    tensor = cache.tensor
    if cache.is_ring:
        return [_ring_part(cache)]
    if is_latent(spec):
        return _latent_parts(cache)
    total, heads = cut.heads(cache)
    if cache.backend == CPU_ATTENTION:
        return _cpu_parts(cache, total, heads)
    if cache.backend not in PACKED_CONTENT:
        raise GeometryError(
            "KVConnector does not know how this attention backend packs its cache",
            backend=cache.backend,
            layer=cache.name,
            known=sorted(PACKED_CONTENT | {CPU_ATTENTION}),
        )
    if spec.state_content_bytes is not None:
        return [_part("kv", view_of(tensor), total, heads, cache.element)]
    k, v = tensor[..., : spec.head_size], tensor[..., spec.head_size :]
    numbers = {"element": cache.element, "rounding": cache.rounding}
    return [_part(n, view_of(part), total, heads, **numbers) for n, part in (("k", k), ("v", v))]


def is_latent(spec: AttentionSpec) -> bool:
    """Return True for MLA and its like, which cache one vector for all heads, on every rank."""
    return bool(spec.num_kv_heads == 1 and spec.head_size_v == 0)


def planes_of_pages(cache: LayerCache) -> Planes:
    """Return the planes of a latent cache's pages, as in `latents`; empty if these are rows.

    Raises:
        GeometryError: it is not known how the layer's backend stores such rows.
    """
    is_opaque = cache.spec.state_content_bytes is not None
    planes = planes_of(cache.backend, cache.row_bytes, is_opaque=is_opaque)
    if planes is None:
        raise GeometryError(
            "KVConnector does not know how this attention backend stores rows of this width: each row as a"
            " whole, or all values of a page before its scales",
            backend=cache.backend,
            row_bytes=cache.row_bytes,
            dtype=str(cache.tensor.dtype),
            layer=cache.name,
        )
    return planes


def _latent_parts(cache: LayerCache) -> list[Part]:
    """Return the parts of a cache with one vector a row: one, or one for each plane of a page."""
    planes, tensor = planes_of_pages(cache), cache.tensor
    if cache.backend in INDEXERS_OF_KEYS and not tensor.is_contiguous():
        raise GeometryError(
            "vLLM itself stores this indexer's keys in wrong places where its blocks have gaps between them: choose a"
            " layout in which the blocks of each layer follow one another, such as VLLM_KV_CACHE_LAYOUT=LBHNC",
            layer=cache.name,
            backend=cache.backend,
            shape=tuple(tensor.shape),
            strides=tuple(tensor.stride()),
        )
    if not planes:
        numbers = {"element": cache.element, "rounding": cache.rounding}
        return [_part("latent", view_of(tensor), 1, range(1), **numbers)]
    num_blocks, _, rows, _ = tensor.shape
    # elements keep the tensor's type, in which unwritten slots are cleared
    item = tensor.element_size()
    block_stride, address = tensor.stride(0) * item, tensor.data_ptr()
    _check_pages(cache)
    row_tokens, page_tokens = int(cache.spec.tokens_per_state), PAGE_TOKENS.get(cache.backend, 0)
    is_split = row_tokens > 1 and rows > MOST_PAGE_ROWS.get(cache.backend, rows)
    if is_split or (page_tokens and rows * row_tokens != page_tokens):
        raise GeometryError(
            "the values and the scales of this backend's pages repeat inside a block: choose the block size of its"
            " kernels (--block-size)",
            layer=cache.name,
            backend=cache.backend,
            block_size=cache.spec.block_size,
            page_tokens=page_tokens or None,
            most_rows=MOST_PAGE_ROWS.get(cache.backend),
        )
    parts = []
    for name, nbytes in planes:
        shape = (num_blocks, 1, rows, nbytes // item)
        view = KVView(address, shape, (block_stride, block_stride, nbytes, item), item)
        parts.append(_part(name, view, 1, range(1), cache.element))
        address += rows * nbytes
    return parts


def _ring_part(cache: LayerCache) -> Part:
    """Return the part of a ring: a block has all of a request's recent tokens, each at its position modulo the ring's
    length. It is moved as a whole, so its bytes are one head of one token.
    """
    tensor = cache.tensor
    item = tensor.element_size()
    nbytes = prod(tensor.shape[1:]) * item
    if not tensor[0].is_contiguous():
        raise GeometryError("a ring's blocks are not contiguous", strides=tuple(tensor.stride()))
    stride = tensor.stride(0) * item
    view = KVView(
        tensor.data_ptr(),
        (tensor.shape[0], 1, 1, nbytes // item),
        (stride, stride, stride, item),
        item,
    )
    return _part("ring", view, 1, range(1), cache.element or _type_name(tensor.dtype))


def _check_pages(cache: LayerCache) -> None:
    """Raise GeometryError unless a page's bytes are contiguous: then its planes are where the backend expects them."""
    tensor = cache.tensor
    if tuple(tensor.stride()[2:]) != (tensor.shape[3], 1):
        raise GeometryError(
            "a page whose values are stored apart from their scales is not contiguous",
            layer=cache.name,
            shape=tuple(tensor.shape),
            strides=tuple(tensor.stride()),
        )


def _check_attention(cache: LayerCache, block_size: int) -> None:
    spec, tensor = cache.spec, cache.tensor
    if tensor.dim() != 4:
        raise GeometryError(
            "a cache tensor is not [blocks, heads, tokens, content]",
            layer=cache.name,
            shape=tuple(tensor.shape),
        )
    if cache.is_shuffled:
        raise GeometryError(
            "KVConnector does not transfer caches whose elements this device's kernels store in a"
            " device-specific order",
            layer=cache.name,
            backend=cache.backend,
        )
    if cache.is_ring:
        return
    if tensor.shape[2] != block_size:
        raise GeometryError(
            "the number of rows in a cache's blocks does not match their tokens",
            layer=cache.name,
            tokens_per_state=str(spec.tokens_per_state),
            shape=tuple(tensor.shape),
            block_size=block_size,
        )
    if spec.state_content_bytes is None and spec.kv_quant_mode.name not in UNPACKED_MODES:
        raise GeometryError(
            "KVConnector does not transfer a quantised cache whose backend does not state what a row has beside its"
            " numbers: scales may be stored elsewhere",
            layer=cache.name,
            backend=cache.backend,
            kv_quant_mode=spec.kv_quant_mode.name,
        )
    if spec.num_head_slots is not None or spec.kv_quant_mode.is_nvfp4:
        raise GeometryError(
            "KVConnector does not transfer caches whose heads are not separate in memory",
            layer=cache.name,
            backend=cache.backend,
            num_head_slots=spec.num_head_slots,
            kv_quant_mode=str(spec.kv_quant_mode),
        )


def _part(
    name: str,
    view: KVView,
    total: int,
    heads: range,
    element: str = "",
    *,
    rounding: str = ROUNDINGS[0],
) -> Part:
    """Return a part, with the type of its elements, if any, and the rule by which they are stored."""
    geometry = PartGeometry(
        name=name,
        total_heads=total,
        head_start=heads.start,
        head_stop=heads.stop,
        head_dim=view.head_dim,
        item_size_bytes=view.item_size_bytes,
        element=element,
        rounding=rounding,
    )
    return geometry, view


def _cpu_parts(cache: LayerCache, total: int, heads: range) -> list[Part]:
    tensor, spec = cache.tensor, cache.spec
    num_blocks, num_heads, block_size, content = tensor.shape
    inner = (content * block_size, content, 1)
    if tuple(tensor.stride()[1:]) != inner or spec.head_size != spec.head_size_v:
        raise GeometryError(
            "the CPU attention's blocks are not contiguous",
            layer=cache.name,
            shape=tuple(tensor.shape),
            strides=tuple(tensor.stride()),
        )
    store = CpuStore(
        num_heads, block_size, spec.head_size, tensor.dtype, cache.isa, cache.kv_cache_dtype
    )
    tile_tokens, found = probe_block(store)
    item = tensor.element_size()
    parts = []
    for part in found:
        view = KVView(
            tensor.data_ptr() + part.offset * item,
            (num_blocks, num_heads, block_size // tile_tokens, part.width),
            tuple(item * step for step in (tensor.stride(0), part.head, part.token, part.dim)),
            item,
        )
        parts.append(_part(part.name, view, total, heads, cache.element, rounding=cache.rounding))
    return parts


def state_parts(cache: LayerCache, cut: TpSplit, *, is_dim_first: bool) -> list[Part]:
    """Return the parts of a recurrent layer. `is_dim_first`: the convolution's channels are outermost.

    A convolution's input is `x` (Mamba 1), `x, B, C` (Mamba 2) or `Q, K, V` (gated delta net), each split on its own,
    so engines may differ in tensor parallelism and in the order of channels. A Mamba 2 with a single group of heads has
    B and C whole on every rank. States of other kinds are one opaque part per rank, for engines of equal tensor
    parallelism.

    An engine that drafts keeps one more column of inputs for each draft of a step. vLLM's kernels begin at the column
    that the step before determines: the number of tokens that it accepted, less one. That is the first column after a
    prompt, and where nothing is drafted. Only such states are offered, and a step never reads a later column before it
    has written it. So the columns of drafts are not moved.

    Raises:
        GeometryError: the parts do not fill the state, or its convolution keeps fewer columns than it needs.
    """
    spec: MambaSpec = cache.spec
    kind, state_bytes = spec.mamba_type.name, _state_bytes(spec)
    part = partial(_state_part, cache.tensor)
    names = [_type_name(dtype) for dtype in spec.dtypes]
    if spec.tp_replicated or kind not in CUT_STATES or len(spec.shapes) != 2:
        # the part's name contains the size, so engines of other sizes refuse each other
        name = "state" if spec.tp_replicated else f"state-tp{cut.tp_size}"
        ranks = TpSplit(0, 1) if spec.tp_replicated else cut
        element = "_".join(("bytes_of", *dict.fromkeys(names)))[:MAX_ELEMENT_LENGTH]
        shape = (1, state_bytes)
        return [part(name, ranks, shape, (state_bytes, 1), offset=0, item=1, element=element)]
    (rows, columns), temporal = spec.shapes
    channels, width = (rows, columns) if is_dim_first else (columns, rows)
    num_inputs = cache.num_inputs or width
    item = spec.dtypes[0].itemsize
    strides = (width * item, item) if is_dim_first else (item, channels * item)
    parts, first = [], 0
    for name, count in _channels(kind, channels, temporal):
        shape, offset = (count, num_inputs), first * strides[0]
        of_conv = {"item": item, "element": names[0]}
        ranks = TpSplit(0, 1) if name in GROUP_INPUTS and cache.is_group_shared else cut
        parts.append(part(f"conv-{name}", ranks, shape, strides, offset=offset, **of_conv))
        first += count
    drafts_bytes = channels * (width - num_inputs) * item
    offset, item, dim = channels * width * item, spec.dtypes[1].itemsize, prod(temporal[1:])
    shape, strides = (temporal[0], dim), (dim * item, item)
    of_heads = {"item": item, "element": names[1]}
    parts.append(part("temporal", cut, shape, strides, offset=offset, **of_heads))
    found = sum(view.num_heads * view.head_dim * view.item_size_bytes for _, view in parts)
    if found + drafts_bytes != state_bytes or num_inputs > width:
        raise GeometryError(
            "the parts of a recurrent state do not add up to its size",
            layer=cache.name,
            kind=kind,
            shapes=spec.shapes,
            num_inputs=num_inputs,
            drafts_bytes=drafts_bytes,
            pieces_bytes=found,
            state_bytes=state_bytes,
        )
    return parts


def _state_part(
    tensor: torch.Tensor,
    name: str,
    cut: TpSplit,
    shape: tuple[int, int],
    strides: tuple[int, int],
    *,
    offset: int,
    item: int,
    element: str,
) -> Part:
    """Return the part of one rank's channels or state heads. `shape` is their number and their elements, `offset` the
    first one's byte in a page. All ranks have equally many, in rank order. `element` is their type, on which engines
    must agree: one that loads states of another type with as many bytes would read other numbers.
    """
    (units, dim), (unit_stride, dim_stride) = shape, strides
    block_stride = tensor.stride(0) * tensor.element_size()
    view = KVView(
        tensor.data_ptr() + offset,
        (tensor.shape[0], units, 1, dim),
        (block_stride, unit_stride, 0, dim_stride),
        item,
    )
    total = units * cut.tp_size
    heads = TpKVTopology.heads_of(total, tp_rank=cut.tp_rank, tp_size=cut.tp_size)
    return _part(name, view, total, heads, element)


def _channels(kind: str, channels: int, temporal: tuple[int, ...]) -> list[tuple[str, int]]:
    """Return (name, number of channels) of the convolution's inputs, in order. The two narrower ones are equal."""
    if kind == "MAMBA1":
        return [("x", channels)]
    inner = temporal[0] * temporal[1]
    side = (channels - inner) // 2
    if kind == "MAMBA2":
        return [("x", inner), ("B", side), ("C", side)]
    return [("Q", side), ("K", side), ("V", inner)]


def _type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _state_bytes(spec: MambaSpec) -> int:
    sizes = zip(spec.shapes, spec.dtypes, strict=True)
    return sum(prod(shape) * dtype.itemsize for shape, dtype in sizes)
