"""Authentication of a control channel: CURVE keys, or an explicit statement that there are none.

Every worker has one key pair for both directions, and a list of the public keys that it accepts. Keys are text: 32
bytes in Z85, 40 characters.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from kvconnector.errors import AuthenticationError, ConfigError

SECRET_KEY_FILE = "curve.secret"
PUBLIC_KEY_FILE = "curve.public"
AUTHORIZED_CLIENTS_FILE = "authorized_clients"

_KEY_BYTES = 32
_UNSAFE_MODE = stat.S_IRWXO | stat.S_IWGRP


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """The worker's key pair and the public keys of the clients it accepts. The secret is not shown by `repr`."""

    public_key: str
    secret_key: str = field(repr=False)
    authorized_clients: frozenset[str]

    @classmethod
    def from_values(cls, *, secret_key: str, authorized_clients: Iterable[str]) -> CurveKeys:
        """Make keys from text, ignoring white space around them. Raises ConfigError: one is malformed, or no client."""
        secret = secret_key.strip()
        check_key(secret, "secret key")
        clients = frozenset(key.strip() for key in authorized_clients)
        if not clients:
            raise ConfigError(
                "the file has no authorised keys, so nobody could connect: list at least this engine's own public key"
            )
        for key in clients:
            check_key(key, "authorised client key")
        public = zmq.curve_public(secret.encode("ascii")).decode("ascii")
        return cls(public, secret, clients)

    @classmethod
    def from_files(cls, *, secret_key_file: Path, authorized_clients_file: Path) -> CurveKeys:
        """Read keys from a secret key file, and from a list with one public key per line.

        A line that starts with `#`, which no key does, and whatever follows a key are comments. Raises ConfigError: a
        file is missing, malformed, or the secret is accessible to other users.
        """
        secret = read_key_file(secret_key_file)
        _refuse_shared_secret(secret_key_file)
        clients = []
        text = read_key_file(authorized_clients_file)
        for number, line in enumerate(map(str.strip, text.splitlines()), 1):
            if line and not line.startswith("#"):
                key = line.split(maxsplit=1)[0]
                check_key(key, f"authorised client key at {authorized_clients_file}:{number}")
                clients.append(key)
        return cls.from_values(secret_key=secret, authorized_clients=clients)


Security = CurveKeys | None
"""None: every client that reaches the port is trusted. `config` says where that is accepted."""


def check_server(security: Security, address: str, public_key: str) -> None:
    """Refuse a server's key that came through a router: AuthenticationError if we use keys and do not know it."""
    if isinstance(security, CurveKeys) and not public_key:
        raise AuthenticationError(
            "the producer runs without keys, but this engine has keys: give CURVE keys to both, or to neither",
            address=address,
        )
    if isinstance(security, CurveKeys) and public_key not in security.authorized_clients:
        raise AuthenticationError(
            "the producer's public key is not among the authorised ones: if it is right, add it to the file that"
            " control.authorized_clients_file names here",
            address=address,
            public_key=public_key,
        )


def generate_keys(directory: Path) -> CurveKeys:
    """Create a key pair in `directory`, which is created if needed (mode 0700). Returns the keys.

    Writes the secret key (mode 0600), the public key, and a list of authorised clients that holds the new public key,
    so that engines that share the directory trust each other. Raises ConfigError: one of the files exists already, or
    the directory cannot be written.
    """
    public, secret = (key.decode("ascii") for key in zmq.curve_keypair())
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in (SECRET_KEY_FILE, PUBLIC_KEY_FILE, AUTHORIZED_CLIENTS_FILE):
            if (directory / name).exists():
                raise ConfigError(
                    "key file exists already and is not overwritten", path=str(directory / name)
                )
        _write_new(directory / SECRET_KEY_FILE, secret, 0o600)
        _write_new(directory / PUBLIC_KEY_FILE, public, 0o644)
        _write_new(directory / AUTHORIZED_CLIENTS_FILE, public, 0o644)
    except OSError as exc:
        raise ConfigError(f"cannot write keys: {exc.strerror}", path=str(exc.filename)) from exc
    return CurveKeys(public, secret, frozenset({public}))


def check_key(key: str, what: str) -> None:
    """Raise `ConfigError` unless `key` is 32 bytes in Z85. The text does not repeat the key: it may be a secret."""
    try:
        nbytes = len(z85.decode(key.encode("ascii")))
    except (ValueError, KeyError, struct.error):
        nbytes = 0
    if nbytes != _KEY_BYTES:
        raise ConfigError(f"{what} is not a CURVE key of 40 Z85 characters", characters=len(key))


def read_key_file(path: Path) -> str:
    """Return a key file's text. Raises ConfigError: it cannot be read."""
    try:
        return path.read_text("utf-8")
    except PermissionError as exc:
        raise ConfigError(
            f"cannot read key file: {exc}; let this process's user or group read it, in a pod by `fsGroup` in its"
            " securityContext and `defaultMode: 0440` of the secret's volume (docs/kubernetes.md)",
            path=str(path),
            user=os.geteuid(),
            group=os.getegid(),
        ) from exc
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"cannot read key file: {exc}", path=str(path)) from exc


def _refuse_shared_secret(path: Path) -> None:
    mode = path.stat().st_mode
    if mode & _UNSAFE_MODE:
        raise ConfigError(
            "secret key file is accessible to other users; restrict it with chmod 600, or in a pod that mounts it"
            " by `defaultMode: 0440` of its volume and `fsGroup` in the pod's securityContext (docs/kubernetes.md)",
            path=str(path),
            mode=oct(stat.S_IMODE(mode)),
        )


def _write_new(path: Path, key: str, mode: int) -> None:
    path.touch(mode, exist_ok=False)
    path.write_text(key + "\n", "ascii")
