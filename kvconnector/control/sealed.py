"""Authenticated control messages, for a transport on which any process may write.

An `Inbox` is one direction of a link. The receiver chooses it, and sends it to the peer over an authenticated
connection. A frame is a MAC (keyed BLAKE2b) of inbox, number and payload, the message's number in its inbox, and the
payload, in the clear. So the receiver refuses messages that were forged, changed, repeated or moved, and notices a
missing message when the next one arrives.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from dataclasses import dataclass, field

from kvconnector.errors import PeerLostError, RemoteError, Retry

KEY_BYTES = 32
MAC_BYTES = 16
INBOX_ID_BITS = 62
_NUMBER = struct.Struct("<Q")
OVERHEAD_BYTES = _NUMBER.size + MAC_BYTES
_PERSON = b"kvc-control"


class ForgedMessageError(RemoteError):
    """A frame is too short, has a wrong MAC, or is a repeat: drop it."""

    retry = Retry.OTHER


@dataclass(frozen=True, slots=True)
class Inbox:
    """The receiving end of one direction of a link, and the key that authenticates its sender."""

    inbox_id: int
    key: bytes = field(repr=False)

    @classmethod
    def fresh(cls) -> Inbox:
        """Make a random inbox; its id is not 0."""
        return cls(1 + secrets.randbelow((1 << INBOX_ID_BITS) - 1), secrets.token_bytes(KEY_BYTES))


class Sealer:
    """Makes the frames for an inbox."""

    def __init__(self, inbox: Inbox) -> None:
        self.inbox_id = inbox.inbox_id
        self._keyed = _keyed(inbox)
        self._next_number = 0

    def seal(self, payload: bytes) -> bytes:
        """Return the next frame."""
        content = _NUMBER.pack(self._next_number) + payload
        self._next_number += 1
        mac = self._keyed.copy()
        mac.update(content)
        return mac.digest() + content


class Opener:
    """Checks the frames that arrive in an inbox."""

    def __init__(self, inbox: Inbox) -> None:
        self._keyed = _keyed(inbox)
        self._next_number = 0

    @property
    def has_opened(self) -> bool:
        """Returns True if any message has arrived."""
        return self._next_number > 0

    def open(self, frame: bytes) -> bytes:
        """Return the next frame's payload. Raises ForgedMessageError; PeerLostError: an earlier frame is missing."""
        if len(frame) < OVERHEAD_BYTES:
            raise ForgedMessageError("a frame is shorter than its header", nbytes=len(frame))
        (number,) = _NUMBER.unpack_from(frame, MAC_BYTES)
        mac = self._keyed.copy()
        mac.update(frame[MAC_BYTES:])
        if not hmac.compare_digest(mac.digest(), frame[:MAC_BYTES]):
            raise ForgedMessageError("a frame's MAC is wrong", nbytes=len(frame), number=number)
        if number < self._next_number:
            raise ForgedMessageError(
                "a frame was repeated", number=number, next_number=self._next_number
            )
        if number > self._next_number:
            raise PeerLostError(
                "control messages were lost", expected=self._next_number, found=number
            )
        self._next_number += 1
        return frame[OVERHEAD_BYTES:]


def _keyed(inbox: Inbox) -> hashlib.blake2b:
    """Return the MAC of an inbox's frames, before number and payload. Copying it takes less time than setting a key."""
    place = _NUMBER.pack(inbox.inbox_id)
    return hashlib.blake2b(place, digest_size=MAC_BYTES, key=inbox.key, person=_PERSON)
