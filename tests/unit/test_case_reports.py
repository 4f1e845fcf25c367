"""The harnesses' reports of whole-engine cases: a case that compared nothing has not passed."""

from types import SimpleNamespace

import pytest

from tests.vllm.harness import scenarios
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


class Decoder:
    """A decode engine that gives the tokens of a prompt with all that follows these log probabilities."""

    def __init__(self, scores):
        self.scores = scores

    def forget(self):
        pass

    def ask(self, prompt, **options):
        return SimpleNamespace(prompt_scores=[self.scores[token] for token in prompt[1:]])


@pytest.mark.parametrize(
    "gap, drift, is_good",
    [(0.03, 0.02, True), (0.3, 0.02, False), (0.03, 0.0, False), (0.03, 0.4, False)],
    ids=["a near-tie", "a clear choice", "exact engines", "wrong rows"],
)
def test_tokens_differ_only_within_the_drift(gap, drift, is_good):
    """The engine alone drifts by 0.02 where another one does at all; one token of two is another one."""
    scores = {1: -3.0, 2: -3.0, 3: -3.0, 4: -3.0}
    alone = min(drift, 0.02)
    own = SimpleNamespace(tokens=[2, 3], scores=[-3.0 - alone] * 2, gaps=[0.5, gap])
    answer = SimpleNamespace(tokens=[2, 4], scores=[-3.0 - drift] * 2, gaps=[0.5, gap])
    outcome = Outcome()
    pair = SimpleNamespace(decode=Decoder(scores))
    scenarios._compare_by_drift(pair, outcome, "a prompt", prompt=[1, 1], own=own, answer=answer)
    assert (not outcome.complaints) == is_good
    assert outcome.figures["a prompt: gap there"] == gap
