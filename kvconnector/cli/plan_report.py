"""What `kvconnector plan` reports: its JSON, and what the table and the picture show."""

from __future__ import annotations

from collections import Counter

import msgspec

from kvconnector.bench.shapes import EngineShape, ModelShape


class ReadRow(msgspec.Struct, frozen=True, kw_only=True):
    """The reads of one consumer rank from one producer rank, of layers of one `kind` if a model has several.

    Intervals are half open, layers and heads global; the heads of a state are the units that tensor parallelism splits;
    a latent counts as one. With `row_tokens` above 1, `tokens` and `stripes` count rows of so many tokens. A stripe
    `(first, run, period)` is, of every `period` tokens, the `run` from `first` on.
    """

    consumer: str
    producer: str
    layers: list[tuple[int, int]]
    heads: list[tuple[int, int]]
    tokens: tuple[int, int]
    stripes: list[tuple[int, int, int]]
    chunks: int
    largest_chunk_bytes: int
    bytes: int
    kind: str = ""
    row_tokens: int = 1
    is_latent: bool = False


class RankRow(msgspec.Struct, frozen=True, kw_only=True):
    """One rank: its pipeline stage, what it holds, and the bytes that it sends or receives."""

    rank: str
    stage: int
    holds: str
    bytes: int


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Decode compared with prefill: `ratios` of sizes as exact fractions, the engines in which several ranks hold the
    same, and whether blocks change their layout. `connections` counts pairs of ranks of which one reads from the other.
    """

    ratios: dict[str, str]
    replicated: list[str]
    needs_relayout: bool
    connections: int


class PlanReport(msgspec.Struct, frozen=True, kw_only=True):
    """All consumer ranks' plans. `released`: producer ranks that a consumer rank confirms to, read from or not.

    `summary` has the comparison in words. `total_bytes` are those of packed reads, which send the narrower of both
    types, `direct_bytes` those that direct reads take out of the prefill engine's caches. `predicted_ms` is a lower
    bound: the time of the busiest rank's link at `link_gbits`.
    """

    model: ModelShape
    prefill: EngineShape
    decode: EngineShape
    tokens: tuple[int, int]
    chunk_bytes: int
    reads: list[ReadRow]
    producers: list[RankRow]
    consumers: list[RankRow]
    released: dict[str, list[str]]
    total_bytes: int
    direct_bytes: int
    summary: str
    comparison: Comparison
    link_gbits: float | None = None
    predicted_ms: float | None = None

    @property
    def prediction(self) -> str:
        """The predicted time in words; empty without a link speed."""
        if self.predicted_ms is None:
            return ""
        return f"at least {self.predicted_ms:.3g} ms with {self.link_gbits:g} Gbit/s per rank"

    def bytes_by_kind(self) -> Counter[str]:
        """Return the bytes that all ranks together read of layers of each kind."""
        nbytes = Counter[str]()
        for row in self.reads:
            nbytes[row.kind] += row.bytes
        return nbytes
