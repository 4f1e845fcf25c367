"""Messages of one turn of the driver to its peers: one batch for each link."""

from __future__ import annotations

from collections.abc import Callable

from kvconnector.session.commands import LinkId
from kvconnector.wire import encode_batch
from kvconnector.wire.messages import MAX_BATCH_MESSAGES

MAX_BATCH_BYTES = 32 << 10
"""Half of the least that a peer may be set to take, see `config.ControlConfig.max_message_bytes`."""


class Outgoing:
    """Encoded messages until the driver has nothing more to do, or a batch is full. Of each link they keep their order.

    `send(link, payload)` sends one message; it may call `forget`.
    """

    def __init__(self, send: Callable[[LinkId, bytes], None]) -> None:
        self._send = send
        self._queues: dict[LinkId, list[bytes]] = {}
        self._nbytes: dict[LinkId, int] = {}
        """Of each queue."""

    def add(self, link: LinkId, payload: bytes) -> None:
        """Queue a message."""
        queue = self._queues.get(link)
        if queue is not None:
            nbytes = self._nbytes[link] + len(payload)
            if nbytes <= MAX_BATCH_BYTES and len(queue) < MAX_BATCH_MESSAGES:
                queue.append(payload)
                self._nbytes[link] = nbytes
                return
            self.flush_link(link)
        self._queues[link], self._nbytes[link] = [payload], len(payload)

    def flush(self) -> None:
        """Send what is queued."""
        while self._queues:
            self.flush_link(next(iter(self._queues)))

    def flush_link(self, link: LinkId) -> None:
        """Send what is queued for a link, before it closes or changes its way."""
        queue = self._queues.pop(link, None)
        if queue is not None:
            del self._nbytes[link]
            self._send(link, encode_batch(queue))

    def forget(self, link: LinkId) -> None:
        """The link is gone."""
        self._queues.pop(link, None)
        self._nbytes.pop(link, None)
