from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnector.errors import LocalError
from kvconnector.planning.cost import PACKED_ON_CPU, PACKED_ON_CUDA, PathCost, Probe, choose

shares = st.floats(0, 1, allow_subnormal=False)
costs = st.builds(PathCost, shares, shares, shares)
sizes = st.integers(1, 1 << 40)


@given(costs, costs, sizes, st.integers(1, 1 << 20))
def test_the_chosen_path_is_never_the_slower_one(direct, packed, nbytes, num_runs):
    choice = choose(nbytes, num_runs, direct=direct, packed=packed)
    seconds = {"direct": direct, "packed": packed}
    assert seconds[choice.path].seconds(nbytes, num_runs) == min(
        cost.seconds(nbytes, num_runs) for cost in seconds.values()
    )


def test_long_runs_go_directly_and_splinters_go_packed():
    direct = PathCost(fixed_s=1e-5, per_byte_s=1 / 9e9, per_run_s=3e-7)
    assert choose(1 << 28, 4096, direct=direct, packed=PACKED_ON_CPU).path == "direct"
    assert choose(1 << 28, 1 << 22, direct=direct, packed=PACKED_ON_CPU).path == "packed"


def test_a_reason_names_both_times():
    direct = PathCost(fixed_s=1e-3, per_byte_s=0.0, per_run_s=0.0)
    packed = PathCost(fixed_s=2e-3, per_byte_s=0.0, per_run_s=0.0)
    choice = choose(1 << 20, 7, direct=direct, packed=packed)
    assert choice.reason == "1.0 MiB in 7 runs: 1.00 ms directly, 2.00 ms packed"


@given(costs)
def test_probes_of_a_path_give_its_costs_back(cost):
    def probe(nbytes, num_runs):
        # what the fit takes for the fixed share is a whole small copy
        return Probe(nbytes, num_runs, cost.seconds(nbytes, num_runs) + 1e-9)

    found = PathCost.fit(probe(1, 1), probe(1 << 30, 1), probe(1 << 30, 1 << 16))
    assert found.fixed_s == pytest.approx(sum(cost.shares), abs=2e-9)
    assert found.per_byte_s == pytest.approx(cost.per_byte_s, rel=1e-6, abs=1e-9)
    assert found.per_run_s == pytest.approx(cost.per_run_s, rel=1e-3, abs=1e-6)


def test_noise_makes_no_share_negative():
    found = PathCost.fit(Probe(1, 1, 1.0), Probe(100, 1, 0.5), Probe(100, 10, 0.2))
    assert found.shares == (1.0, 0.0, 0.0)


@pytest.mark.parametrize("shares", [(-1.0, 0.0, 0.0), (0.0, float("inf"), 0.0)])
def test_impossible_costs_are_refused(shares):
    with pytest.raises(LocalError, match="not negative and finite"):
        PathCost(*shares)


@pytest.mark.parametrize("values", [(0, 1, 1.0), (5, 0, 1.0), (5, 6, 1.0), (5, 1, 0.0)])
def test_impossible_probes_are_refused(values):
    with pytest.raises(LocalError, match="copies something"):
        Probe(*values)


def test_costs_read_as_bandwidth():
    assert str(PACKED_ON_CUDA) == "326.0 GB/s + 0.00 us a run + 2000 us"
    assert str(PathCost(0.0, 0.0, 0.0)).startswith("no time by bytes")
