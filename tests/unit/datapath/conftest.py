"""Fixtures of the data paths' tests."""

from contextlib import ExitStack, closing

import pytest

from tests.unit.datapath.pump_pair import Pair


@pytest.fixture
def make_pair():
    """Makes pairs as `Pair.connect` does, and closes them."""
    with ExitStack() as stack:

        def make(*shapes, **knobs):
            return stack.enter_context(closing(Pair.connect(*shapes, **knobs)))

        yield make
