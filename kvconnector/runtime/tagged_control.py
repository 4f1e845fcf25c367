"""Control messages over the transport: which links use it, and what comes on it.

Two workers greet each other on the control channel, which proves who they are, and each names an inbox. From then on
their messages travel as sealed control messages of the transport, see `control.sealed`: only the driver's thread has to
be woken for one, and nobody while it moves chunks. The consumer changes over when it has the answer to its hello, the
producer when the first message of the consumer has come, so no message can overtake one on the other channel.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import TypeAlias

from kvconnector.control.base import MessageTooLargeError
from kvconnector.control.refusals import Refusals
from kvconnector.control.sealed import OVERHEAD_BYTES, ForgedMessageError, Inbox, Opener, Sealer
from kvconnector.errors import KVConnectorError, PeerLostError
from kvconnector.session.commands import LinkId
from kvconnector.transport import Transport
from kvconnector.transport.base import (
    CONTROL_TAG_BIT,
    MAX_CONTROL_PER_CALL,
    ControlFailed,
    ControlMessage,
)
from kvconnector.wire.messages import ControlInbox

logger = logging.getLogger(__name__)

MAX_CLOSED_INBOXES = 4096
"""Closed inboxes that are remembered: messages that were on their way to one are no reason for a warning."""


Tagged: TypeAlias = tuple[LinkId, bytes | KVConnectorError]
"""A message of the peer at a link; or why the link cannot go on: messages were lost, in one direction or the other."""


@dataclass(slots=True, eq=False)
class _LinkState:
    """One link. `endpoint` 0: nothing goes over the transport. `answers_only`: nor before the peer has sent there."""

    tag: int = 0
    opener: Opener | None = None
    peer: ControlInbox | None = None
    sealer: Sealer | None = None
    endpoint: int = 0
    answers_only: bool = False


class TaggedControl:
    """The links of one worker whose messages travel over the transport. One thread, the transport's owner, calls it.

    Not `enabled`, it offers this to nobody, and only drops what comes all the same.
    """

    def __init__(self, transport: Transport, *, max_message_bytes: int, enabled: bool) -> None:
        self._transport = transport
        self._max_message_bytes = max_message_bytes
        self._enabled = enabled
        self._states: dict[LinkId, _LinkState] = {}
        self._links: dict[int, LinkId] = {}
        self._limits: dict[int, int] = {}
        self._closed: deque[int] = deque(maxlen=MAX_CLOSED_INBOXES)
        self.refusals = Refusals(logger)
        self.has_more = False

    def open_inbox(self, link: LinkId) -> ControlInbox | None:
        """Open an inbox for a link, to be named in our greeting; None where control messages stay where they are."""
        if not self._enabled:
            return None
        inbox = Inbox.fresh()
        state = self._states.setdefault(link, _LinkState())
        state.tag = CONTROL_TAG_BIT | inbox.inbox_id
        state.opener = Opener(inbox)
        self._links[state.tag] = link
        self._limits[state.tag] = self._max_message_bytes + OVERHEAD_BYTES
        return ControlInbox(
            inbox_id=inbox.inbox_id, key=inbox.key, max_message_bytes=self._max_message_bytes
        )

    def set_peer_inbox(self, link: LinkId, peer: ControlInbox | None) -> None:
        """The peer's greeting named its inbox. Only the first counts."""
        if peer is None or not self._enabled:
            return
        state = self._states.setdefault(link, _LinkState())
        if state.peer is None:
            state.peer = peer
            state.sealer = Sealer(Inbox(peer.inbox_id, peer.key))

    def answer(self, link: LinkId, endpoint: int) -> ControlInbox | None:
        """Greet a peer back: our inbox, if it has named its own. Once it has written there, we write by `endpoint`."""
        state = self._states.get(link)
        if state is None or state.peer is None:
            return None
        state.endpoint, state.answers_only = endpoint, True
        return self.open_inbox(link)

    def open(self, link: LinkId, endpoint: int) -> None:
        """From now on write to the peer by `endpoint`, if both sides have named an inbox."""
        state = self._states.get(link)
        if state is not None and state.peer is not None:
            state.endpoint, state.answers_only = endpoint, False

    def close_endpoint(self, link: LinkId) -> None:
        """Write nothing more over the transport: the endpoint is closed."""
        state = self._states.get(link)
        if state is not None:
            state.endpoint = 0

    def remove(self, link: LinkId) -> None:
        """Forget a link. Idempotent."""
        state = self._states.pop(link, None)
        if state is not None and state.tag:
            del self._links[state.tag], self._limits[state.tag]
            self._closed.append(state.tag)

    def send(self, link: LinkId, payload: bytes) -> bool:
        """Send a message over the transport, if the link uses it by now; whether it does.

        Raises:
            MessageTooLargeError: the peer takes no message of this length; nothing was sent.
            PeerLostError: the link is broken.
        """
        state = self._states.get(link)
        if state is None or state.peer is None or state.sealer is None or not state.endpoint:
            return False
        if state.answers_only and not (state.opener is not None and state.opener.has_opened):
            return False
        limit_bytes = min(self._max_message_bytes, state.peer.max_message_bytes)
        if len(payload) > limit_bytes:
            raise MessageTooLargeError(
                "message is too long for the control channel",
                message_bytes=len(payload),
                max_message_bytes=limit_bytes,
            )
        tag = CONTROL_TAG_BIT | state.peer.inbox_id
        self._transport.send_control(state.endpoint, tag, state.sealer.seal(payload))
        return True

    def receive(self, *, progress: bool = False) -> list[Tagged]:
        """What came, in order. Ask again while it `has_more`. `progress`: see `Transport.receive_control`."""
        arrived = self._transport.receive_control(self._limits, progress=progress)
        self.has_more = len(arrived) >= MAX_CONTROL_PER_CALL
        events: list[Tagged] = []
        for event in arrived:
            if isinstance(event, ControlMessage):
                events += self._open(event)
            elif isinstance(event, ControlFailed):
                events += [
                    (link, event.error)
                    for link, state in self._states.items()
                    if state.endpoint == event.endpoint
                ]
            elif event.tag not in self._closed:
                reason = "too long" if event.tag in self._links else "unknown link"
                self.refusals.note("a message over UCX", reason, f"{event.nbytes} bytes")
        return events

    def _open(self, message: ControlMessage) -> list[Tagged]:
        link = self._links[message.tag]
        opener = self._states[link].opener
        assert opener is not None  # made with the tag
        try:
            return [(link, opener.open(message.payload))]
        except ForgedMessageError as error:
            self.refusals.note("a message over UCX", "forged", str(error))
        except PeerLostError as error:
            return [(link, error)]
        return []
