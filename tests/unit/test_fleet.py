"""`scripts/fleet`: each public recipe has a verdict, and no capability counts without its test."""

import importlib.util
import sys
from pathlib import Path

import msgspec
import pytest

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("fleet_script", ROOT / "scripts/fleet.py")
fleet_script = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = fleet_script  # where annotations are looked up
spec.loader.exec_module(fleet_script)
FLEET, RECIPES = fleet_script.load()


def test_every_capability_that_counts_names_tests_that_exist():
    assert fleet_script.absent_tests(FLEET) == []


@pytest.mark.parametrize(
    "test",
    [
        "tests/unit/test_fleet.py::test_nothing",
        "tests/none.py::",
        "tests/vllm/harness/cases.py::tp9",
    ],
)
def test_a_test_that_does_not_exist_is_found(test):
    known = FLEET.capability["vllm"]
    changed = msgspec.structs.replace(known, tests=(*known.tests, test))
    fleet = msgspec.structs.replace(FLEET, capability={**FLEET.capability, "vllm": changed})
    assert fleet_script.absent_tests(fleet) == [test]


def test_each_recipe_has_a_verdict_and_all_are_counted():
    found = fleet_script.lines(FLEET, RECIPES)
    assert len([line for line in found if line.startswith(("yes ", "no  "))]) == len(RECIPES)
    counted = {line.partition(":")[0]: int(line.split()[-2]) for line in found[len(RECIPES) :]}
    assert counted == {"sglang": 155, "trtllm": 93, "vllm": 65}


def test_one_lack_stops_a_recipe_and_a_test_opens_it():
    """A recipe of DeepSeek-R1 needs attention that is data parallel, and nothing else that is not there."""
    (recipe,) = [
        each
        for each in RECIPES
        if each["family"] == "dsr1"
        and each["load_balance"] == "round_robin"
        and each["speculation P/D"] == "EAGLE/EAGLE"
    ]
    name = "sglang dp attention"
    lacking = fleet_script.Capability(text="x", why="it is refused")
    tests = ("tests/unit/test_fleet.py::",)
    there = fleet_script.Capability(text="x", level="contract", tests=tests)
    for capability, missing in ((lacking, [name]), (there, [])):
        known = {**FLEET.capability, name: capability}
        fleet = msgspec.structs.replace(FLEET, capability=known)
        assert fleet.missing(recipe) == missing
    assert fleet.level(recipe) == "contract"  # the least of its needs


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"why": "no", "tests": ("a",), "level": "GPU"},
        {"tests": ("a",)},
        {"why": "no", "level": "GPU"},
    ],
)
def test_a_capability_is_there_with_tests_or_says_why_not(wrong):
    with pytest.raises(ValueError, match="either a level and tests, or why"):
        fleet_script.Capability(text="x", **wrong)


def test_a_recipe_that_no_rule_knows_is_an_error():
    with pytest.raises(ValueError, match="no rule knows"):
        FLEET.needed({**RECIPES[0], "engine": "another"})
