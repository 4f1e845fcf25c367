"""Names for the identities that travel between engines."""

from __future__ import annotations

import secrets
from typing import Annotated, NamedTuple, NewType

import msgspec
from msgspec import Meta

PRINTED = r"\A[^\x00-\x1f\x7f-\x9f\u2028\u2029]*\Z"
"""A text without control characters. With them a name could forge lines of a log, or talk to a server that is no
control channel but takes lines of text.
"""
Id = Annotated[str, Meta(min_length=1, max_length=512, pattern=PRINTED)]
"""A name that travels: of an engine, a request, a transfer or a start."""

MAX_PORT = 65535
"""Of TCP."""

EngineId = NewType("EngineId", str)
"""The operator's or the engine's name for one engine (all its ranks). Stable across restarts."""

Incarnation = NewType("Incarnation", str)
"""128 random bits (hex), drawn at every engine start: distinguishes a restarted engine from its predecessor."""


class Rank(NamedTuple):
    """One worker of an engine. Ordered by pipeline stage first, as `global_rank` is."""

    pp_rank: int
    tp_rank: int

    def global_rank(self, tp_size: int) -> int:
        """Return the index of this worker in its engine: stage by stage, each stage's tensor-parallel ranks contiguous.

        Args:
            tp_size: The engine's tensor-parallel size.
        """
        return self.pp_rank * tp_size + self.tp_rank

    def __str__(self) -> str:
        return f"pp{self.pp_rank}tp{self.tp_rank}"


class EngineAddress(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A producer engine as a request names it. One id at two addresses is two engines: an address came through a
    router, and a wrong one must not harm the right engine.
    """

    engine_id: EngineId
    address: str
    public_key: str = ""


def new_incarnation() -> Incarnation:
    """Draw a new incarnation."""
    return Incarnation(secrets.token_hex(16))


def new_secret() -> str:
    """Draw a new transfer secret: 128 random bits (hex) that a consumer must present to read."""
    return secrets.token_hex(16)
