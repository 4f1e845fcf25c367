"""The harnesses' reports of whole-engine cases: a case that compared nothing has not passed."""

import json
from types import SimpleNamespace

import pytest

from tests.vllm.harness import scenarios
from tests.vllm.harness.report import OURS, NoAnswerError, Outcome, Report, SerialHarness

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


class Engines(SerialHarness):
    """Cases without engines: each raises what it is named after, or compares something."""

    cases = (
        SimpleNamespace(name="lost", why_not="", is_quick=True, error=NoAnswerError("gone")),
        SimpleNamespace(name="broken", why_not="", is_quick=True, error=ValueError("odd\nworse")),
        SimpleNamespace(name="good", why_not="", is_quick=False, error=None),
        SimpleNamespace(name="later", why_not="no GPU", is_quick=True, error=None),
    )

    def start(self):
        return {"engine": "1.2"}

    def make_models(self, case):
        (self.folder / f"model-{case.name}").touch()

    def run_case(self, case, place, outcome):
        assert not list(place.iterdir())
        (place / "log").touch()
        if case.error is not None:
            raise case.error
        outcome.check("idle", True)


def run_engines(monkeypatch, *arguments):
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("sys.argv", ["engines", *map(str, arguments)])
    return Engines().run()


def test_a_case_that_fails_is_reported_and_the_next_one_runs(tmp_path, monkeypatch, capfd):
    assert run_engines(monkeypatch, "--folder", tmp_path) == 1
    found = json.loads((tmp_path / "report.json").read_text())
    complaints = {row["case"]: row["complaints"] for row in found["rows"]}
    assert complaints == {"lost": ["gone"], "broken": ["ValueError: worse"], "good": []}
    assert found["not_run"] == {"later": "no GPU"}
    assert found["environment"]["engine"] == "1.2"
    assert {path.name for path in tmp_path.glob("model-*")} == {
        "model-lost",
        "model-broken",
        "model-good",
    }
    assert run_engines(monkeypatch, "--folder", tmp_path, "good") == 0


def test_cases_are_chosen_by_name_or_as_quick_ones(tmp_path, monkeypatch, capsys):
    quick = ("lost", "broken", "later: not run: no GPU")
    for given, names in (((), (*quick[:2], "good", quick[2])), (("--quick",), quick)):
        assert run_engines(monkeypatch, "--folder", tmp_path / "none", "--list", *given) == 0
        assert capsys.readouterr().out.splitlines() == list(names)
    assert not (tmp_path / "none").exists()
    with pytest.raises(SystemExit):
        run_engines(monkeypatch, "--folder", tmp_path, "better")
    assert "no case named better" in capsys.readouterr().err
