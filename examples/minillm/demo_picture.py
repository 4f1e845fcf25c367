"""The demo's picture of its plan: which rank reads what from which."""

from __future__ import annotations

import argparse
from typing import get_args

from kvconnector.bench.shapes import EngineShape, Layout, ModelShape
from kvconnector.cli.plan import build_report
from kvconnector.cli.plan_picture import draw_plan
from kvconnector.config import CPU_CHUNK_BYTES
from kvconnector.errors import KVConnectorError
from minillm.config import ModelConfig, engine_shape, parse_engine_options

DRAWN = ("llama", "mla")
"""Models that `kvconnector plan` knows."""


def draw_picture(arguments: argparse.Namespace) -> str:
    """Draw the longest prompt's plan. Returns where the picture is, or why there is none."""
    model = ModelConfig(architecture=arguments.model)
    shapes = []
    for text in (arguments.prefill, arguments.decode):
        parallel, cache = engine_shape(parse_engine_options(text))
        layout = cache.layout or "NHD"
        if parallel.pp_layers or layout not in get_args(Layout) or arguments.model not in DRAWN:
            return "no picture: a plan has even stages, HND or NHD, and attention to all tokens"
        shapes.append(
            EngineShape(
                tp=parallel.tp_size,
                pp=parallel.pp_size,
                block=cache.block_size,
                dcp=parallel.dcp_size,
                interleave=parallel.interleave_tokens,
                layout=layout,  # type: ignore[arg-type]  # one that it knows, see above
            )
        )
    shape = ModelShape(
        name=f"minillm {arguments.model}",
        num_layers=model.num_layers,
        num_kv_heads=model.cache_heads,
        head_dim=model.cache_dim,
        dtype="float32",
        is_mla=arguments.model == "mla",
    )
    try:
        tokens = range(max(arguments.prompts))
        prefill, decode = shapes
        report = build_report(shape, prefill, decode, tokens, chunk_bytes=CPU_CHUNK_BYTES)
        arguments.picture.parent.mkdir(parents=True, exist_ok=True)
        draw_plan(report, arguments.picture)
    except (KVConnectorError, OSError) as error:
        return f"no picture of the plan: {error}"
    return f"picture  {arguments.picture}: who reads what from whom"
