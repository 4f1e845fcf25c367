from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnector.errors import LocalError
from kvconnector.planning.cost import PACKED_ON_CUDA, PathCost, Probe, packed_on_cpu

shares = st.floats(0, 1, allow_subnormal=False)
costs = st.builds(PathCost, shares, shares, shares)


@given(costs, st.integers(1, 1 << 40), st.integers(1, 1 << 20))
def test_packed_reads_on_a_host_cost_more_than_reading_but_for_the_runs(reading, nbytes, num_runs):
    packed = packed_on_cpu(reading)
    in_one_run = reading.seconds(nbytes, 0)
    assert packed.seconds(nbytes, num_runs) > in_one_run


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
    assert str(PACKED_ON_CUDA) == "337.0 GB/s + 0.00 us a run + 500 us"
    assert str(PathCost(0.0, 0.0, 0.0)).startswith("no time by bytes")
