"""Fixtures of the data paths' tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.unit.datapath.pump_pair import Pair, pairs_of


@pytest.fixture
def make_pair() -> Iterator[Callable[..., Pair]]:
    """Makes pairs, see `Pair.connect`, and closes them."""
    with pairs_of(Pair) as make:
        yield make
