"""`soak`: the records it keeps, how it resumes after an interruption, and that it finds faults."""

import io
import math
import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

import kvconnector
import kvconnector_kernels
from kvconnector.bench import ResultMismatchError, processes
from kvconnector.bench.deployment import Deployment
from kvconnector.bench.engine_process import EngineProcess
from kvconnector.bench.engines import EnginePair
from kvconnector.bench.options import BenchOptions
from kvconnector.bench.rank_process import RankProcess
from kvconnector.bench.shapes import ModelShape
from kvconnector.errors import ConfigError
from scripts.benchmarks import soak, soak_state
from scripts.benchmarks.__main__ import main
from scripts.benchmarks.releases import open_release
from scripts.benchmarks.soak import FAULTS, SoakOptions
from scripts.benchmarks.soak_state import (
    RELEASES,
    Samples,
    SoakState,
    cases_of,
    load_state,
    pair_of,
    save_state,
)
from tests.support.forked import run_python
from tests.support.releases import last_release

MODEL = ModelShape(name="tiny", num_layers=3, num_kv_heads=2, head_dim=16)


def life(engine, number, first_mib, mib_per_point, count):
    state = SoakState(of="x")
    for index in range(count):
        state.elapsed_s = 36.0 * index
        state.note_usage(engine, number, (first_mib + mib_per_point * index, 50.0, 30.0, 5.0))
    return state


def test_growth_is_measured_over_the_longest_settled_life():
    state = life("decode", 2, 100.0, 0.5, 40)
    state.usage["decode"][0:0] = [soak_state.UsagePoint(0.0, 1, (900.0, 0.0, 0.0, 0.0))] * 39
    found = state.growth()
    assert found["decode_own_mib_per_hour"] == pytest.approx(50.0)
    # points 10 to 39, in quarters of 7
    assert found["decode_own_mib_first"] == 100.0 + 0.5 * 13
    assert found["decode_own_mib_last"] == 100.0 + 0.5 * 36
    assert found["decode_threads_first"] == found["decode_threads_last"] == 5.0
    assert found["decode_watched_s"] == 36.0 * 29


def test_memory_after_days_is_bounded(monkeypatch):
    monkeypatch.setattr(soak_state, "MAX_SAMPLES", 100)
    monkeypatch.setattr(soak_state, "KEPT_POINTS", 50)
    samples, rng = Samples(), random.Random(0)
    for number in range(10_000):
        samples.add(number / 10_000, rng)
    assert (samples.num_seen, len(samples.kept_s), samples.longest_s) == (10_000, 100, 0.9999)
    # drawn from all samples, not from the first or the last
    assert 0.4 < sum(samples.kept_s) / 100 < 0.6
    points = life("prefill", 1, 10.0, 1.0, 500).usage["prefill"]
    assert len(points) <= 51
    assert points[0].at_s == 0.0


def test_a_state_comes_back_as_it_was_and_only_for_the_same_soak(tmp_path):
    path = tmp_path / "soak.json"
    state = life("decode", 1, 10.0, 0.0, 3)
    state.count("requests", 7)
    state.pair("this to other").served = 3
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


KERNELS = Path(kvconnector_kernels.__path__[0])
PAIRS = ("this to this", "this to other", "other to this", "other to other")


def restarted(state, now, rounds=1):
    """Return the pairs that meet after each restart in this many rounds of all faults."""
    for fault in rounds * FAULTS:
        if fault.is_restart:
            now[fault.engine] = state.next_release(now, fault.engine)
            state.pair(pair_of(now)).met += 1
            yield pair_of(now)


def test_restarts_bring_all_pairs_of_releases_together_and_equally_often():
    state, now = SoakState(of="x"), {"prefill": "this", "decode": "this"}
    state.pair(pair_of(now)).met += 1
    assert {"this to this", *restarted(state, now)} == {*PAIRS}
    list(restarted(state, now, 50))
    counts = [state.pair(each).met for each in PAIRS]
    assert max(counts) - min(counts) <= 2


