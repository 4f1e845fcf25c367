"""Byte counts as people write them."""

from __future__ import annotations

import re

from kvconnector.errors import ConfigError

_FACTORS = {
    "": 1,
    "b": 1,
    "k": 1 << 10,
    "kib": 1 << 10,
    "m": 1 << 20,
    "mib": 1 << 20,
    "g": 1 << 30,
    "gib": 1 << 30,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
}
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)")


def parse_bytes(text: str) -> int:
    """Bytes of "2MiB", "512k", "1.5 GB" or "4096".

    Raises:
        ConfigError: no such number or unit, or less than a byte.
    """
    match = _BYTES.fullmatch(text.strip())
    factor = _FACTORS.get(match.group(2).lower()) if match else None
    if match is None or factor is None:
        raise ConfigError("a size is a number and a unit, as in 2MiB", given=text)
    nbytes = int(float(match.group(1)) * factor)
    if nbytes < 1:
        raise ConfigError("a size is at least one byte", given=text)
    return nbytes


def format_bytes(nbytes: int) -> str:
    """Three digits and a binary unit."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(max(nbytes, 1).bit_length() // 10, len(units) - 1)
    if power and nbytes < 1 << 10 * power:
        power -= 1
    return f"{nbytes / (1 << 10 * power):.4g} {units[power]}"
