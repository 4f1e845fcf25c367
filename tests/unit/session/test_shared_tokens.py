"""A producer rank that shares the tokens of a request with others serves its own alone."""

from __future__ import annotations

import numpy as np
import pytest

from kvconnector.planning import CHUNK_DTYPE
from kvconnector.session import events as ev
from kvconnector.wire import messages as m
from kvconnector.wire.messages import Refusal
from tests.unit.session import harness as h


def ask_for_token(side, stripe, member, read_id=1):
    """Of a stripe of a rank of two that take turns of two tokens; what the rank says."""
    segment = h.read().segments[0]
    fields = {name: getattr(segment, name) for name in segment.__struct_fields__}
    names = ("token_first", "token_run", "token_period")
    asked = m.ReadSegment(**fields | dict(zip(names, stripe, strict=True)))
    chunk = np.array([(0, 0, 1, member, 1)], CHUNK_DTYPE).tobytes()
    return side.tell(ev.ReadAsked(-1, h.read(read_id, segments=(asked,), chunks=chunk)))


def rank_of_two():
    side = h.producer(tp_size=2, dcp_size=2, interleave_tokens=2)
    side.tell(h.granted(num_tokens=21))
    h.welcome(side)
    return side


@pytest.mark.parametrize(
    "stripe",
    [
        (0, 1, 1),  # all tokens, as a consumer asks that knows of no sharing
        (2, 2, 4),
        (1, 2, 4),
        (0, 2, 6),
    ],
)
def test_tokens_that_another_rank_holds_are_refused(stripe):
    (refused,) = h.messages(ask_for_token(rank_of_two(), stripe, 0), m.ReadRefused)
    assert refused.refusal is Refusal.INVALID_READ
    assert "does not hold these tokens" in refused.text
