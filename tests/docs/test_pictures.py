"""Pictures in docs/ show what the table beside them says."""

import importlib.util
import re

import pytest

from tests.docs.blocks import ROOT

spec = importlib.util.spec_from_file_location("pictures", ROOT / "scripts/benchmark_pictures.py")
pictures = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pictures)


def test_the_picture_of_first_tokens_has_the_numbers_of_its_table(tmp_path):
    pytest.importorskip("matplotlib")
    found = pictures.first_tokens(pictures.TABLES.read_text())
    assert [len(points) for points in found.values()] == [3] * 3
    wanted = sorted(f"{ms:.1f}" for points in found.values() for ms in points.values())
    pictures.main(drawn := tmp_path / "drawn.svg")
    for picture in (drawn, ROOT / "docs/vllm-bench.svg"):
        shown = re.findall(r"<text[^>]*font-size: 8px[^>]*>([\d.]+)</text>", picture.read_text())
        assert sorted(shown) == wanted, "run scripts/benchmark_pictures.py"
