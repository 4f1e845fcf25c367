from tests.hosts import demo


def test_the_demo_on_hosts_says_why_there_can_be_none(monkeypatch, capsys):
    monkeypatch.setattr(demo, "missing", lambda: "hosts need root")
    assert demo.main() == 2
    assert capsys.readouterr().err == "scripts/demo --hosts: hosts need root\n"
