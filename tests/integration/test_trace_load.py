"""`scripts/trace_load` counts the Python work of a small load, on both sides and both paths."""

import re

import pytest

from scripts import trace_load

pytestmark = [pytest.mark.ucx, pytest.mark.integration]


def test_functions_and_objects_of_a_load_are_counted(capsys, monkeypatch):
    monkeypatch.setattr(trace_load, "NUM_WARM", 2)
    monkeypatch.setattr(trace_load, "NUM_TRACED", 3)
    assert trace_load.main([]) == 0
    found = re.findall(
        r"(\w+), (\w+): (\d+) functions, (\d+) not in every step, (\d+) calls, (\d+) objects",
        capsys.readouterr().out,
    )
    sides = [(path, side) for path, side, *_ in found]
    assert sides == [(p, s) for p in ("direct", "packed") for s in ("producer", "consumer")]
    for _, _, *counts in found:
        functions, own_functions, calls, objects = map(int, counts)
        assert calls >= functions > own_functions > objects > 0
