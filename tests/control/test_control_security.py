import pytest
import zmq

from kvconnector.control.security import CurveKeys, generate_keys
from kvconnector.errors import ConfigError


def _pair():
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def _load(folder):
    return CurveKeys.from_files(
        secret_key_file=folder / "curve.secret",
        authorized_clients_file=folder / "authorized_clients",
    )


def test_the_list_of_clients_may_have_comments(tmp_path):
    keys = generate_keys(tmp_path)
    other = _pair()[0]
    listing = f"# engines of this cluster\n\n{keys.public_key}  prefill\n{other}\n#{'-' * 39}\n"
    (tmp_path / "authorized_clients").write_text(listing)
    loaded = _load(tmp_path)
    assert loaded.authorized_clients == {keys.public_key, other}


def test_a_missing_key_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"curve\.secret"):
        _load(tmp_path)
    generate_keys(tmp_path)
    (tmp_path / "authorized_clients").unlink()
    with pytest.raises(ConfigError, match="authorized_clients"):
        _load(tmp_path)


def test_a_key_that_others_may_read_is_refused_with_the_way_out_of_it(tmp_path):
    generate_keys(tmp_path)
    (tmp_path / "curve.secret").chmod(0o644)
    with pytest.raises(ConfigError, match=r"chmod 600.*`defaultMode: 0440`.*`fsGroup`"):
        _load(tmp_path)


def test_a_key_that_this_user_may_not_read_is_refused_with_the_way_out_of_it(tmp_path, monkeypatch):
    generate_keys(tmp_path)

    def refuse(path, *_):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("pathlib.Path.read_text", refuse)  # root may read everything
    with pytest.raises(ConfigError, match=r"Permission denied.*`fsGroup`.*`defaultMode: 0440`"):
        _load(tmp_path)


def test_the_secret_key_is_never_printed():
    public, secret = _pair()
    keys = CurveKeys.from_values(secret_key=f" {secret}\n", authorized_clients=[public])
    assert keys.public_key == public
    assert secret not in repr(keys)
    with pytest.raises(ConfigError) as malformed:
        CurveKeys.from_values(secret_key=secret[:-1], authorized_clients=[public])
    assert secret[:-1] not in str(malformed.value)


@pytest.mark.parametrize("client", ["", "short", "~" * 40, "#" * 40, "é" * 40, None])
def test_malformed_and_missing_client_keys_are_refused(client):
    clients, text = ([], "nobody could connect") if client is None else ([client], "client key")
    with pytest.raises(ConfigError, match=text):
        CurveKeys.from_values(secret_key=_pair()[1], authorized_clients=clients)
