"""`kvconnector plan`: what each consumer rank would read from which producer rank. Needs no GPU and no peer."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer
from rich.table import Table

from kvconnector.bench.shapes import MODELS, EngineShape, ModelShape, engine_geometry
from kvconnector.bench.units import format_bytes, parse_bytes
from kvconnector.cli.console import print_json, terminal
from kvconnector.errors import ConfigError
from kvconnector.planning import Segment, SourceRead, plan_transfer
from kvconnector.topology import TpKVTopology


class ReadRow(msgspec.Struct, frozen=True, kw_only=True):
    """All that one consumer rank reads from one producer rank. Intervals are half open, layers and heads global.

    Of the interval of tokens it reads those of `stripes`: of every (third) tokens, the (second) from the (first) on.
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


class PlanReport(msgspec.Struct, frozen=True, kw_only=True):
    """All consumer ranks' plans. `released`: producer ranks that a consumer rank confirms to, read from or not.

    `ratios` are decode over prefill; `replicated` names the engines that hold something on several ranks.
    """

    model: ModelShape
    prefill: EngineShape
    decode: EngineShape
    tokens: tuple[int, int]
    chunk_bytes: int
    reads: list[ReadRow]
    released: dict[str, list[str]]
    total_bytes: int
    ratios: dict[str, str]
    replicated: list[str]
    needs_relayout: bool


