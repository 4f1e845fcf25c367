"""Every benchmark by name."""

from __future__ import annotations

from kvconnector.bench import blocks, gil, planning, relayout, soak, transfer
from kvconnector.bench.contract import Benchmark

BENCHMARKS: dict[str, Benchmark] = {
    each.name: each
    for each in (
        transfer.TRANSFER,
        transfer.REQUEST,
        gil.BENCHMARK,
        relayout.BENCHMARK,
        planning.BENCHMARK,
        blocks.BENCHMARK,
        soak.BENCHMARK,
    )
}
