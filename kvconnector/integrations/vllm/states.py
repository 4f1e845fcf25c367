"""A recurrent layer's state of vLLM as parts: the convolution's channels and the state heads.

vLLM keeps the states of one request and layer behind one another in a page. What tensor parallelism cuts (channels,
state heads) is what the rest of kvconnector calls heads; a state is one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from kvconnector.cache.views import KVView
from kvconnector.errors import GeometryError
from kvconnector.integrations.vllm.parts import Cut, LayerCache, Part
from kvconnector.topology import PartGeometry

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import MambaSpec

CUT_STATES = frozenset({"MAMBA1", "MAMBA2", "GDN_ATTN"})
"""Kinds of layers whose states are a convolution's input and a state per head, in this order, both cut evenly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePiece:
    """`units` channels or state heads of one rank, `dim` elements each, at these bytes of a page.

    The engine has `units * tp_size` of them, the ranks' shares in order; or, if `is_replicated`, these on every rank.
    """

    name: str
    units: int
    dim: int
    item_size_bytes: int
    offset_bytes: int
    unit_stride_bytes: int
    dim_stride_bytes: int
    is_replicated: bool = False


def state_parts(cache: LayerCache, cut: Cut, pieces: Sequence[StatePiece]) -> list[Part]:
    """The parts of a recurrent layer. Raises GeometryError: the pieces do not fill the state."""
    spec, expected = cache.spec, _state_bytes(cache.spec)
    found = sum(piece.units * piece.dim * piece.item_size_bytes for piece in pieces)
    if found != expected:
        raise GeometryError(
            "a recurrent state is not made of the pieces that it should be",
            layer=cache.name,
            kind=spec.mamba_type.name,
            shapes=spec.shapes,
            pieces_bytes=found,
            state_bytes=expected,
        )
    return [(_geometry(piece, cut), _view(piece, cache)) for piece in pieces]


def _geometry(piece: StatePiece, cut: Cut) -> PartGeometry:
    ranks, rank = (1, 0) if piece.is_replicated else (cut.tp_size, cut.tp_rank)
    return PartGeometry(
        name=piece.name,
        total_heads=piece.units * ranks,
        head_start=piece.units * rank,
        head_stop=piece.units * (rank + 1),
        head_dim=piece.dim,
        item_size_bytes=piece.item_size_bytes,
    )


def _view(piece: StatePiece, cache: LayerCache) -> KVView:
    tensor = cache.tensor
    block_stride = tensor.stride(0) * tensor.element_size()
    return KVView(
        tensor.data_ptr() + piece.offset_bytes,
        (tensor.shape[0], piece.units, 1, piece.dim),
        (block_stride, piece.unit_stride_bytes, 0, piece.dim_stride_bytes),
        piece.item_size_bytes,
    )


def state_pieces(spec: MambaSpec, cut: Cut, *, is_dim_first: bool) -> list[StatePiece]:
    """Which pieces a recurrent layer's state has. `is_dim_first`: the convolution's channels are outermost.

    A convolution's input is `x` (Mamba 1), `x, B, C` (Mamba 2) or `Q, K, V` (gated delta net), each cut on its own;
    so any two tensor-parallel sizes and both orders of the channels fit. States of other kinds are one opaque piece a
    rank, for engines of equal size.
    """
    kind = spec.mamba_type.name
    if spec.tp_replicated or kind not in CUT_STATES or len(spec.shapes) != 2:
        return [_opaque(spec, cut)]
    temporal = spec.shapes[1]
    rows, columns = spec.shapes[0]
    channels, width = (rows, columns) if is_dim_first else (columns, rows)
    item = spec.dtypes[0].itemsize
    pieces, first = [], 0
    for name, count in _channels(kind, channels, temporal):
        pieces.append(
            StatePiece(
                name=f"conv-{name}",
                units=count,
                dim=width,
                item_size_bytes=item,
                offset_bytes=first * item * (width if is_dim_first else 1),
                unit_stride_bytes=item * (width if is_dim_first else 1),
                dim_stride_bytes=item * (1 if is_dim_first else channels),
            )
        )
        first += count
    item, dim = spec.dtypes[1].itemsize, prod(temporal[1:])
    pieces.append(
        StatePiece(
            name="temporal",
            units=temporal[0],
            dim=dim,
            item_size_bytes=item,
            offset_bytes=channels * width * spec.dtypes[0].itemsize,
            unit_stride_bytes=dim * item,
            dim_stride_bytes=item,
        )
    )
    return pieces


def _channels(kind: str, channels: int, temporal: tuple[int, ...]) -> list[tuple[str, int]]:
    """`(name, number)` of the convolution's inputs, in order; the two beside the widest are of one size."""
    if kind == "MAMBA1":
        return [("x", channels)]
    inner = temporal[0] * temporal[1]
    side = (channels - inner) // 2
    if kind == "MAMBA2":
        return [("x", inner), ("B", side), ("C", side)]
    return [("Q", side), ("K", side), ("V", inner)]


def _state_bytes(spec: MambaSpec) -> int:
    sizes = zip(spec.shapes, spec.dtypes, strict=True)
    return sum(prod(shape) * dtype.itemsize for shape, dtype in sizes)


def _opaque(spec: MambaSpec, cut: Cut) -> StatePiece:
    nbytes = _state_bytes(spec)
    return StatePiece(
        # another size gives the part another name, so such engines refuse each other
        name="state" if spec.tp_replicated else f"state-tp{cut.tp_size}",
        units=1,
        dim=nbytes,
        item_size_bytes=1,
        offset_bytes=0,
        unit_stride_bytes=nbytes,
        dim_stride_bytes=1,
        is_replicated=spec.tp_replicated,
    )