def plan(
    *,
    prefill: Annotated[
        str, typer.Option(help="Producer's shape: tp=2,pp=1,block=16,dcp=2,interleave=8.")
    ] = "tp=1,pp=1,block=16",
    decode: Annotated[
        str, typer.Option(help="Consumer's shape: tp=1,pp=2,block=64.")
    ] = "tp=1,pp=1,block=16",
    model: Annotated[
        str | None, typer.Option(help=f"A known model's cache shape: {', '.join(MODELS)}.")
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Layers of the model.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="KV heads of the model.")] = None,
    head_dim: Annotated[
        int | None, typer.Option(help="Elements of one head; of the latent with --mla.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Element type, named as torch does.")] = None,
    mla: Annotated[bool, typer.Option("--mla", help="One latent instead of K and V.")] = False,
    tokens: Annotated[int, typer.Option(help="Tokens to load.")] = 2000,
    start: Annotated[int, typer.Option(help="First token to load, behind a local hit.")] = 0,
    chunk: Annotated[str, typer.Option(help="Longest message.")] = "2MiB",
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print which producer rank each consumer rank reads from: layers, heads, tokens, chunks, bytes."""
    if tokens < 1 or start < 0:
        raise ConfigError(
            "tokens must be positive and start not negative", tokens=tokens, start=start
        )
    shape = _model(
        name=model, layers=layers, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, mla=mla
    )
    report = build_report(
        shape,
        EngineShape.parse(prefill),
        EngineShape.parse(decode),
        range(start, start + tokens),
        chunk_bytes=parse_bytes(chunk),
    )
    if json:
        print_json(report)
    else:
        _print(report)


def _model(
    *,
    name: str | None,
    layers: int | None,
    kv_heads: int | None,
    head_dim: int | None,
    dtype: str | None,
    mla: bool,
) -> ModelShape:
    """A known model or a plain one, with what the options say in its place."""
    base = (
        ModelShape.parse(name)
        if name is not None
        else ModelShape(name="custom", num_layers=32, num_kv_heads=1 if mla else 8, head_dim=128)
    )
    asked = {
        "num_layers": layers,
        "num_kv_heads": 1 if mla and kv_heads is None else kv_heads,
        "head_dim": head_dim,
        "dtype": dtype,
        "is_mla": mla or None,
    }
    return msgspec.structs.replace(
        base, **{name: value for name, value in asked.items() if value is not None}
    )


def build_report(
    model: ModelShape, prefill: EngineShape, decode: EngineShape, tokens: range, *, chunk_bytes: int
) -> PlanReport:
    """Plan every consumer rank.

    Raises:
        GeometryError: more stages than layers, or a chunk that holds no token.
    """
    producer = engine_geometry(model, prefill, "prefill")
    consumer = engine_geometry(model, decode, "decode")
    first = TpKVTopology(consumer, decode.ranks[0])
    reads, released = [], {}
    for number, rank in enumerate(decode.ranks):
        # two engines without a name of their own: ranks read the replicas from the first on
        topology = TpKVTopology(consumer, rank, replica_index=number)
        planned = plan_transfer(topology, producer, [tokens], chunk_bytes=chunk_bytes)
        name = str(rank)
        reads += [_row(name, read, tokens) for read in planned.reads]
        released[name] = [str(each) for each in topology.holders(producer)]
    return PlanReport(
        model=model,
        prefill=prefill,
        decode=decode,
        tokens=(tokens.start, tokens.stop),
        chunk_bytes=chunk_bytes,
        reads=reads,
        released=released,
        total_bytes=sum(read.bytes for read in reads),
        ratios={
            "tp": str(first.tp_ratio(producer)),
            "pp": str(first.pp_ratio(producer)),
            "block size": str(first.block_size_ratio(producer)),
        },
        replicated=[e.engine_id for e in (producer, consumer) if first.replicates_kv_cache(e)],
        needs_relayout=first.needs_relayout(producer),
    )


def _row(consumer: str, read: SourceRead, tokens: range) -> ReadRow:
    def heads(segment: Segment) -> tuple[int, int]:
        return (segment.head_start, segment.head_stop)

    def layers(segment: Segment) -> tuple[int, int]:
        return (segment.layers[0], segment.layers[-1] + 1)

    def stripe(segment: Segment) -> tuple[int, int, int]:
        return (segment.stripe.first, segment.stripe.run, segment.stripe.period)

    return ReadRow(
        consumer=consumer,
        producer=str(read.source),
        layers=sorted({layers(segment) for segment in read.segments}),
        heads=sorted({heads(segment) for segment in read.segments}),
        tokens=(tokens.start, tokens.stop),
        stripes=sorted({stripe(segment) for segment in read.segments}),
        chunks=len(read.chunks),
        largest_chunk_bytes=int(read.chunk_nbytes.max()),
        bytes=read.total_bytes,
    )


def _print(report: PlanReport) -> None:
    model = report.model
    cache = "MLA latent" if model.is_mla else f"{model.num_kv_heads} KV heads"
    console = terminal()
    console.print(
        f"{model.name}: {model.num_layers} layers, {cache} x {model.head_dim} {model.dtype};"
        f" prefill {_ranks(report.prefill)}, decode {_ranks(report.decode)} (tp x pp)"
    )
    ratios = ", ".join(f"{name} {ratio}" for name, ratio in report.ratios.items())
    blocks = "are laid out anew" if report.needs_relayout else "are copied as they are"
    replicated = f"; replicated in {' and '.join(report.replicated)}" if report.replicated else ""
    console.print(f"decode over prefill: {ratios}; blocks {blocks}{replicated}")
    table = Table()
    for column in ("consumer", "reads from", "layers", "heads", "tokens"):
        table.add_column(column)
    for column in ("chunks", "largest", "bytes"):
        table.add_column(column, justify="right")
    for row in report.reads:
        table.add_row(
            row.consumer,
            row.producer,
            _intervals(row.layers),
            _intervals(row.heads),
            _tokens(row),
            str(row.chunks),
            format_bytes(row.largest_chunk_bytes),
            format_bytes(row.bytes),
        )
    console.print(table)
    console.print(
        f"{format_bytes(report.total_bytes)} in {sum(row.chunks for row in report.reads)} chunks"
        f" of at most {format_bytes(report.chunk_bytes)}"
    )


def _tokens(row: ReadRow) -> str:
    text = _intervals([row.tokens])
    runs = [f"{run} of {period} from {first}" for first, run, period in row.stripes if run < period]
    return f"{text}: {', '.join(runs)}" if runs else text


def _ranks(shape: EngineShape) -> str:
    shared = f" dcp {shape.dcp} interleave {shape.interleave}" if shape.dcp > 1 else ""
    return f"{shape.tp}x{shape.pp} block {shape.block}{shared}"


def _intervals(intervals: list[tuple[int, int]]) -> str:
    return " ".join(
        str(start) if stop == start + 1 else f"{start}-{stop - 1}" for start, stop in intervals
    )
