"""`soak`: what it keeps, how it goes on after an interruption, and that it finds what it looks for."""

import random

import pytest

from kvconnector.bench import ResultMismatchError, soak, soak_state
from kvconnector.bench.options import BenchOptions
from kvconnector.bench.rank_process import RankProcess
from kvconnector.bench.shapes import ModelShape
from kvconnector.bench.soak_state import Samples, SoakState, load_state, save_state
from kvconnector.errors import ConfigError

MODEL = ModelShape(name="tiny", num_layers=3, num_kv_heads=2, head_dim=16)


def life(engine, number, first_mib, mib_per_point, count):
    state = SoakState(of="x")
    for index in range(count):
        state.elapsed_s = 36.0 * index
        state.note_usage(engine, number, (first_mib + mib_per_point * index, 50.0, 30.0, 5.0))
    return state


def test_growth_is_that_of_the_longest_life_after_it_settled():
    state = life("decode", 2, 100.0, 0.5, 40)
    state.usage["decode"][0:0] = [soak_state.UsagePoint(0.0, 1, (900.0, 0.0, 0.0, 0.0))] * 39
    found = state.growth()
    assert found["decode_own_mib_per_hour"] == pytest.approx(50.0)
    # points 10 to 39, in quarters of 7
    assert found["decode_own_mib_first"] == 100.0 + 0.5 * 13
    assert found["decode_own_mib_last"] == 100.0 + 0.5 * 36
    assert found["decode_threads_first"] == found["decode_threads_last"] == 5.0
    assert found["decode_watched_s"] == 36.0 * 29


def test_what_days_leave_behind_is_bounded(monkeypatch):
    monkeypatch.setattr(soak_state, "MAX_SAMPLES", 100)
    monkeypatch.setattr(soak_state, "KEPT_POINTS", 50)
    samples, rng = Samples(), random.Random(0)
    for number in range(10_000):
        samples.add(number / 10_000, rng)
    assert (samples.num_seen, len(samples.kept_s), samples.longest_s) == (10_000, 100, 0.9999)
    # drawn from all of them, not from the first or the last
    assert 0.4 < sum(samples.kept_s) / 100 < 0.6
    points = life("prefill", 1, 10.0, 1.0, 500).usage["prefill"]
    assert len(points) <= 51
    assert points[0].at_s == 0.0


def test_a_state_comes_back_as_it_was_and_only_for_the_same_soak(tmp_path):
    path = tmp_path / "soak.json"
    state = life("decode", 1, 10.0, 0.0, 3)
    state.count("requests", 7)
    save_state(path, state)
    assert load_state(path, "x") == state
    assert [each.name for each in tmp_path.iterdir()] == ["soak.json"]
    with pytest.raises(ConfigError, match="another soak"):
        load_state(path, "y")
    path.write_text("{}")
    with pytest.raises(ConfigError, match="no soak's state"):
        load_state(path, "x")
    with pytest.raises(ConfigError, match="cannot write"):
        save_state(tmp_path / "missing" / "soak.json", state)
    assert load_state(None, "x") == SoakState(of="x")


def soaked(is_over, monkeypatch, **options):
    """The case of a soak that is interrupted once `is_over(counts)`; None where the run ends by itself."""
    step = soak.Soak._step

    def interrupted(self):
        if is_over(self._state.counts):
            raise KeyboardInterrupt
        step(self)

    with monkeypatch.context() as patch:
        patch.setattr(soak.Soak, "_step", interrupted)
        asked = BenchOptions(model=MODEL, tokens=(9, 70), **options)
        cases = soak.run(asked, lambda *step: None)
        case = next(cases)
        with pytest.raises(KeyboardInterrupt):
            next(cases)
        return case.ours.figures


@pytest.mark.ucx
@pytest.mark.integration
@pytest.mark.slow
def test_a_soak_meets_every_fault_and_goes_on_after_an_interruption(monkeypatch, tmp_path):
    monkeypatch.setattr(soak, "ABORT_PROBABILITY", 0.3)
    monkeypatch.setattr(soak, "FAULT_S", 1.0)
    monkeypatch.setattr(soak, "CHECK_S", 4.0)
    options = {"minutes": 60.0, "state": str(tmp_path / "soak.json")}
    before = soaked(lambda counts: counts.get("fault_turns", 0) > 2, monkeypatch, **options)
    wanted = len(soak.FAULTS) + 1
    after = soaked(
        lambda counts: counts.get("fault_turns", 0) > wanted and counts.get("checks", 0) > 1,
        monkeypatch,
        **options,
    )
    assert (before["interruptions"], after["interruptions"]) == (0, 1)
    assert after["requests"] > before["requests"] > 0
    assert after["aborts"] > 0
    assert after["unexplained"] == 0
    for fault in soak.FAULTS:
        assert after[str(fault)] >= 1
    assert after["decode_descriptors_last"] > 0


@pytest.mark.ucx
@pytest.mark.integration
@pytest.mark.parametrize("what", ["late write", "leak"])
def test_a_soak_ends_at_wrong_bytes_and_leaked_blocks(monkeypatch, what):
    if what == "leak":
        monkeypatch.setattr(soak, "DRAIN_S", 1.0)
        monkeypatch.setattr(soak._Side, "give_back", lambda self, request: None)
    else:
        prepare = soak.EnginePair.prepare

        def written_late(self, transfer):
            prepare(self, transfer)
            ((blocks,), (own,)) = (
                self.deployment.num_blocks(self.deployment.shapes["decode"]),
                transfer.decode_blocks,
            )
            (unused, *_) = {*range(blocks)} - {*own}
            self.decode.ranks.call(RankProcess.write, [[unused]], 1)

        monkeypatch.setattr(soak.EnginePair, "prepare", written_late)
    text = "leaked" if what == "leak" else "another request"
    options = BenchOptions(model=MODEL, tokens=(9, 70), minutes=0.05)
    with pytest.raises(ResultMismatchError, match=text):
        list(soak.run(options, lambda *step: None))
