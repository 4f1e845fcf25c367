"""Control messages as UCX delivers them: messages for which no receive was posted."""

from __future__ import annotations

import ctypes
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass

from kvconnector.errors import KVConnectorError
from kvconnector.transport.tagged_messages import (
    CONTROL_TAG_BIT,
    MAX_CONTROL_PER_CALL,
    MAX_UNSENT_CONTROL_BYTES,
    Buffer,
    ControlEvent,
    ControlMessage,
    ControlRefused,
)
from kvconnector.transport.ucx.abi import IN_PROGRESS, OK
from kvconnector.transport.ucx.libucp import Libucp, Unexpected
from kvconnector.transport.ucx.requests import RequestTable


@dataclass(slots=True, eq=False)
class _Arriving:
    """A message that is being received into `memory`, which is None if that failed."""

    nbytes: int
    memory: bytearray | None
    is_over: bool = False

    def end(self, error: KVConnectorError | None) -> None:
        self.is_over = True
        if error is not None:
            self.memory = None


class ControlReceives:
    """The control messages of one worker. `arriving` has the incomplete messages of each tag, and those behind them, in
    their order.

    Most messages are complete when they are found; a long one comes in pieces, as fast as its sender sends them. Those
    of one tag may have as many bytes in all as a sender may have under way: it does not know how many were found, and
    would lose its link with the first that is dropped.
    """

    def __init__(self, libucp: Libucp, requests: RequestTable) -> None:
        self._libucp = libucp
        self._requests = requests
        self.arriving: dict[int, deque[_Arriving]] = {}
        self._held_bytes: Counter[int] = Counter()
        """Bytes of the messages in `arriving`, by tag."""
        self.has_begun = False
        """True if the last `take` posted operations for which UCX must be driven."""

    def take(self, limits: Mapping[int, int]) -> list[ControlEvent]:
        """See `UcxTransport.receive_control`."""
        self.has_begun = False
        if self.arriving:
            self._forget_closed(limits)
        events: list[ControlEvent] = []
        for _ in range(MAX_CONTROL_PER_CALL):
            message = self._libucp.find_unexpected(CONTROL_TAG_BIT, CONTROL_TAG_BIT)
            if message is None:
                break
            event = self._accept(message, limits)
            if event is not None:
                events.append(event)
        if self.arriving:
            events += self._arrived()
        return events

    def _forget_closed(self, limits: Mapping[int, int]) -> None:
        """Wait no more for messages of tags that are known no more. Their memory stays until UCX has released it, which
        it never does if the sender died in the middle of a message within the host.
        """
        for tag in self.arriving.keys() - limits.keys():
            del self.arriving[tag], self._held_bytes[tag]

    def _accept(self, message: Unexpected, limits: Mapping[int, int]) -> ControlEvent | None:
        """Begin to receive a message, unless it may take no memory. Returns its event if it is over at once."""
        handle, tag, nbytes = message
        limit_bytes = limits.get(tag, -1)
        queue = self.arriving.get(tag)
        if nbytes > limit_bytes or (queue and nbytes > self._room_bytes(tag, limit_bytes)):
            self.refuse(message)
            return ControlRefused(tag, nbytes)
        # one byte more: empty memory has no address, and a null address refuses a message
        memory = bytearray(nbytes + 1)
        # of one character for any length, since ctypes makes a type for every length of an array
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        posted = self._libucp.receive_unexpected(handle, address, nbytes)
        taken = memory if posted.status in (OK, IN_PROGRESS) else None
        if not (posted.request or queue):
            return _event_of(tag, nbytes, taken)
        arriving = _Arriving(nbytes, taken, is_over=not posted.request)
        if posted.request:
            buffer = Buffer(address, nbytes, "cpu", memory)
            self._requests.adopt(posted.request, tag, buffer, None, arriving.end)
            self.has_begun = True
        self.arriving.setdefault(tag, deque()).append(arriving)
        self._held_bytes[tag] += nbytes
        return None

    def _room_bytes(self, tag: int, limit_bytes: int) -> int:
        """Return how many bytes a tag may have besides those of its messages that are arriving."""
        return max(limit_bytes, MAX_UNSENT_CONTROL_BYTES) - self._held_bytes[tag]

    def _arrived(self) -> list[ControlEvent]:
        """Return the events of complete messages, each tag's in their order."""
        self._requests.collect()
        events: list[ControlEvent] = []
        for tag, queue in list(self.arriving.items()):
            while queue and queue[0].is_over:
                over = queue.popleft()
                self._held_bytes[tag] -= over.nbytes
                events.append(_event_of(tag, over.nbytes, over.memory))
            if not queue:
                del self.arriving[tag], self._held_bytes[tag]
        return events

    def refuse(self, message: Unexpected) -> None:
        """Receive a message without its content."""
        handle, tag, _ = message
        posted = self._libucp.receive_unexpected(handle, 0, 0)
        if posted.request:
            self._requests.adopt(posted.request, tag, Buffer(0, 0, "cpu", None), None)
            self.has_begun = True


def _event_of(tag: int, nbytes: int, memory: bytearray | None) -> ControlEvent:
    """Return the event of a finished message, whose bytes are the first of `memory` if it arrived."""
    if memory is None:
        return ControlRefused(tag, nbytes)
    return ControlMessage(tag, bytes(memoryview(memory)[:nbytes]))
