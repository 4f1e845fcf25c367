"""What a request of DeepSeek-V4 moves, beside whole blocks as NixlConnector moves them: a table of docs/benchmarks."""

import re
from pathlib import Path

import pytest

from kvconnector.bench.shapes import DEEPSEEK_V4_FLASH, DEEPSEEK_V4_PRO, EngineShape
from kvconnector.cli.plan import build_report

# vLLM's planner puts all cache groups into one pool, whose blocks have this many bytes; a block belongs to one group at
# a time. Each group's tokens in a block and its window, 0 for all tokens. tests/vllm/test_compressed.py compares these
# constants with the planners of vLLM 0.32 and 0.33.
BLOCK_BYTES = {"Pro": 1_435_968, "Flash": 1_002_240}
GROUPS = ((64, 128), (64, 128), (256, 0), (8, 128), (4, 8))
MODELS = {"Pro": DEEPSEEK_V4_PRO, "Flash": DEEPSEEK_V4_FLASH}
ROW = re.compile(r"\| (Pro|Flash) \| ([\d,]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|")


def whole_blocks(tokens):
    """Return the blocks of a prompt that NixlConnector reads: of a window those in which tokens of it are."""
    return sum(
        -(-tokens // size) - (max(0, tokens - window) // size if window else 0)
        for size, window in GROUPS
    )


def table():
    text = (Path(__file__).parents[2] / "docs/benchmarks/cpus.md").read_text()
    return [
        (name, int(n.replace(",", "")), *map(float, more)) for name, n, *more in ROW.findall(text)
    ]


@pytest.mark.parametrize("row", table(), ids=str)
def test_the_table_of_bytes(row):
    name, tokens, ours, theirs, ratio = row
    # the last token is computed by the decode engine
    engine, loaded = EngineShape(block=256), range(tokens - 1)
    report = build_report(MODELS[name], engine, engine, loaded, chunk_bytes=2 << 20)
    moved = report.total_bytes
    whole = whole_blocks(tokens) * BLOCK_BYTES[name]
    assert (ours, theirs) == (round(moved / 1e6, 1), round(whole / 1e6, 1))
    assert ratio == round(moved / whole, 2)


def test_the_table_is_there():
    assert [row[:2] for row in table()] == [
        (name, tokens) for name in MODELS for tokens in (1000, 8192, 65536)
    ]
