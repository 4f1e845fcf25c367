from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from kvconnector.bench import children
from tests.support.forked import Process


@pytest.fixture(autouse=True)
def _forked_ranks(monkeypatch):
    """Ranks are forked, but for those that import from a site of their own."""

    def start(command, *, env, **options):
        has_site = env["PYTHONPATH"].split(os.pathsep)[0] not in sys.path
        return (subprocess.Popen if has_site else Process)(command, env=env, **options)

    names = {name: getattr(subprocess, name) for name in ("DEVNULL", "TimeoutExpired")}
    monkeypatch.setattr(children, "subprocess", SimpleNamespace(Popen=start, **names))
