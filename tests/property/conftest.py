"""The races' fixture."""

import pytest


@pytest.fixture
def show(capsys):
    """Prints the figures of a run, even if output is captured."""

    def write(text):
        with capsys.disabled():
            print(text)  # noqa: T201

    return write
