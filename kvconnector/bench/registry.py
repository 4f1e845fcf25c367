"""Every benchmark by name."""

from __future__ import annotations

from kvconnector.bench import blocks, gil, planning, relayout, transfer
from kvconnector.bench.contract import Benchmark
from kvconnector.errors import ConfigError

BENCHMARKS: dict[str, Benchmark] = {
    benchmark.name: benchmark
    for benchmark in (
        relayout.BENCHMARK,
        planning.BENCHMARK,
        transfer.TRANSFER,
        transfer.REQUEST,
        gil.BENCHMARK,
        blocks.BENCHMARK,
    )
}


def benchmark_named(name: str) -> Benchmark:
    """The benchmark of this name.

    Raises:
        ConfigError: there is no such benchmark.
    """
    if name not in BENCHMARKS:
        raise ConfigError("no such benchmark", benchmark=name, known=list(BENCHMARKS))
    return BENCHMARKS[name]
