from tests.hosts import demo


def test_the_demo_on_hosts_names_what_the_machine_lacks(monkeypatch, capsys):
    monkeypatch.setattr(demo, "missing", lambda: "hosts need root")
    assert demo.main() == 2
    assert capsys.readouterr().err == "scripts/demo --hosts: hosts need root\n"
