import subprocess
from types import SimpleNamespace

import pytest

from kvconnector.bench import processes
from tests.support.forked import Process


@pytest.fixture(autouse=True)
def _forked_ranks(monkeypatch):
    names = {name: getattr(subprocess, name) for name in ("DEVNULL", "TimeoutExpired")}
    monkeypatch.setattr(processes, "subprocess", SimpleNamespace(Popen=Process, **names))
