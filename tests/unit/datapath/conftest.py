"""Fixtures of the data paths' tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

from tests.unit.datapath.caches import Shape
from tests.unit.datapath.pump_pair import Pair


@pytest.fixture
def make_pair() -> Iterator[Callable[..., Pair]]:
    """Makes pairs, see `Pair.connect`, and closes them."""
    with ExitStack() as stack:

        def make(*shapes: Shape, **knobs: Any) -> Pair:
            return stack.enter_context(closing(Pair.connect(*shapes, **knobs)))

        yield make