def test_engines_of_either_release_can_be_killed_and_stopped():
    state, now, ended = SoakState(of="x"), {"prefill": "this", "decode": "this"}, set()
    for fault in 3 * [each for each in FAULTS if each.is_restart]:
        ended.add((fault, now[fault.engine]))
        now[fault.engine] = state.next_release(now, fault.engine)
        state.pair(pair_of(now)).met += 1
    assert len(ended) == 4 * len(RELEASES)


def test_a_report_has_what_each_pair_of_releases_served_and_what_failed():
    state, rng = SoakState(of="x", elapsed_s=600.0), random.Random(0)
    assert len(cases_of("x", state)) == 1
    for number, name in enumerate(PAIRS[:3], 1):
        pair = state.pair(name)
        pair.met, pair.served, pair.checks = number, 100 * number, number
        pair.failed_explained, pair.failed_unexplained = 10 * number, number - 1
        pair.samples.add(0.1 * number, rng)
    _, by_pair = cases_of("x", state)
    assert [each.contender for each in by_pair.measurements] == [*PAIRS]
    assert by_pair.ours.contender == "this to this"
    found = {each.contender: each.figures for each in by_pair.measurements}
    assert found["other to this"] == {
        "met": 3.0,
        "served": 300.0,
        "failed_explained": 30.0,
        "failed_unexplained": 2.0,
        "checks": 3.0,
        "longest_s": pytest.approx(0.3),
    }
    assert found["other to other"]["served"] == 0
    assert by_pair.notes == ("3 failures are unexplained",)
    assert math.isnan(by_pair.measurements[3].percentile_s(50))
    out = io.StringIO()
    by_pair.print_to(Console(file=out, width=100))
    assert "nan" not in out.getvalue()


