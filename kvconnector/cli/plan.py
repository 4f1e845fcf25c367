"""`kvconnector plan`: the reads of each consumer rank from each producer rank. Needs no GPU and no peer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import click
import msgspec
import numpy as np
from rich.table import Table

from kvconnector.bench.shapes import (
    MODELS,
    PACKED,
    PACKED_ROW_BYTES,
    EngineShape,
    LayerGroup,
    ModelShape,
    check_exchange,
    element_type,
    engine_geometry,
    with_types,
)
from kvconnector.bench.sizes import format_bytes, parse_bytes
from kvconnector.bench.tables import Fitted, right_aligned
from kvconnector.cli.console import (
    FiniteRange,
    json_flag,
    picture_option,
    print_json,
    terminal,
)
from kvconnector.cli.model_config import TEMPORAL, named_model
from kvconnector.cli.plan_picture import draw_plan
from kvconnector.cli.plan_report import Comparison, PlanReport, RankRow, ReadRow
from kvconnector.config import ConnectorConfig
from kvconnector.errors import ConfigError
from kvconnector.planning import SourceRead, from_whole_block, plan_transfer
from kvconnector.topology import EngineGeometry, PartGeometry, TpKVTopology

MAX_RUNS = 3
"""Most runs of layers that a line of the table names one by one."""
SHAPE: dict[str, Any] = {"type": EngineShape.parse, "metavar": "SHAPE"}


@click.command(
    epilog="Example: kvconnector plan --model llama-3.1-70b --prefill tp=4 --decode tp=2,block=64"
)
@click.option(
    "--prefill",
    **SHAPE,
    default="tp=1,pp=1,block=16",
    help="Producer's shape, such as tp=2,dcp=2,interleave=8.",
)
@click.option(
    "--decode",
    **SHAPE,
    default="tp=1,pp=1,block=16",
    help="Consumer's shape, such as tp=1,block=64,dtype=float8_e4m3fn.",
)
@click.option("--model", help=f"{', '.join(MODELS)}, or the path of a Hugging Face config.json.")
@click.option("--layers", "num_layers", type=int, help="Layers of the model.")
@click.option("--kv-heads", "num_kv_heads", type=int, help="KV heads of the model.")
@click.option("--head-dim", type=int, help="Elements of one head, or of the latent with --mla.")
@click.option(
    "--dtype", type=element_type, metavar="TYPE", help="Element type, by its name in torch."
)
@click.option("--mla", is_flag=True, help="One latent instead of K and V.")
@click.option(
    "--mtp",
    is_flag=True,
    help="Both engines draft with the model's MTP layers, which count, too.",
)
@click.option(
    "--tokens",
    type=click.IntRange(1),
    default=2000,
    help="Tokens to load: the prompt's, or one less where layers keep only some of them.",
)
@click.option(
    "--start",
    type=click.IntRange(0),
    default=0,
    help="First token to load, after a local prefix hit.",
)
@click.option(
    "--chunk",
    type=parse_bytes,
    metavar="BYTES",
    help="Longest message. By default 2 MiB, or the size of the largest row if that is more.",
)
@click.option(
    "--link",
    type=FiniteRange(0, min_open=True),
    help="Gbit/s of each rank's link, for a predicted time.",
)
@picture_option
@json_flag
def plan(
    *,
    prefill: EngineShape,
    decode: EngineShape,
    model: str | None,
    mla: bool,
    mtp: bool,
    tokens: int,
    start: int,
    chunk: int | None,
    link: float | None,
    svg: Path | None,
    json: bool,
    **sizes: int | str | None,
) -> None:
    """Print what each consumer rank reads from which producer rank: layers, heads, tokens, chunks and bytes.

    These are the reads that vLLM's engines make for a prompt that is not streamed. SGLang's engines read no token
    before a window. Without --model the model has 32 layers of 8 heads with 128 elements, in bfloat16.
    """
    asked = {name: each for name, each in sizes.items() if each is not None}
    if mla:
        asked = {"num_kv_heads": 1, **asked, "is_mla": True}
    shape = _asked_model(model, asked)
    shape = shape.with_drafts() if mtp else shape
    prefill, decode = with_types(shape, prefill, decode)
    if shape.is_sparse and (prefill.is_fp8 or decode.is_fp8):
        size = shape.head_dim
        note = f"fp8 latents have {size} bytes; for FlashMLA's, of {PACKED_ROW_BYTES}, give dtype={PACKED}"
        shape = msgspec.structs.replace(shape, assumptions=(*shape.assumptions, note))
    report = build_report(
        shape,
        prefill,
        decode,
        range(start, start + tokens),
        chunk_bytes=chunk or default_chunk_bytes(shape, prefill, decode),
        link_gbits=link,
    )
    if svg is not None:
        draw_plan(report, svg)
    if json:
        print_json(report)
    else:
        _print(report)


def default_chunk_bytes(model: ModelShape, *engines: EngineShape) -> int:
    """Return the chunk that engines with caches in CPU memory agree on by default: it holds the largest row of each."""
    config = ConnectorConfig.from_mapping({"engine_id": "plan", "control": {"insecure": True}})
    largest = [
        max(
            part.token_bytes
            for rank in engine.ranks
            for group in rank.groups
            for part in group.parts
        )
        for engine in (engine_geometry(model, shape, "any") for shape in engines)
    ]
    return min(config.chunk_bytes("cpu", each) for each in largest)


def _asked_model(name: str | None, changes: dict[str, Any]) -> ModelShape:
    plain = ModelShape(name="custom", num_layers=32, num_kv_heads=8, head_dim=128)
    model = plain if name is None else named_model(name)
    if model.groups and changes:
        raise ConfigError(
            "a model with several kinds of layers is planned as it is: leave these options out",
            model=model.name,
            kinds=[group.kind for group in model.groups],
            given=sorted(changes),
        )
    if "num_layers" in changes:
        changes = {**changes, "num_draft_layers": 0, "draft_groups": ()}
    return msgspec.structs.replace(model, **changes)


def build_report(
    model: ModelShape,
    prefill: EngineShape,
    decode: EngineShape,
    tokens: range,
    *,
    chunk_bytes: int,
    link_gbits: float | None = None,
) -> PlanReport:
    """Plan every consumer rank. Raises GeometryError: shapes that do not fit."""
    check_exchange(model, prefill, decode)
    producer = engine_geometry(model, prefill, "prefill")
    consumer = engine_geometry(model, decode, "decode")
    first = TpKVTopology(consumer, decode.ranks[0])
    first.check_compatible(producer)
    groups = model.layer_groups
    ranges = _read_ranges(groups, tokens, producer, consumer)
    reads: list[ReadRow] = []
    released, connections, direct_bytes = {}, 0, 0
    for rank in decode.ranks:
        # two engines without names: ranks read the replicas from the first on
        topology = TpKVTopology(consumer, rank, rotation=0)
        topology.check_compatible(producer)
        connections += len(topology.get_target_remote_ranks_from_engine_id(producer.engine_id))
        planned = plan_transfer(topology, producer, ranges, chunk_bytes=chunk_bytes)
        name = str(rank)
        for read in planned:
            reads += _rows(name, read, ranges, groups)
            direct_bytes += _direct_bytes(read, producer)
        released[name] = [str(each) for each in topology.holders(producer)]
    producers = _rank_rows(producer, reads, "producer")
    consumers = _rank_rows(consumer, reads, "consumer")
    busiest = max(row.bytes for row in (*producers, *consumers))
    return PlanReport(
        model=model,
        prefill=prefill,
        decode=decode,
        tokens=(tokens.start, tokens.stop),
        chunk_bytes=chunk_bytes,
        reads=reads,
        producers=producers,
        consumers=consumers,
        released=released,
        total_bytes=sum(read.bytes for read in reads),
        direct_bytes=direct_bytes,
        summary=first.describe(producer),
        comparison=Comparison(
            ratios={
                "tp": str(first.tp_ratio_from_engine_id(producer.engine_id)),
                "pp": str(first.pp_ratio_from_engine_id(producer.engine_id)),
                "block size": str(first.block_size_ratio_from_engine_id(producer.engine_id)),
            },
            replicated=[e.engine_id for e in (producer, consumer) if first.replicates_kv_cache(e)],
            needs_relayout=first.needs_relayout(producer),
            connections=connections,
        ),
        link_gbits=link_gbits,
        predicted_ms=busiest * 8 / link_gbits / 1e6 if link_gbits else None,
    )


def _read_ranges(
    groups: Sequence[LayerGroup], tokens: range, producer: EngineGeometry, consumer: EngineGeometry
) -> list[range]:
    """Return the tokens of a prompt that each cache group reads once it is computed, in rows of a compressed group.

    As with vLLM, windows and chunks begin with a whole block of the prefix cache.
    """
    found = []
    geometries = zip(producer.ranks[0].groups, consumer.ranks[0].groups, strict=True)
    for group, (theirs, ours) in zip(groups, geometries, strict=True):
        missing = group.missing(tokens)
        if group.keeps in {"window", "chunk"}:
            sizes = [group.cached_tokens or each.virtual_block_tokens for each in (theirs, ours)]
            held = range(missing.start // sizes[0], -(-missing.stop // sizes[0]))
            missing = from_whole_block(missing, sizes[1], held, sizes[1])
        found.append(missing)
    return found


def _direct_bytes(read: SourceRead, producer: EngineGeometry) -> int:
    """Return the bytes of a read's elements as the producer stores them."""
    groups = producer.rank_geometry(read.source).groups
    stored = [groups[each.group].families[each.family].head_token_bytes for each in read.segments]
    sent = [each.head_token_bytes for each in read.segments]
    of_chunk = read.chunks["segment"]
    # exact: a chunk has whole tokens of heads
    return int((read.chunk_nbytes // np.array(sent)[of_chunk] * np.array(stored)[of_chunk]).sum())


def _rank_rows(
    engine: EngineGeometry, reads: list[ReadRow], side: Literal["producer", "consumer"]
) -> list[RankRow]:
    moved = Counter[str]()
    for read in reads:
        moved[getattr(read, side)] += read.bytes
    replicas = Counter(rank.groups for rank in engine.ranks)
    rows = []
    for rank in engine.ranks:
        held = [group for group in rank.groups if group.layers] or rank.groups[:1]
        layers = sorted({layer for group in held for layer in group.layers})
        # the heads are those of attention, if there is any: a state's are the units that tensor parallelism splits
        group = min(held, key=lambda each: _is_state(each.parts[-1]))
        part = group.parts[-1] if _is_state(group.parts[-1]) else group.parts[0]
        holds = f"layers {_intervals(_runs(layers))}"
        heads = _intervals([(part.head_start, part.head_stop)])
        what = f"{'state' if _is_state(part) else 'heads'} {heads}"
        holds += ", latent" if part.name == "latent" else f", {what}"
        if group.dcp_size > 1:
            holds += f", share {group.dcp_rank + 1} of {group.dcp_size}"
        if replicas[rank.groups] > 1:
            holds += f", {replicas[rank.groups]} replicas"
        name = str(rank.rank)
        rows.append(RankRow(rank=name, stage=rank.pp_rank, holds=holds, bytes=moved[name]))
    return rows


def _is_state(part: PartGeometry) -> bool:
    return part.name.startswith((TEMPORAL, "conv-", "state"))


def _rows(
    consumer: str, read: SourceRead, ranges: Sequence[range], groups: Sequence[LayerGroup]
) -> Iterator[ReadRow]:
    """Yield a row for each cache group that is read."""
    group_of = np.array([segment.group for segment in read.segments])
    of_chunk, nbytes = group_of[read.chunks["segment"]], read.chunk_nbytes
    for index, (tokens, group) in enumerate(zip(ranges, groups, strict=True)):
        own = nbytes[of_chunk == index]
        if not own.size:
            continue
        segments = [segment for segment in read.segments if segment.group == index]
        # a state's heads are those of its last part; a convolution's inputs before it have channels
        last = max(segment.family for segment in segments)
        heads = [each for each in segments if each.family == last or group.keeps != "state"]
        stripes = {segment.stripe for segment in segments}
        yield ReadRow(
            consumer=consumer,
            producer=str(read.source),
            layers=_runs(sorted({layer for segment in segments for layer in segment.layers})),
            heads=sorted({(each.head_start, each.head_stop) for each in heads}),
            tokens=(tokens.start, tokens.stop),
            stripes=sorted((each.first, each.run, each.period) for each in stripes),
            chunks=len(own),
            largest_chunk_bytes=int(own.max()),
            bytes=int(own.sum()),
            kind=group.kind,
            row_tokens=group.row_tokens,
            is_latent=group.parts[0][0].startswith(("latent", "index")),
        )


def _runs(values: Sequence[int]) -> list[tuple[int, int]]:
    """Return ascending numbers as half open intervals."""
    edges = [0, *(at for at in range(1, len(values)) if values[at] != values[at - 1] + 1)]
    return [(values[a], values[b - 1] + 1) for a, b in pairwise([*edges, len(values)]) if a < b]


def _print(report: PlanReport) -> None:
    model = report.model
    cache = "MLA latent" if model.is_mla else f"{model.num_kv_heads} KV heads"
    nbytes = report.bytes_by_kind()
    kinds = "".join(
        f"; {len(each.layers)} {each.kind}, {format_bytes(nbytes[each.kind])}"
        for each in model.groups
    )
    if model.num_draft_layers:
        layers = "layer" if model.num_draft_layers == 1 else "layers"
        is_counted = "" if model.counts_drafts else " not"
        kinds += f"; {model.num_draft_layers} MTP {layers},{is_counted} counted"
    console = terminal()
    console.print(
        f"{model.name}: {model.num_layers} layers, {cache} x {model.head_dim} {model.dtype}{kinds};"
        f" prefill {report.prefill}, decode {report.decode}"
    )
    for each in model.assumptions:
        console.print(f"assumed: {each}")
    engines = " and ".join(report.comparison.replicated)
    replicated = f"; replicated in {engines}" if engines else ""
    console.print(f"decode over prefill: {report.summary}{replicated}")
    figures = right_aligned("chunks", "largest", "bytes")
    kind = ["kind"] if model.groups else []
    table = Table("consumer", "reads from", *kind, "layers", "heads", "tokens", *figures)
    for row in report.reads:
        table.add_row(
            row.consumer,
            row.producer,
            *([row.kind] if model.groups else []),
            _layers(row.layers),
            "latent" if row.is_latent else _intervals(row.heads),
            _tokens(row),
            str(row.chunks),
            format_bytes(row.largest_chunk_bytes),
            format_bytes(row.bytes),
        )
    console.print(Fitted(table))
    direct = ""
    if report.direct_bytes != report.total_bytes:
        dtype = report.prefill.dtype
        direct = f" where reads are packed; direct reads take {format_bytes(report.direct_bytes)} of {dtype}"
    console.print(
        f"{format_bytes(report.total_bytes)} in {sum(row.chunks for row in report.reads)} chunks"
        f" of at most {format_bytes(report.chunk_bytes)}{direct}"
        + (f"; {report.prediction}" if report.prediction else "")
    )


def _tokens(row: ReadRow) -> str:
    text = ("rows " if row.row_tokens > 1 else "") + _intervals([row.tokens])
    runs = [f"{run} of {period} from {first}" for first, run, period in row.stripes if run < period]
    return f"{text}: {', '.join(runs)}" if runs else text


def _layers(runs: list[tuple[int, int]]) -> str:
    """Return intervals of layers; if kinds alternate, the number of layers from the first to the last."""
    if len(runs) <= MAX_RUNS:
        return _intervals(runs)
    return f"{sum(stop - start for start, stop in runs)} within {runs[0][0]}-{runs[-1][1] - 1}"


def _intervals(intervals: list[tuple[int, int]]) -> str:
    return " ".join(
        str(start) if stop == start + 1 else f"{start}-{stop - 1}" for start, stop in intervals
    )
