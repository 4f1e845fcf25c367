"""The bytes of wire versions 3 and 4, one file per message; `wire_3.json`, `wire_4.json` have their fields by name.

Released peers send these bytes: never change them.

A field appended to a message changes what `encode` writes, not what `decode` accepts: add a file of the new bytes
beside the old one, under another name, and mark the old one with `sent_by_earlier_releases`.
"""

import json
from pathlib import Path

import msgspec
import pytest

from kvconnector.wire import decode, encode
from kvconnector.wire.codec import KINDS

VERSIONS = (3, 4)
FOLDERS = {version: Path(__file__).parent / f"wire_{version}" for version in VERSIONS}
LISTED = {
    version: json.loads(folder.with_suffix(".json").read_text())
    for version, folder in FOLDERS.items()
}


def golden(version, name):
    return bytes.fromhex((FOLDERS[version] / f"{name}.hex").read_text())


def messages(version=VERSIONS[0]):
    """One or more of every kind, by name."""
    return {name: decode(golden(version, name)) for name in LISTED[version]}


def named(value):
    """A message in its JSON form: fields by name, without those left at their defaults, and bytes in hex."""
    if isinstance(value, msgspec.Struct):
        defaults = {field.name: field.default for field in msgspec.structs.fields(value)}
        fields = {name: getattr(value, name) for name in defaults}
        return {name: named(each) for name, each in fields.items() if each != defaults[name]}
    if isinstance(value, tuple):
        return [named(each) for each in value]
    return value.hex() if isinstance(value, bytes) else value


@pytest.mark.parametrize(
    "version, name", [(version, name) for version in VERSIONS for name in LISTED[version]]
)
def test_bytes_of_a_released_peer_are_still_the_same_message(version, name):
    message, listed = decode(golden(version, name)), LISTED[version][name]
    assert type(message).__name__ == listed["kind"]
    assert named(message) == listed["fields"]
    if not listed.get("sent_by_earlier_releases"):
        assert encode(message, version).hex() == golden(version, name).hex()


@pytest.mark.parametrize("version", VERSIONS)
def test_every_message_kind_has_golden_bytes(version):
    assert {type(message) for message in messages(version).values()} == set(KINDS.values())
    assert {path.stem for path in FOLDERS[version].iterdir()} == set(LISTED[version])
