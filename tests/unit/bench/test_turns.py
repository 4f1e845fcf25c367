"""Two checkouts in turns: who runs when, and what is compared with what."""

import json

import pytest

from scripts.benchmarks import turns
from scripts.benchmarks.__main__ import main

PROGRAM = """
import json, os, sys
def main():
    with open(LOG, "a") as log:
        print(NAME, os.environ.get("KVCONNECTOR_PATHS_DIRECT", "any"), *sys.argv[1:-2], file=log)
    samples = [each * SECONDS for each in (3.0, 1.0, 2.0)]
    measurements = [
        {"contender": CONTENDER, "samples_s": samples},
        {"contender": "not measured", "samples_s": []},
    ]
    json.dump({"cases": [{"case": "2 MiB", "measurements": measurements}]}, open(sys.argv[-1], "w"))
"""


@pytest.fixture
def trees(tmp_path):
    """Two checkouts, whose benchmarks note that they were called. The second takes 1.5 times as long."""
    found = []
    for name, seconds, contender in (("one", 1e-3, "ours (direct)"), ("two", 1.5e-3, "ours (any)")):
        package = tmp_path / name / "kvconnector"
        (package / "cli").mkdir(parents=True)
        (package / "__init__.py").write_text("")
        named = {"LOG": str(tmp_path / "log"), "NAME": name, "SECONDS": seconds}
        lines = [f"{key} = {value!r}" for key, value in {**named, "CONTENDER": contender}.items()]
        (package / "cli" / "__init__.py").write_text("\n".join(lines) + PROGRAM)
        found.append(str(package.parent))
    return found


def test_checkouts_take_turns_and_every_second_round_begins_with_the_other(
    trees, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["turns", "--rounds", "2", *trees, "request", "--tokens", "16"]) == 0
    ran = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    names = ["one", "two", "one", "two", "two", "one", "two", "one"]
    ways = ["any", "any", "never", "never"] * 2
    assert ran == [
        [name, way, "bench", "request", "--tokens", "16"]
        for name, way in zip(names, ways, strict=True)
    ]
    out = capsys.readouterr().out
    assert out.count("2 ms") == out.count("3 ms") == out.count("1.500") == 2
    assert "not measured" not in out


def test_a_checkout_that_cannot_run_it_is_named(trees, tmp_path, capsys):
    (tmp_path / "two" / "kvconnector" / "cli" / "__init__.py").write_text(
        "raise SystemExit('no GPU')"
    )
    assert main(["turns", *trees, "request"]) == 2
    err = capsys.readouterr().err
    assert "no GPU" in err
    assert trees[1] in err
    (tmp_path / "empty").mkdir()
    assert main(["turns", str(tmp_path / "empty"), trees[0], "request"]) == 2
    assert "no checkout" in capsys.readouterr().err


def test_a_figure_is_the_median_of_rounds_and_needs_both_checkouts():
    key = ("packed", "2 MiB", "ours")
    found = {key: ([3.0, 1.0, 2.0], [6.0, 5.0, 100.0]), ("packed", "2 MiB", "old"): ([1.0], [])}
    (compared,) = turns.compare(found)
    assert (compared.key, compared.medians_s, compared.ratio) == (key, (2.0, 6.0), 3.0)
    report = {
        "cases": [{"case": "c", "measurements": [{"contender": "a", "samples_s": [4, 1, 2]}]}]
    }
    assert list(turns.medians_of(json.loads(json.dumps(report)))) == [("c", "a", 2)]
