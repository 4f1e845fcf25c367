"""Bytes as tokens: token i is byte i, ids from 256 on have no text."""

from __future__ import annotations

from collections.abc import Sequence


def encode(text: str) -> list[int]:
    """Return the UTF-8 bytes of `text`, one token each."""
    return list(text.encode())


def decode(token_ids: Sequence[int]) -> str:
    """Return the text of the byte tokens in `token_ids`; ids above 255 and broken UTF-8 become U+FFFD."""
    parts: list[str] = []
    run = bytearray()
    for token in token_ids:
        if token < 256:
            run.append(token)
            continue
        parts.append(run.decode(errors="replace") + "\N{REPLACEMENT CHARACTER}")
        run.clear()
    parts.append(run.decode(errors="replace"))
    return "".join(parts)
