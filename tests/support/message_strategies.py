"""Hypothesis strategies for what engines say to each other, drawn from the messages' own types and bounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec.inspect as mi
from hypothesis import strategies as st

from kvconnector.wire import messages as m
from kvconnector.wire.codec import KINDS
from kvconnector.wire.packed_geometry import PackedGeometry
from tests.support.strategies import engines, model_shapes

MAX_CHARACTERS = 12
# lone surrogates are no text that could be sent
_characters = st.characters(exclude_categories=["Cs"])
_stripes = st.tuples(st.integers(0, 40), st.integers(1, 40), st.integers(0, 40))


def _values(kind: mi.Type) -> st.SearchStrategy[Any]:
    """Values of a type, of any size up to its bounds and ours."""
    return _MAKERS[type(kind)](kind)


def _integers(kind: Any) -> st.SearchStrategy[int]:
    return st.integers(kind.ge, kind.le if kind.lt is None else kind.lt - 1)


def _texts(kind: Any) -> st.SearchStrategy[str]:
    if kind.pattern is not None:
        return st.from_regex(kind.pattern)
    return st.text(_characters, min_size=kind.min_length or 0, max_size=MAX_CHARACTERS)


def _bytes(kind: Any) -> st.SearchStrategy[bytes]:
    least = kind.min_length or 0
    return st.binary(min_size=least, max_size=max(least, min(kind.max_length or 40, 40)))


_MAKERS: dict[type[mi.Type], Callable[[Any], st.SearchStrategy[Any]]] = {
    mi.BoolType: lambda kind: st.booleans(),
    mi.IntType: _integers,
    mi.StrType: _texts,
    mi.BytesType: _bytes,
    mi.StructType: lambda kind: _structs(kind.cls),
    mi.VarTupleType: lambda kind: st.lists(_values(kind.item_type), max_size=4).map(tuple),
    mi.UnionType: lambda kind: st.one_of(*map(_values, kind.types)),
    mi.EnumType: lambda kind: st.sampled_from(kind.cls),
    mi.LiteralType: lambda kind: st.sampled_from(kind.values),
    mi.NoneType: lambda kind: st.none(),
}


def _structs(cls: Any) -> st.SearchStrategy[Any]:
    if cls is PackedGeometry:  # makes sense as a whole
        return model_shapes().flatmap(engines).map(PackedGeometry.of)
    kind = mi.type_info(cls)
    assert isinstance(kind, mi.StructType)
    fields = {field.name: _values(field.type) for field in kind.fields}
    if cls is not m.ReadSegment:
        return st.builds(cls, **fields)
    for name in ("token_first", "token_run", "token_period"):
        del fields[name]
    return st.builds(_segment, stripe=_stripes, **fields)


def _segment(stripe: tuple[int, int, int], **values: Any) -> m.ReadSegment:
    first, run, gap = stripe
    return m.ReadSegment(token_first=first, token_run=run, token_period=first + run + gap, **values)


MESSAGES: dict[type[m.Message], st.SearchStrategy[m.Message]] = {
    cls: _structs(cls) for cls in KINDS.values()
}
"""Valid messages, by type."""


def messages() -> st.SearchStrategy[m.Message]:
    """Valid messages of all types."""
    return st.one_of(*MESSAGES.values())
