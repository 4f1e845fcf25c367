"""Numbers, token counts and bytes as text."""

from __future__ import annotations

import re

from kvconnector.errors import ConfigError

MAX_TOKENS = 10_000_000
"""Most tokens of a request."""


def parse_tokens(text: str) -> tuple[int, ...]:
    """Parse request sizes, as "2000" or "16,128,2048". Raises ConfigError: something else, or an impossible size."""
    tokens = parse_numbers(text)
    if not tokens or not all(0 < each <= MAX_TOKENS for each in tokens):
        raise ConfigError(
            "expected positive numbers with commas between them", given=text, most=MAX_TOKENS
        )
    return tokens


def parse_numbers(text: str) -> tuple[int, ...]:
    """Parse numbers, as "0" or "2,3"; "" is none. Raises ConfigError: something else."""
    pieces = [piece.strip() for piece in text.split(",")] if text else []
    if not all(piece.isdecimal() for piece in pieces):
        raise ConfigError("expected numbers with commas between them", given=text)
    return tuple(int(piece) for piece in pieces)


_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]?)(b|ib|)", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Parse "2MiB", "512k", "1.5 GB" or "4096". Raises ConfigError: no such number or unit, or below a byte."""
    match = _BYTES.fullmatch(text.strip())
    if match is None:
        raise ConfigError("a size must be a number and a unit, as in 2MiB", given=text)
    base = 1000 if match[3].lower() == "b" else 1024
    nbytes = int(float(match[1]) * base ** " kmg".index(match[2].lower() or " "))
    if nbytes < 1:
        raise ConfigError("a size must be at least one byte", given=text)
    return nbytes


def format_move(read: int, written: int) -> str:
    """Return what a request's bytes are on both sides, such as "1 GiB into 512 MiB"; once if they are as many."""
    sizes = dict.fromkeys(map(format_bytes, (read, written)))
    return " into ".join(sizes)


def format_bytes(nbytes: int) -> str:
    """Return three digits and a binary unit."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(max(nbytes, 1).bit_length() // 10, len(units) - 1)
    if power and nbytes < 1 << 10 * power:
        power -= 1
    return f"{nbytes / (1 << 10 * power):.4g} {units[power]}"
