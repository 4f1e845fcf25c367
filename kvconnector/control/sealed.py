"""Control messages on a way that anybody may write to: numbered, and proved to come from the peer.

An `Inbox` is one direction of a link. Whoever receives chooses it, and tells it to the peer over a connection that
proves who the peer is. A frame is the message's number in its inbox, a MAC (keyed BLAKE2b) of inbox, number and
payload, and the payload, in the clear. So a message that others made, changed, repeated or moved is not let through,
and one that was held back shows as soon as the next one comes.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from dataclasses import dataclass

from kvconnector.errors import PeerLostError, RemoteError

KEY_BYTES = 32
MAC_BYTES = 16
INBOX_ID_BITS = 62
_NUMBER = struct.Struct("<Q")
_PLACE = struct.Struct("<QQ")
OVERHEAD_BYTES = _NUMBER.size + MAC_BYTES
_PERSON = b"kvc-control"


class ForgedMessageError(RemoteError):
    """A frame is not the peer's next message: too short, with a wrong MAC, or one that came before. Drop it."""


@dataclass(frozen=True, slots=True)
class Inbox:
    """Where one link's messages go, and the secret that its sender proves itself with."""

    inbox_id: int
    key: bytes

    @classmethod
    def fresh(cls) -> Inbox:
        """A random one; its id is not 0."""
        return cls(1 + secrets.randbelow((1 << INBOX_ID_BITS) - 1), secrets.token_bytes(KEY_BYTES))


class Sealer:
    """Makes the frames for an inbox."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._next_number = 0

    def seal(self, payload: bytes) -> bytes:
        """The next frame."""
        number = self._next_number
        self._next_number += 1
        return b"".join((_NUMBER.pack(number), _mac(self._inbox, number, payload), payload))


class Opener:
    """Checks the frames that arrive in an inbox."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._next_number = 0

    @property
    def has_opened(self) -> bool:
        """Whether any message came."""
        return self._next_number > 0

    def open(self, frame: bytes) -> bytes:
        """The payload of the next frame.

        Raises:
            ForgedMessageError: the frame is not the peer's, or came before; it changes nothing.
            PeerLostError: the frame is the peer's, and one before it never came.
        """
        if len(frame) < OVERHEAD_BYTES:
            raise ForgedMessageError("a frame is shorter than its header", nbytes=len(frame))
        (number,) = _NUMBER.unpack_from(frame)
        payload = frame[OVERHEAD_BYTES:]
        if not hmac.compare_digest(
            _mac(self._inbox, number, payload), frame[_NUMBER.size : OVERHEAD_BYTES]
        ):
            raise ForgedMessageError("a frame's MAC is wrong", nbytes=len(frame), number=number)
        if number < self._next_number:
            raise ForgedMessageError(
                "a frame came again", number=number, next_number=self._next_number
            )
        if number > self._next_number:
            raise PeerLostError(
                "control messages were lost", expected=self._next_number, found=number
            )
        self._next_number += 1
        return payload


def _mac(inbox: Inbox, number: int, payload: bytes) -> bytes:
    mac = hashlib.blake2b(digest_size=MAC_BYTES, key=inbox.key, person=_PERSON)
    mac.update(_PLACE.pack(inbox.inbox_id, number))
    mac.update(payload)
    return mac.digest()
