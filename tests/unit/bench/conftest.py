import pytest

from kvconnector.bench import processes
from tests.support import forked


@pytest.fixture(autouse=True)
def _forked_ranks(monkeypatch):
    monkeypatch.setattr(processes, "subprocess", forked.POPEN)
