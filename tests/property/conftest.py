"""What the races share."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Prints figures that a run is for, captured or not."""

    def write(text: str) -> None:
        with capsys.disabled():
            print(text)  # noqa: T201

    return write
