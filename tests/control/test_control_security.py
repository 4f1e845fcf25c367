from __future__ import annotations

import stat
from pathlib import Path

import pytest
import zmq

from kvconnector.control.security import CurveKeys, generate_keys
from kvconnector.errors import ConfigError


def _pair() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def test_generated_keys_are_private_and_load_again(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "keys"
    keys = generate_keys(directory)
    assert CurveKeys.from_directory(directory) == keys
    assert keys.authorized_clients == {keys.public_key}
    assert stat.S_IMODE((directory / "curve.secret").stat().st_mode) == 0o600
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert (directory / "curve.public").read_text().strip() == keys.public_key
    assert keys.secret_key not in (directory / "curve.public").read_text()


def test_keys_are_never_overwritten(tmp_path: Path) -> None:
    keys = generate_keys(tmp_path)
    with pytest.raises(ConfigError, match="not overwritten"):
        generate_keys(tmp_path)
    assert CurveKeys.from_directory(tmp_path) == keys


def test_secret_readable_by_others_is_refused(tmp_path: Path) -> None:
    generate_keys(tmp_path)
    (tmp_path / "curve.secret").chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        CurveKeys.from_directory(tmp_path)


def test_list_of_clients_may_have_comments(tmp_path: Path) -> None:
    keys = generate_keys(tmp_path)
    other = _pair()[0]
    listing = f"# engines of this cluster\n\n{keys.public_key}  prefill\n{other}\n#{'-' * 39}\n"
    (tmp_path / "authorized_clients").write_text(listing)
    loaded = CurveKeys.from_directory(tmp_path)
    assert loaded.authorized_clients == {keys.public_key, other}


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"curve\.secret"):
        CurveKeys.from_directory(tmp_path)
    generate_keys(tmp_path)
    (tmp_path / "authorized_clients").unlink()
    with pytest.raises(ConfigError, match="authorized_clients"):
        CurveKeys.from_directory(tmp_path)


def test_secret_is_never_shown() -> None:
    public, secret = _pair()
    keys = CurveKeys.from_values(secret_key=f" {secret}\n", authorized_clients=[public])
    assert keys.public_key == public
    assert secret not in repr(keys)
    with pytest.raises(ConfigError) as malformed:
        CurveKeys.from_values(secret_key=secret[:-1], authorized_clients=[public])
    assert secret[:-1] not in str(malformed.value)


@pytest.mark.parametrize("client", ["", "short", "~" * 40, "#" * 40, "é" * 40])
def test_malformed_client_key_is_refused(client: str) -> None:
    with pytest.raises(ConfigError, match="authorised client key"):
        CurveKeys.from_values(secret_key=_pair()[1], authorized_clients=[client])


def test_empty_list_and_foreign_public_key_are_refused() -> None:
    public, secret = _pair()
    with pytest.raises(ConfigError, match="nobody could connect"):
        CurveKeys.from_values(secret_key=secret, authorized_clients=[])
    with pytest.raises(ConfigError, match="does not belong"):
        CurveKeys(_pair()[0], secret, frozenset({public}))
