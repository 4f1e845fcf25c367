"""What the races share."""

import pytest


@pytest.fixture
def show(capsys):
    """Prints figures that a run is for, captured or not."""

    def write(text):
        with capsys.disabled():
            print(text)  # noqa: T201

    return write
