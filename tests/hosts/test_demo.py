from __future__ import annotations

import pytest

from tests.hosts import demo


def test_the_demo_on_hosts_says_why_there_can_be_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "missing", lambda: "hosts need root")
    assert demo.main() == 2
    assert capsys.readouterr().err == "scripts/demo --hosts: hosts need root\n"
