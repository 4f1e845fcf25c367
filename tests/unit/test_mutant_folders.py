"""`scripts/mutants --folders`: what its table says of each place of tests, also of those that did not end."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("mutants_script", ROOT / "scripts/mutants.py")
script = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = script  # where annotations are looked up
spec.loader.exec_module(script)
Tried = script.Tried


def test_the_table_names_who_notices_and_what_is_noticed_late_or_nowhere():
    found = {
        "wire: a": [Tried("unit", 1.26, True), Tried("hosts", 40, True), Tried("golden", 1, False)],
        "wire: b": [Tried("unit", 9, False), Tried("hosts", 30.5, True), Tried("golden", 1, False)],
        "wire: c": [
            Tried("unit", 9, False),
            Tried("hosts", 50, False),
            Tried("golden", 1, False),
        ],
    }
    assert script.folder_report(found, slow_s=10) == [
        "| mutant | noticed by | fastest | s |",
        "|---|---|---|---|",
        "| wire: a | unit, hosts | unit | 1.3 |",
        "| wire: b | hosts | hosts | 30.5 |",
        "| wire: c | nothing |  |  |",
        "",
        "unit: notices 1, 0 of them alone",
        "hosts: notices 2, 1 of them alone",
        "golden: notices 0, 0 of them alone",
        "",
        "noticed by none of these:",
        "  wire: c",
        "",
        "noticed only after more than 10 s:",
        "  wire: b",
        "",
        "notice nothing:",
        "  golden",
        "",
        "notice nothing that no other place does:",
        "  unit",
    ]


def test_tests_that_did_not_end_count_neither_way():
    found = {
        "wire: a": [Tried("unit", 1, True), Tried("hosts", 60, None)],
        "wire: b": [Tried("unit", 9, False), Tried("hosts", 60, None)],
    }
    assert script.folder_report(found, slow_s=10) == [
        "| mutant | noticed by | fastest | s |",
        "|---|---|---|---|",
        "| wire: a | unit, hosts (no end) | unit | 1.0 |",
        "| wire: b | hosts (no end) |  |  |",
        "",
        "unit: notices 1, 0 of them alone",
        "hosts: notices 0, 0 of them alone",
        "",
        "not known of all places, because tests did not end:",
        "  wire: a",
        "  wire: b",
    ]


def test_places_are_all_that_start_no_engines_or_those_that_are_named():
    assert set(script.places_of([])) == set(script.PLACES)
    for tests in script.PLACES.values():
        assert all((ROOT / test).exists() for test in tests if not test.startswith("-"))
    this = "tests/unit/test_mutant_folders.py"
    assert script.places_of(["vllm", this]) == {"vllm": ("tests/vllm",), this: (this,)}
    with pytest.raises(ValueError, match="there is no tests/units; give unit, golden"):
        script.places_of(["unit", "tests/units"])
