"""Which workers a directory service names."""

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvconnector.runtime.directory import MAX_UNASKED, answer_to
from kvconnector.wire import messages as m
from tests.unit.session import harness

ENTRY = harness.directory().workers[0]
SIZES = st.integers(1, 3 * MAX_UNASKED)


def directory_of(size):
    workers = tuple(replace(ENTRY, tp_rank=rank) for rank in range(size))
    return replace(harness.directory(), workers=workers)


@given(size=SIZES, theirs=SIZES, ranks=st.lists(st.integers(0, 4 * MAX_UNASKED)))
def test_workers_that_share_a_place_with_the_ranks_asked_for(size, theirs, ranks):
    request = m.DirectoryRequest(engine_id="p", ranks=tuple(ranks), world_size=theirs)
    found = {worker.tp_rank for worker in answer_to(request, directory_of(size)).workers}
    overlapping = {
        worker
        for worker in range(size)
        for rank in ranks
        if rank < theirs
        and Fraction(rank, theirs) < Fraction(worker + 1, size)
        and Fraction(worker, size) < Fraction(rank + 1, theirs)
    }
    assert found == (overlapping if size > MAX_UNASKED else {*range(size)})


@given(size=SIZES)
def test_who_names_no_ranks_hears_of_all(size):
    directory = directory_of(size)
    assert answer_to(m.DirectoryRequest(engine_id="p"), directory) == directory
