"""Which public recipes of disaggregated deployments start with kvconnector, why not, and which tests show it.

    scripts/fleet             a line for each recipe, and the sums
    scripts/fleet --table     the table by model that docs/compatibility.md has

`tests/data/fleet.tsv` has the recipes, and `tests/data/fleet.toml` what each needs. A capability counts only if every
test that it names exists: the script fails for one that does not.
"""

from __future__ import annotations

import csv
import re
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "data"
LEVELS = ("contract", "CPU engines", "GPU")


class Capability(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Something that recipes need. It is there if it has `tests`; else `why` says why it is not."""

    text: str
    why: str = ""
    level: str = ""
    tests: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if bool(self.why) == bool(self.tests) or bool(self.tests) != (self.level in LEVELS):
            raise ValueError(f"{self.text}: either a level and tests, or why it is missing")


class Fleet(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`capability` by name, and rules: columns of a recipe as regular expressions, and the `capabilities` they need."""

    capability: dict[str, Capability]
    needs: list[dict[str, Any]]

    def needed(self, recipe: dict[str, str]) -> list[str]:
        """Return the names of what a recipe needs. Raises ValueError: no rule knows it, or a rule is wrong."""
        found: list[str] = []
        for rule in self.needs:
            columns = {name: each for name, each in rule.items() if name != "capabilities"}
            if unknown := sorted({*columns} - {*recipe}):
                raise ValueError(f"a rule names columns that no recipe has: {unknown}")
            if all(re.fullmatch(each, recipe[name]) for name, each in columns.items()):
                found += rule["capabilities"]
        if unknown := sorted({*found} - {*self.capability}):
            raise ValueError(f"rules need capabilities that are not described: {unknown}")
        if not found:
            raise ValueError(f"no rule knows this recipe: {recipe}")
        return list(dict.fromkeys(found))

    def missing(self, recipe: dict[str, str]) -> list[str]:
        """Return the names of what a recipe needs and we lack."""
        return [name for name in self.needed(recipe) if self.capability[name].why]

    def level(self, recipe: dict[str, str]) -> str:
        """Return the least of the levels at which a recipe's needs are shown."""
        return min((self.capability[name].level for name in self.needed(recipe)), key=LEVELS.index)


def load(folder: Path = DATA) -> tuple[Fleet, list[dict[str, str]]]:
    """Return the capabilities and rules, and the recipes. Raises ValueError: they do not fit."""
    fleet = msgspec.convert(tomllib.loads((folder / "fleet.toml").read_text()), Fleet)
    with (folder / "fleet.tsv").open(newline="") as file:
        recipes = [dict(row) for row in csv.DictReader(file, delimiter="\t")]
    return fleet, recipes


def absent_tests(fleet: Fleet, root: Path = ROOT) -> list[str]:
    """Return the tests that capabilities name and that do not exist."""
    absent = []
    for each in fleet.capability.values():
        for test in each.tests:
            path, _, name = test.partition("::")
            file = root / path
            pattern = rf'\(\s*"{re.escape(name)}"' if "harness" in path else rf"^\s*def {name}\("
            is_there = file.is_file() and (
                not name or re.search(pattern, file.read_text(), re.MULTILINE)
            )
            if not is_there:
                absent.append(test)
    return absent


def lines(fleet: Fleet, recipes: list[dict[str, str]]) -> list[str]:
    """Return a line for each recipe, then the sums by engine."""
    found, started, whole = [], Counter[str](), Counter[str]()
    for recipe in recipes:
        count, missing = int(recipe["count"]), fleet.missing(recipe)
        engine, family = recipe["engine"], recipe["family"]
        whole[engine] += count
        started[engine] += 0 if missing else count
        columns = [value for value in list(recipe.values())[3:] if value not in ("-", "-/-", "n/a")]
        what = f"{count:>3} {engine} {family}: {', '.join(columns) or 'any'}"
        if missing:
            reasons = "; ".join(
                f"{fleet.capability[n].text}: {fleet.capability[n].why}" for n in missing
            )
            found.append(f"no   {what}: {reasons}")
        else:
            tests = [test for name in fleet.needed(recipe) for test in fleet.capability[name].tests]
            found.append(f"yes  {what}: {fleet.level(recipe)}: {', '.join(dict.fromkeys(tests))}")
    found += [f"{engine}: {started[engine]} of {whole[engine]} start" for engine in whole]
    return found


def table(fleet: Fleet, recipes: list[dict[str, str]]) -> str:
    """Return recipes by model and engine as a Markdown table."""
    rows: dict[tuple[str, str], list[dict[str, str]]] = {}
    for recipe in recipes:
        rows.setdefault((recipe["family"], recipe["engine"]), []).append(recipe)
    text = [
        "| model | engine | recipes that start | shown by | what the others lack |",
        "|---|---|---|---|---|",
    ]
    for (family, engine), own in sorted(rows.items()):
        whole = sum(int(each["count"]) for each in own)
        starting = [each for each in own if not fleet.missing(each)]
        levels = sorted({fleet.level(each) for each in starting}, key=LEVELS.index)
        lacking = Counter[str]()
        for each in own:
            for name in fleet.missing(each):
                lacking[fleet.capability[name].text] += int(each["count"])
        lacks = "; ".join(f"{name} ({count})" for name, count in lacking.most_common())
        started = sum(int(each["count"]) for each in starting)
        text.append(
            f"| {family} | {engine} | {started} of {whole} | {', '.join(levels)} | {lacks} |"
        )
    return "\n".join(text)


def main(arguments: list[str]) -> int:
    """Print the recipes or the table; return 1 if a capability names a test that does not exist."""
    fleet, recipes = load()
    if absent := absent_tests(fleet):
        print("capabilities name tests that do not exist:", *absent, sep="\n  ", file=sys.stderr)
        return 1
    print(table(fleet, recipes) if arguments == ["--table"] else "\n".join(lines(fleet, recipes)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
