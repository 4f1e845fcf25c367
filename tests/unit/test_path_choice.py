"""The choice between paths: from a first expectation, from what reads took, and back from a wrong one."""

from __future__ import annotations

from itertools import count, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnector.errors import LocalError
from kvconnector.planning.cost import PathCost, packed_on_cpu
from kvconnector.planning.paths import (
    FIRST_TRIAL,
    LAST_PAUSE,
    PACKED_MUST_SAVE,
    WINDOW,
    LearntCost,
    PathChooser,
    ReadSize,
)

shares = st.floats(1e-12, 1e-3)
costs = st.builds(PathCost, shares, shares, shares)
nbytes = st.integers(1, 1 << 34)
sizes = st.builds(ReadSize, nbytes, nbytes, st.integers(1, 1 << 20))
factors = st.floats(1e-3, 1e3)


def seconds_of(cost: PathCost, path: str, size: ReadSize) -> float:
    return cost.seconds(size.read_bytes if path == "direct" else size.nbytes, size.num_runs)


@given(costs, costs, sizes)
def test_packed_is_chosen_at_first_if_it_is_clearly_faster(direct, packed, size):
    choice = PathChooser(direct, packed).choose(size)
    direct_s, packed_s = seconds_of(direct, "direct", size), seconds_of(packed, "packed", size)
    assert (choice.path == "packed") == (direct_s > PACKED_MUST_SAVE * packed_s)
    saved_s = packed_s - direct_s if choice.path == "direct" else direct_s - packed_s
    assert choice.saved_s == pytest.approx(saved_s)


@given(costs, costs, factors, st.floats(1, 1e3), sizes)
def test_wrong_expectations_heal(direct, packed, direct_factor, packed_factor, size):
    """Soon the path is the one that reads of this size show to be right, but for rare trials: whatever was expected, if
    packed reads are not faster than that.
    """
    chooser = PathChooser(direct, packed)
    true_s = {
        "direct": direct_factor * seconds_of(direct, "direct", size),
        "packed": packed_factor * seconds_of(packed, "packed", size),
    }

    def read() -> str:
        path = chooser.choose(size).path
        chooser.observe(path, size, true_s[path])
        return path

    for _ in range(sum(FIRST_TRIAL.values()) + WINDOW):
        read()
    clearly = 1.01
    paths = [read() for _ in range(100)]
    if true_s["direct"] > clearly * PACKED_MUST_SAVE * true_s["packed"]:
        assert paths.count("direct") <= 3
    elif clearly * true_s["direct"] < PACKED_MUST_SAVE * true_s["packed"]:
        assert paths.count("packed") <= 3


@given(costs, costs, sizes)
def test_trials_become_rare_and_never_end(direct, packed, size):
    chooser = PathChooser(direct, packed)
    paths = [chooser.choose(size).path for _ in range(5 * LAST_PAUSE)]
    tried = [index for index, path in enumerate(paths) if path != paths[0]]
    if not tried:
        # not even nearly worth it to be packed
        assert paths[0] == "direct"
        return
    pauses = [later - earlier for earlier, later in pairwise(tried)]
    assert tried[0] == FIRST_TRIAL[paths[tried[0]]] - 1
    assert pauses == sorted(pauses)
    assert pauses[-1] == LAST_PAUSE


@given(costs, sizes, st.data())
def test_fewer_than_half_of_the_latest_reads_may_be_disturbed(cost, size, data):
    learnt = LearntCost(cost)
    for seconds in data.draw(st.lists(st.floats(1e-6, 1e3), max_size=20)):
        learnt.observe(size.nbytes, size.num_runs, seconds)
    disturbed = data.draw(
        st.lists(st.floats(1e-6, 1e3), min_size=WINDOW // 2, max_size=WINDOW // 2)
    )
    true_s = data.draw(st.floats(1e-6, 1e3))
    for seconds in data.draw(st.permutations(disturbed + [true_s] * (WINDOW - len(disturbed)))):
        learnt.observe(size.nbytes, size.num_runs, seconds)
    assert learnt.expected_s(size.nbytes, size.num_runs) == pytest.approx(true_s)


def test_small_reads_tell_nothing_of_large_ones_once_those_are_known():
    learnt = LearntCost(PathCost(1e-5, 1e-10, 0.0))
    learnt.observe(1 << 12, 1, 1e-3)
    learnt.observe(1 << 30, 1, 0.2)
    learnt.observe(1 << 12, 1, 1e-3)
    assert learnt.expected_s(1 << 30, 1) == pytest.approx(0.2)
    assert learnt.expected_s(1 << 12, 1) == pytest.approx(1e-3)


def test_a_crowded_host_costs_one_packed_read_at_most():
    """All copies take twenty times as long as they did when they were probed, packed ones forty times."""
    reading = PathCost(fixed_s=2e-5, per_byte_s=1 / 6e9, per_run_s=3e-7)
    chooser, size = PathChooser(reading, packed_on_cpu(reading)), ReadSize(5 << 20, 5 << 20, 400)
    crowded = {
        "direct": 20 * seconds_of(reading, "direct", size),
        "packed": 40 * seconds_of(packed_on_cpu(reading), "packed", size),
    }
    paths = []
    for _ in range(200):
        paths.append(chooser.choose(size).path)
        chooser.observe(paths[-1], size, crowded[paths[-1]])
    assert paths.count("packed") <= 1


def test_a_probe_that_was_disturbed_does_not_keep_reads_packed():
    """Thirty microseconds a run were a busy moment of the probe: reads take a hundredth of that."""
    reading = PathCost(fixed_s=2e-5, per_byte_s=1 / 6e9, per_run_s=3e-7)
    probed = PathCost(fixed_s=2e-5, per_byte_s=1 / 6e9, per_run_s=3e-5)
    chooser, size = PathChooser(probed, packed_on_cpu(probed)), ReadSize(5 << 20, 5 << 20, 400)
    tries = count()
    while chooser.choose(size).path == "packed":
        chooser.observe("packed", size, seconds_of(packed_on_cpu(reading), "packed", size))
        assert next(tries) < FIRST_TRIAL["direct"]
    chooser.observe("direct", size, seconds_of(reading, "direct", size))
    assert {chooser.choose(size).path for _ in range(50)} == {"direct"}


def test_splinters_go_packed():
    reading = PathCost(fixed_s=1e-5, per_byte_s=1 / 9e9, per_run_s=3e-7)
    chooser = PathChooser(reading, packed_on_cpu(reading))
    assert chooser.choose(ReadSize(1 << 28, 1 << 28, 4096)).path == "direct"
    assert chooser.choose(ReadSize(1 << 28, 1 << 28, 1 << 22)).path == "packed"


def test_a_reason_names_both_times():
    direct = PathCost(fixed_s=1e-3, per_byte_s=0.0, per_run_s=0.0)
    packed = PathCost(fixed_s=2e-3, per_byte_s=0.0, per_run_s=0.0)
    choice = PathChooser(direct, packed).choose(ReadSize(1 << 20, 1 << 20, 7))
    assert choice.reason == "1.0 MiB in 7 runs: 1.00 ms directly, 2.00 ms packed"


@pytest.mark.parametrize("values", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_reads_of_nothing_have_no_size(values):
    with pytest.raises(LocalError, match="brings something"):
        ReadSize(*values)
