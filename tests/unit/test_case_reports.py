"""The harnesses' reports of whole-engine cases: a case that compared nothing has not passed."""

from types import SimpleNamespace

import pytest

from tests.vllm.harness.report import OURS, Outcome, Report

RIGHT = SimpleNamespace(tokens=[1, 2], reason="length")


@pytest.fixture
def report(tmp_path, monkeypatch):
    monkeypatch.setattr("signal.signal", lambda *_: None)
    return Report(tmp_path, {}, {"case": "", "later": "no GPU"})


def test_a_case_that_compared_nothing_fails(report, capsys):
    report.add("case", OURS, Outcome(), 1.0)
    assert report.end() == 1
    assert "it compared nothing" in capsys.readouterr().out


def test_a_run_without_a_case_fails(report, capsys):
    assert report.end() == 1
    assert "no case ran" in capsys.readouterr().out


@pytest.mark.parametrize(
    "compare",
    [
        lambda outcome: outcome.compare("a prompt", RIGHT, [1, 2]),
        lambda outcome: outcome.compare_bytes("a prompt", ""),
        lambda outcome: outcome.check("idle", True),
    ],
    ids=["tokens", "bytes", "a check"],
)
def test_a_case_passes_whatever_it_compared(report, compare):
    outcome = Outcome()
    compare(outcome)
    report.add("case", OURS, outcome, 1.0)
    assert report.end() == 0


def test_a_difference_fails(report, capsys):
    outcome = Outcome()
    outcome.compare("a prompt", RIGHT, [1, 3])
    report.add("case", OURS, outcome, 1.0)
    assert report.end() == 1
    assert "differ from the 1th on" in capsys.readouterr().out
