"""The stream of a copy, compared with a list of all marks."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvconnector.datapath.pump.marks import FREE_STREAM, Marks
from kvconnector.planning import GroupBlocks

NUM_STREAMS = 3

blocks = st.lists(st.integers(0, 6), max_size=3).map(lambda ids: (GroupBlocks.of(ids),))
requests = st.lists(blocks, max_size=3)


def is_in(some, whole):
    return set(some[0].block_ids.tolist()) <= set(whole[0].block_ids.tolist())


@given(
    steps=st.lists(
        st.tuples(st.just("mark"), requests)
        | st.tuples(st.just("pass"), st.none())
        | st.tuples(st.just("copy"), blocks),
        max_size=40,
    )
)
def test_copies_wait_only_for_their_requests_last_mark(steps):
    passed = np.zeros(NUM_STREAMS, np.int32)
    marks = Marks(passed)
    pending = []
    for kind, value in steps:
        if kind == "mark":
            pending.append((*marks.add(value), value))
        elif kind == "pass" and pending:
            stream, number, _ = pending.pop(0)
            passed[stream] = number
        elif kind == "copy":
            own = [
                stream for stream, _, held in pending if any(is_in(value, whole) for whole in held)
            ]
            assert marks.stream_of(value) == (own[-1] if own else FREE_STREAM)
        named = ", ".join(f"{number} on stream {stream}" for stream, number, _ in pending)
        assert repr(marks) == f"<Marks pending: {named or 'none'}>"
