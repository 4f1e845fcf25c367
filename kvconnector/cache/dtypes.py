"""Element types by name: specs and the wire speak of them where no tensor library is installed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kvconnector.errors import CacheSpecError

ITEM_SIZES_BYTES: Mapping[str, int] = MappingProxyType(
    {
        "float64": 8,
        "float32": 4,
        "float16": 2,
        "bfloat16": 2,
        "float8_e4m3fn": 1,
        "float8_e4m3fnuz": 1,
        "float8_e5m2": 1,
        "float8_e5m2fnuz": 1,
        "float8_e8m0fnu": 1,
        "int64": 8,
        "int32": 4,
        "int16": 2,
        "int8": 1,
        "uint8": 1,
        "bool": 1,
    }
)
"""Bytes of one element of every known type. The names are torch's, without its prefix."""


@dataclass(frozen=True, slots=True)
class DType:
    """An element type of a cache. Raises CacheSpecError: the name is none of `ITEM_SIZES_BYTES`."""

    name: str

    def __post_init__(self) -> None:
        if self.name not in ITEM_SIZES_BYTES:
            raise CacheSpecError(
                "unknown element type", name=self.name, known=tuple(ITEM_SIZES_BYTES)
            )

    @property
    def item_size_bytes(self) -> int:
        """Bytes of one element."""
        return ITEM_SIZES_BYTES[self.name]

    def __str__(self) -> str:
        return self.name
