"""`kvconnector simulate`: reports, pictures, traces and refusals."""

import json

import pytest

from kvconnector.cli import main

QUICK = ("--seconds", "2", "--model", "llama-3.1-8b,layers=2")


def simulated(capsys, *arguments):
    assert main(["simulate", *QUICK, *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_equal_seeds_give_equal_reports(capsys):
    first = simulated(capsys, "--engines", "2,4")
    assert [row["engines"] for row in first["rows"]] == [2, 4]
    assert simulated(capsys, "--engines", "2,4") == first
    assert simulated(capsys, "--engines", "2,4", "--seed", "1") != first


def test_a_trace_gives_the_arrival_times(capsys, tmp_path):
    trace = tmp_path / "trace.txt"
    trace.write_text("0.5 100\n0.75 2000\n")
    (row,) = simulated(capsys, "--engines", "2", "--trace", str(trace))["rows"]
    assert (row["requests"], row["succeeded"], row["released"]) == (2, 2, 2)


def test_a_table_and_a_picture_are_written(capsys, tmp_path):
    picture = tmp_path / "simulated.svg"
    assert main(["simulate", *QUICK, "--engines", "2", "--svg", str(picture)]) == 0
    assert "greetings" in capsys.readouterr().out
    assert picture.read_text().startswith("<?xml")


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("--engines", "1"), "two engines"),
        (("--trace", "/no/such/file"), "trace"),
        (("--decode", "tp=0"), "tp"),
        (("--engines", "4,2", "--seconds", "0.01"), "no request arrives"),
    ],
)
def test_impossible_simulations_are_refused(capsys, arguments, words):
    assert main(["simulate", *QUICK, *arguments]) == 2
    assert words in capsys.readouterr().err