def release(folder, wire="WireVersions(3, 3)"):
    """Make a folder with this release, except for the wire versions that it speaks."""
    package = Path(kvconnector.__file__).parent
    for name, each in (("kvconnector", package), ("kvconnector_kernels", KERNELS)):
        shutil.copytree(each, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    file = folder / "kvconnector" / "wire" / "versions.py"
    text, count = re.subn(
        r"^SPOKEN = .*$", f"SPOKEN = {wire}", file.read_text(), flags=re.MULTILINE
    )
    assert count == 1
    file.write_text(text)
    return folder


@pytest.mark.parametrize(
    "what,words",
    [
        ("nothing", "there is no kvconnector"),
        ("no kernels", "there is no kvconnector"),
        ("no wheel", "this wheel cannot be opened"),
        ("other wire", "no wire version in common [ours='3 to 4', theirs='1 to 2'"),
        ("other names", "cannot run on that one: ImportError: cannot import name 'EngineGeometry'"),
    ],
)
def test_an_incompatible_release_is_refused_before_anything_runs(what, words, tmp_path, capsys):
    path = tmp_path / "x"
    if what == "no wheel":
        path = tmp_path / "x.whl"
        path.write_bytes(b"PK")
    elif what != "nothing":
        release(path, "WireVersions(1, 2)" if what == "other wire" else "WireVersions(3, 3)")
    if what == "no kernels":
        shutil.rmtree(path / "kvconnector_kernels")
    if what == "other names":
        (path / "kvconnector" / "topology" / "__init__.py").write_text("")
    assert main(["soak", "--minutes", "1", "--other-release", str(path)]) == 2
    *_, line = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("scripts/bench: ")
    assert words in line


def test_a_wheel_and_a_folder_are_opened_alike_with_this_releases_benchmarks(tmp_path):
    folder = release(tmp_path / "x", "WireVersions(3, 7)")
    wheel = shutil.make_archive(str(tmp_path / "x"), "zip", folder)
    wheel = Path(wheel).rename(tmp_path / "kvconnector-0.1.0-py3-none-any.whl")
    lines = "import kvconnector.bench, kvconnector.wire as w; print(kvconnector.bench.__file__, w.__file__)"
    for path in (folder, wheel):
        with open_release(path) as found:
            release_number = kvconnector.__version__.partition("+")[0]
            assert (found.version, found.wire) == (release_number, (3, 7))
            assert str(path) in str(found)
            files = run_python("-P", "-c", lines, **found.environment).split()
            bench, wire = (Path(each).resolve() for each in files)
        assert bench == Path(kvconnector.__file__).parent / "bench" / "__init__.py"
        assert (tmp_path in wire.parents) == (path == folder)
    assert not wire.exists()  # the unpacked files are removed
    assert folder.exists()


@pytest.mark.integration
def test_the_ranks_of_the_last_release_run_this_ones_benchmarks(monkeypatch):
    monkeypatch.setattr(processes, "subprocess", subprocess)  # not forked from this release
    deployment = Deployment(BenchOptions(model=MODEL, tokens=(9,)))
    with open_release(last_release()) as found:
        environment = found.environment
        with EngineProcess(deployment, "prefill", environment=environment) as engine:
            engine.call_ranks(RankProcess.write, [[0]], 9)


def soaked(is_over, monkeypatch, **options):
    """Return the cases of a soak of an hour that is interrupted once `is_over(state)`."""
    step = soak.Soak._step

    def interrupted(self, *paused):
        if is_over(self._state):
            raise KeyboardInterrupt
        step(self, *paused)

    found = []
    with monkeypatch.context() as patch:
        patch.setattr(soak.Soak, "_step", interrupted)
        asked = SoakOptions(model=MODEL, tokens=(9, 70), minutes=60.0, **options)
        with pytest.raises(KeyboardInterrupt):
            found.extend(soak.run(asked, lambda *step: None))
    return found


@pytest.mark.ucx
@pytest.mark.integration
@pytest.mark.slow
def test_a_soak_meets_every_fault_and_goes_on_after_an_interruption(monkeypatch, tmp_path):
    monkeypatch.setattr(soak, "ABORT_PROBABILITY", 0.3)
    monkeypatch.setattr(soak, "FAULT_S", 1.0)
    options = {"state": str(tmp_path / "soak.json")}
    cases = soaked(lambda state: state.counts.get("fault_turns", 0) > 2, monkeypatch, **options)
    before = cases[0].ours.figures

    def is_over(state):
        return state.counts.get("fault_turns", 0) > len(FAULTS) + 1 and state.total("checks") > 1

    after = soaked(is_over, monkeypatch, **options)[0].ours.figures
    assert (before["interruptions"], after["interruptions"]) == (0, 1)
    assert after["requests"] > before["requests"] > 0
    assert after["aborts"] > 0
    assert after["unexplained"] == 0
    for fault in FAULTS:
        assert after[str(fault)] >= 1
    assert after["decode_descriptors_last"] > 0


@pytest.mark.ucx
@pytest.mark.integration
@pytest.mark.parametrize("what", ["late write", "leak"])
def test_a_soak_ends_at_wrong_bytes_and_leaked_blocks(monkeypatch, what):
    if what == "leak":
        monkeypatch.setattr(soak, "DRAIN_S", 1.0)
        monkeypatch.setattr(soak.Soak, "_give_back", lambda *_: None)
    else:
        prepare = EnginePair.prepare

        def written_late(self, transfer):
            prepare(self, transfer)
            (used,) = transfer.decode_blocks
            free = next(block for block in range(len(used) + 1) if block not in used)
            self.decode.call_ranks(RankProcess.write, [[free]], 1)

        monkeypatch.setattr(EnginePair, "prepare", written_late)
    text = "leaked" if what == "leak" else "another request"
    options = SoakOptions(model=MODEL, tokens=(9, 70), minutes=0.05)
    with pytest.raises(ResultMismatchError, match=text):
        list(soak.run(options, lambda *step: None))


@pytest.mark.ucx
@pytest.mark.integration
@pytest.mark.slow
def test_a_soak_serves_between_all_pairs_of_this_release_and_the_last(monkeypatch):
    monkeypatch.setattr(processes, "subprocess", subprocess)  # not forked from this release
    monkeypatch.setattr(soak, "FAULT_S", 1.0)

    def is_over(state):
        return all(state.pair(name).met and state.pair(name).checks for name in PAIRS)

    whole, by_pair = soaked(is_over, monkeypatch, other_release=str(last_release()))
    assert whole.ours.figures["unexplained"] == 0
    for each in by_pair.measurements:
        assert each.figures["served"] >= 1
        assert each.figures["failed_unexplained"] == 0
