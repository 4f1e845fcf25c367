"""The bytes of wire version 3, one file per message; `wire_3.json` has each message's fields by name.

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

VERSION = 3
FOLDER = Path(__file__).parent / f"wire_{VERSION}"
LISTED = json.loads(FOLDER.with_suffix(".json").read_text())


def golden(name):
    return bytes.fromhex((FOLDER / f"{name}.hex").read_text())


def messages():
    """One or more of every kind, by name."""
    return {name: decode(golden(name)) for name in LISTED}


def named(value):
    """A message in its JSON form: fields by name, without those left at their defaults, and bytes in hex."""
    if isinstance(value, msgspec.Struct):
        defaults = {field.name: field.default for field in msgspec.structs.fields(value)}
        fields = {name: getattr(value, name) for name in defaults}
        return {name: named(each) for name, each in fields.items() if each != defaults[name]}
    if isinstance(value, tuple):
        return [named(each) for each in value]
    return value.hex() if isinstance(value, bytes) else value


@pytest.mark.parametrize("name", LISTED)
def test_bytes_of_a_released_peer_are_still_the_same_message(name):
    message, listed = decode(golden(name)), LISTED[name]
    assert type(message).__name__ == listed["kind"]
    assert named(message) == listed["fields"]
    if not listed.get("sent_by_earlier_releases"):
        assert encode(message, VERSION).hex() == golden(name).hex()


def test_every_message_kind_has_golden_bytes():
    assert {type(message) for message in messages().values()} == set(KINDS.values())
    assert {path.stem for path in FOLDER.iterdir()} == set(LISTED)
